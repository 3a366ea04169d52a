"""The teacher of on-policy distillation: a frozen model in this process, or one behind a vLLM server."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint, create, load, load_without_weights
from components.policy.engine import torch_dtype
from components.policy.packing import TokenSequence
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, local_model
from components.train_grpo.api import RETRIES, Api
from components.train_grpo.config import TeacherConfig, TrainGRPOConfig
from components.train_grpo.reference import Reference

_MAX_REQUESTS = 64
"""Requests in flight at once, in each process."""
_REQUEST_S = 600.0
"""Time for one request, which may wait in the server for others."""


def load_teacher(teacher: TeacherConfig, config: TrainGRPOConfig, student: Checkpoint) -> "Reference | TeacherServer":
    """Return the teacher; PipelineError where its tokenizer is not that of the student."""
    folder, dtype = Path(local_model(teacher.base)), torch_dtype(config.engine)
    if teacher.server:
        loaded = load_without_weights(folder)
    elif (folder / PIPELINE_FILE).is_file():
        loaded = load(folder, dtype=dtype)
    else:
        asked = student.config.model_copy(update={"base": teacher.base})
        loaded = create(asked, [], seed=config.seed, dtype=dtype)
    if loaded.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise PipelineError(
            f"train_grpo.teacher.base: {teacher.base} has another tokenizer than the policy; it has to be the same"
        )
    if teacher.server:
        return TeacherServer(teacher.server, teacher.key_variable)
    return Reference(loaded.model, teacher.placement, temperature=config.sampling.temperature)


class TeacherServer:
    """A vLLM server, which returns the log-probabilities of the tokens of a prompt at temperature 1."""

    def __init__(self, url: str, key_variable: str | None = None) -> None:
        """`url` is that of the API; PipelineError where the environment has no `key_variable`."""
        url, key = f"{url.rstrip('/')}/completions", "train_grpo.teacher"
        self._where = f"{key}: {url}"
        self._api = Api(url, key, key_variable, retries=RETRIES, timeout_s=_REQUEST_S, maxsize=_MAX_REQUESTS)

    def logprobs(self, sequences_B: Sequence[TokenSequence], indices: Collection[int]) -> Tensor:
        """Return the log-probability of each of the M sampled tokens; NaN for completions not in `indices`.

        PipelineError where it returns no log-probabilities of prompts; see `Api.post`.
        """
        with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
            branches = [(b, branch) for b in indices for branch in sequences_B[b].branches]
            known: dict[int, list[float]] = {}
            for (b, _), scores in zip(branches, threads.map(self._score, [each for _, each in branches]), strict=True):
                known.setdefault(b, []).extend(scores)
        return torch.tensor(
            [x for b, each in enumerate(sequences_B) for x in known.get(b, [torch.nan] * each.num_sampled)],
            dtype=torch.float64,
        )

    def _score(self, sequence: TokenSequence) -> list[float]:
        """Return the log-probability of each sampled token of a sequence without forks."""
        ids = [*sequence.prompt_ids, *sequence.completion_ids]
        answer = self._api.post({"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1})
        start = len(sequence.prompt_ids)
        try:
            of_places = answer["choices"][0]["prompt_logprobs"]
            places = [start + place for place in sequence.sampled_places]
            return [float(of_places[place][str(ids[place])]["logprob"]) for place in places]
        except (LookupError, TypeError):
            raise PipelineError(f"{self._where} returns no log-probabilities of the prompt; vLLM does") from None
