"""Keeping a sampler's own copy of the weights in step with the policy, and verifying it each time.

Weights go by way of a folder, in the memory of the host where the sampler is on it, or straight to vLLM's processes.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import PolicyEngine
from components.policy.logprobs import completion_logprobs
from components.policy.lora import plain_state_dict
from components.policy.sequences import TokenSequence, micro_batches
from components.rollout.sampler import Sampler
from components.rollout.staleness import refuse_stale

MAX_PROBE_TOKENS = 16
"""Completion tokens of a probe: enough to tell weights apart, and at other temperatures than 1 each costs a request."""


class WeightSync:
    """The way of the weights to a sampler; all processes take it together."""

    def __init__(
        self,
        sampler: Sampler,
        policy: PolicyEngine,
        checkpoint: Checkpoint,
        probes: Sequence[TokenSequence],
        *,
        temperature: float,
        max_mismatch: float,
        folder: Path,
    ) -> None:
        self._sampler, self._policy, self._checkpoint = sampler, policy, checkpoint
        self._temperature, self._max_mismatch = temperature, max_mismatch
        self._folder = folder
        self._probes = [TokenSequence(each.prompt_ids, each.completion_ids[:MAX_PROBE_TOKENS]) for each in probes]
        # The same in each process: a pass may wait for that of every other.
        longest = max(map(len, self._probes))
        self._batches = micro_batches(self._probes, max_tokens=longest, device=checkpoint.device)
        self._version: int | None = None
        self._logprobs_M: Tensor | None = None

    def __call__(self, version: int) -> float:
        """Give the sampler the policy's weights, unless it has that version; return the seconds it took."""
        started = time.monotonic()
        if version != self._version:
            before, self._version = self._version, version
            if self._sampler.weights_by == "folder":
                self._write(version)
                self._sampler.load_weights(self._folder / str(version), version)
            else:
                self._send(version)
            self._prove()
            self._policy.ranks.meet("the end of loading weights")
            if before is not None and self._policy.ranks.first:
                shutil.rmtree(self._folder / str(before), ignore_errors=True)
        return time.monotonic() - started

    def _send(self, version: int) -> None:
        ranks, sampler = self._policy.ranks, self._sampler
        sender = ranks.first or not sampler.shared
        with self._policy.whole_weights():
            if sender:
                sampler.take_weights(plain_state_dict(self._checkpoint.model), version)
        ranks.meet("the sending of weights")
        if not sender:
            sampler.expect_weights(version)

    def _write(self, version: int) -> None:
        with self._policy.whole_weights():
            if self._policy.ranks.first:
                partial = self._folder / f".{version}.partial"
                self._sweep(version)
                partial.mkdir()  # in a folder that is there, and not made again once a guard has removed it
                save(self._checkpoint, partial)
                partial.rename(self._folder / str(version))
        self._policy.ranks.meet("the writing of weights")

    def _sweep(self, version: int) -> None:
        """Remove what was written for a version before this one's predecessor, by a run that was killed too."""
        kept = str(version - 1)
        for left in self._folder.glob("*"):
            if left.name != kept:
                shutil.rmtree(left, ignore_errors=True)

    def _prove(self) -> None:
        """Compare what the sampler says of the probes with what the trainer says."""
        num_tokens = sum(len(probe.completion_ids) for probe in self._probes)
        new_M = completion_logprobs(self._policy, self._batches, num_tokens).cpu()
        told = self._sampler.prompt_logprobs(self._probes, self._temperature)
        for name, logprobs in told.items():
            sampler_M = torch.tensor([logprob for each in logprobs for logprob in each], dtype=torch.float64)
            refuse_stale(sampler_M, new_M, self._logprobs_M, max_mismatch=self._max_mismatch, name=name)
        self._logprobs_M = new_M
