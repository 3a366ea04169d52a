"""Sampling with vLLM, on a copy of the policy's weights that is brought up to date and verified before each rollout.

Weights go by way of a folder, in the memory of the host where vLLM is on it, or straight to vLLM's processes.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict
from components.policy.packing import TokenSequence, pack
from components.rollout.sampler import Completion
from components.rollout.vllm.config import WeightsBy
from components.rollout.vllm.requests import Request, SampledTokens, completion_requests, completions
from components.rollout.vllm.verification import verify_logprobs

MAX_PROBE_TOKENS = 16
"""Completion tokens of a probe: enough to tell weights apart, and at other temperatures than 1 each costs a request."""


class Engine(Protocol):
    """What `VllmSampler` samples with, tokens in and tokens out.

    It is an engine beside the trainer (`VllmEngine`) or servers (`VllmServers`).
    """

    weights_by: WeightsBy
    """How new weights come: see `VllmConfig`."""
    shared: bool
    """Whether all processes of a run use the same engine, so that only one of them sends the weights."""

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        """Return the completions of each request, with the log-probabilities of their tokens."""
        ...

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """Return the log-probability of each completion token at this temperature, for each copy of the weights.

        Compared with the trainer's, it shows whether the engine computes as the trainer does.
        """
        ...

    def load_weights(self, folder: Path, version: int) -> None:
        """Sample from the weights in `folder` from now on, and reuse nothing that was computed with others.

        StaleWeightsError where it does not compute with exactly these weights afterwards, rounded to its own precision.
        The folder is a Hugging Face one (safetensors), and stays until the next is loaded: an engine that has to start
        again reads it once more. Each version has another number.
        """
        ...

    def receive_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `load_weights`, from this process's memory; the tensors have the names that a folder gives them."""
        ...

    def expect_weights(self, version: int) -> None:
        """As `load_weights`, for weights that another process has sent."""
        ...

    def sleep(self) -> None:
        """See `Sampler`."""
        ...

    def close(self) -> None:
        """See `Sampler`."""
        ...


class VllmSampler:
    """A `Sampler` on an engine with a copy of the weights."""

    def __init__(
        self, engine: Engine, checkpoint: Checkpoint, *, temperature: float, max_mismatch: float, folder: Path
    ) -> None:
        """Weights that go by files are written to `folder`."""
        self.engine, self._checkpoint = engine, checkpoint
        self._temperature, self._max_mismatch = temperature, max_mismatch
        self._folder = folder
        self._version: int | None = None
        self._logprobs_M: Tensor | None = None

    def generate(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Sampler`."""
        requests = completion_requests(
            self._checkpoint,
            questions,
            num_samples=num_samples,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        return completions(self._checkpoint, requests, self.engine.complete(requests))

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """See `Sampler`."""
        self._policy = policy
        self._probes = [TokenSequence(each.prompt_ids, each.completion_ids[:MAX_PROBE_TOKENS]) for each in probes]
        # The same in each process: a pass may wait for that of every other.
        longest = max(map(len, self._probes))
        self._batches = pack(self._probes, max_tokens=longest, device=self._checkpoint.device)

    def update_weights(self, version: int) -> float:
        """See `Sampler`; a version that the engine has is not sent again."""
        started = time.monotonic()
        if version != self._version:
            previous, self._version = self._version, version
            if self.engine.weights_by == "folder":
                self._write(version)
                self.engine.load_weights(self._folder / str(version), version)
            else:
                self._send(version)
            self._verify()
            self._policy.ranks.barrier("the end of loading weights")
            if previous is not None and self._policy.ranks.is_main:
                shutil.rmtree(self._folder / str(previous), ignore_errors=True)
        return time.monotonic() - started

    def sleep(self) -> None:
        """See `Sampler`."""
        self.engine.sleep()

    def close(self) -> None:
        """See `Sampler`."""
        self.engine.close()

    def _send(self, version: int) -> None:
        ranks = self._policy.ranks
        is_sender = ranks.is_main or not self.engine.shared
        with self._policy.gather_full_parameters():
            if is_sender:
                self.engine.receive_weights(merged_state_dict(self._checkpoint.model), version)
        ranks.barrier("the sending of weights")
        if not is_sender:
            self.engine.expect_weights(version)

    def _write(self, version: int) -> None:
        with self._policy.gather_full_parameters():
            if self._policy.ranks.is_main:
                partial = self._folder / f".{version}.partial"
                self._remove_others(keep=str(version - 1))
                partial.mkdir()  # without parents: a folder that a guard has removed is not made again
                save(self._checkpoint, partial)
                partial.rename(self._folder / str(version))
        self._policy.ranks.barrier("the writing of weights")

    def _remove_others(self, keep: str) -> None:
        """Remove older versions, and what a run that was killed has left."""
        for path in self._folder.glob("*"):
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)

    def _verify(self) -> None:
        """Compare the log-probabilities of the probes, as the engine and as the trainer computes them."""
        num_tokens = sum(len(probe.completion_ids) for probe in self._probes)
        new_M = completion_logprobs(self._policy, self._batches, num_tokens).cpu()
        for name, logprobs in self.engine.score(self._probes, self._temperature).items():
            sampler_M = torch.tensor([logprob for each in logprobs for logprob in each], dtype=torch.float64)
            verify_logprobs(sampler_M, new_M, self._logprobs_M, max_mismatch=self._max_mismatch, name=name)
        self._logprobs_M = new_M
