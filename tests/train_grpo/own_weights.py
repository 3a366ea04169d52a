"""A sampler with weights of its own that needs no vLLM: transformers on a copy, which is loaded from folders."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from components.policy.attention import use_packed_attention
from components.policy.checkpoint import Checkpoint, load
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.rollout.decoding import Decoding
from components.rollout.sampler import Sampling
from components.rollout.trajectory import RolloutContext, Trajectory
from components.rollout.vllm.config import Synchronise, WeightsBy
from components.rollout.vllm.servers import Request, SampledTokens, Submit, VllmServers
from components.rollout.vllm.verification import weights_in
from tests import tiny
from tests.policy.plain import logprobs


class OwnWeights(VllmServers):
    """Keeps the weights of a version; one that is `stale` stays with the first that it was given."""

    shared, max_tokens = True, 100_000

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        *,
        stale: bool = False,
        weights_by: WeightsBy = "folder",
        synchronise: Synchronise = "weights",
    ) -> None:
        self.synchronise, self._start = synchronise, folder
        self._tokens, self._stale, self.weights_by = checkpoint, stale, weights_by
        self._model = load(folder, dtype=torch.float32).model
        self.versions: list[int] = []
        self.sampled_from: list[int] = []

    @torch.no_grad()
    def _complete(self, request: Request) -> list[SampledTokens]:
        checkpoint = replace(self._tokens, model=use_packed_attention(self._model))
        n, temperature, max_tokens, seed = (request.params[key] for key in ("n", "temperature", "max_tokens", "seed"))
        sampling = Sampling(num_samples=n, temperature=temperature, max_new_tokens=max_tokens, seed=seed)
        context = RolloutContext(checkpoint, sampling)
        rows = [Trajectory(context, tiny.PROBLEMS[0], request.prompt_ids) for _ in range(n)]
        generator = torch.Generator().manual_seed(seed)
        uniform_RT = torch.rand(n, max_tokens, dtype=torch.float64, generator=generator)
        Decoding(checkpoint, [request.prompt_ids], n, temperature).run(rows, uniform_RT)
        completions = [row.completion() for row in rows]
        return [SampledTokens(each.tokens.completion_ids, each.logprobs) for each in completions]

    @contextmanager
    def submitting(self) -> Iterator[Submit]:
        """See `VllmServers`: each request is answered at once."""

        def submit(request: Request) -> "Future[list[SampledTokens]]":
            answer: Future[list[SampledTokens]] = Future()
            answer.set_result(self._complete(request))
            return answer

        self.sampled_from.append(self.versions[-1])
        yield submit

    def set_weights(self, version: int, weights: Path | Mapping[str, Tensor] | None) -> None:
        """See `VllmServers`."""
        if weights is None:
            assert self.versions[-1] == version
            return
        assert isinstance(weights, Path) == (self.weights_by == "folder")
        if isinstance(weights, Path):
            weights = self._merged(weights) if self.synchronise == "adapters" else weights_in(weights)
        if not self._stale or not self.versions:
            self._model.load_state_dict(weights, strict=False)  # tied weights come once
        self.versions.append(version)

    def _merged(self, folder: Path) -> dict[str, Tensor]:
        """The weights of the start with the adapters of a folder merged into them."""
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        adapters, state = load_file(folder / "adapter_model.safetensors"), weights_in(self._start)
        for name in [name for name in adapters if ".lora_A." in name]:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            state[f"{layer}.weight"] += adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
        return state

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `VllmServers`."""
        scorer = LogprobModel(self._model, temperature=temperature)
        return {"a copy": [logprobs(scorer, [each], 1000).tolist() for each in sequences]}

    def sleep(self) -> None:
        """Hold no memory of a GPU."""

    def close(self) -> None:
        """Nothing is open."""
