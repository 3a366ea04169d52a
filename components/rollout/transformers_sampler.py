"""Sampling with transformers in this process, with the policy's own weights, except where training shards them."""

import copy
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from components.policy.attention import use_packed_attention
from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.lora import copy_merged_weights
from components.policy.output_layer import use_float32_logits
from components.policy.packed_weights import packed_weights
from components.policy.packing import TokenSequence
from components.rollout import decoding, padded_sampling
from components.rollout.sampler import Completion, Sampling
from components.rollout.trajectory import RolloutContext, Status, Trajectory
from components.shared.problem import Problem


@dataclass
class TransformersSampler:
    """A `Sampler` that uses the weights of `checkpoint` at the time of each call."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Completions generated at once; bounds memory."""

    @torch.inference_mode()
    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        """See `Sampler`."""
        trajectories_PG = RolloutContext(self.checkpoint, sampling).begin(problems)
        trajectories = list(chain(*trajectories_PG))
        # A random number per completion and place, so that samples do not depend on how they are batched.
        shape, generator = (len(trajectories), sampling.max_new_tokens), torch.Generator().manual_seed(sampling.seed)
        uniform_RT = torch.rand(*shape, dtype=torch.float64, generator=generator).to(self.checkpoint.device)
        with ExitStack() as stack:
            for trajectory in trajectories:
                stack.callback(trajectory.close)
            if not self.checkpoint.is_padded:
                use_packed_attention(self.checkpoint.model)
                use_float32_logits(self.checkpoint.model.get_output_embeddings())
                stack.enter_context(packed_weights(self.checkpoint.model))
            # If a prompt fills the context, its whole group is done already.
            first_of_groups = range(0, len(trajectories), sampling.num_samples)
            groups = [range(first, first + sampling.num_samples) for first in first_of_groups]
            groups = [group for group in groups if trajectories[group[0]].status is Status.SAMPLING]
            while groups:
                self._decode(groups, trajectories, sampling, uniform_RT)
                # A trajectory that has forked goes on with its own prompt.
                forked = [number for number, each in enumerate(trajectories) if each.status is Status.SAMPLING]
                groups = [range(number, number + 1) for number in forked]
        return [[each.completion() for each in group] for group in trajectories_PG]

    def _decode(
        self,
        groups: Sequence[Sequence[int]],
        trajectories: Sequence[Trajectory],
        sampling: Sampling,
        uniform_RT: Tensor,
    ) -> None:
        """Sample until each trajectory in `groups` (the indices of those with one prompt) is done or has forked."""
        # Prompts of similar length need the least padding. A prompt after a fork is long, and counts as a group.
        ordered = sorted(groups, key=lambda group: len(trajectories[group[0]].prompt_ids))
        num_groups = max(1, self.max_batch_size // sampling.num_samples)
        for start in range(0, len(ordered), num_groups):
            batch = ordered[start : start + num_groups]
            numbers = list(chain(*batch))
            rows, uniform = [trajectories[number] for number in numbers], uniform_RT[numbers]
            if self.checkpoint.is_padded:
                padded_sampling.run_to_completion(self.checkpoint, rows, sampling.temperature, uniform)
            else:
                prompts = [trajectories[group[0]].prompt_ids for group in batch]
                decoding.Decoding(self.checkpoint, prompts, len(batch[0]), sampling.temperature).run(rows, uniform)

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """Do nothing: the weights are those of the policy."""

    def update_weights(self, version: int) -> float:
        """Do nothing: the weights are those of the policy."""
        return 0.0

    def sleep(self) -> None:
        """Do nothing: all memory is the policy's."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""


class ShardedSampler(TransformersSampler):
    """Samples from a full copy of weights that training shards over processes (ZeRO 3).

    Gathering every layer for each of hundreds of decoding passes would be slow. It would also hang: each process makes
    a different number of passes, and a gather waits for all processes.
    """

    def __init__(self, checkpoint: Checkpoint, max_batch_size: int) -> None:
        """Sample from a copy of the model of `checkpoint`, which is sharded later and has no adapters."""
        super().__init__(replace(checkpoint, model=copy.deepcopy(checkpoint.model)), max_batch_size)
        self._sharded = checkpoint.model

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """See `Sampler`."""
        self._policy = policy

    def update_weights(self, version: int) -> float:
        """See `Sampler`."""
        started = time.monotonic()
        with self._policy.gather_full_parameters():
            copy_merged_weights(self._sharded, to=self.checkpoint.model)
        return time.monotonic() - started
