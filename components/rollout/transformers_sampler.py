"""Sampling with transformers in this process, with the policy's own weights, except where training shards them."""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

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

_Key = tuple[int, int]
"""The index of a problem, and the number of a completion in its group."""


@dataclass
class TransformersSampler:
    """A `Sampler` that uses the weights of `checkpoint` at the time of each call."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Completions generated at once; bounds memory."""

    @torch.inference_mode()
    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        """See `Sampler`."""
        # A random number per completion and place, so that samples do not depend on how they are batched.
        generator = torch.Generator().manual_seed(sampling.seed)
        shape = (len(problems), sampling.num_samples, sampling.max_new_tokens)
        uniform_PGT = torch.rand(*shape, dtype=torch.float64, generator=generator).to(self.checkpoint.device)
        groups = RolloutContext(self.checkpoint, sampling).begin(problems)
        trajectories = {
            (index, number): each for index, group in enumerate(groups) for number, each in enumerate(group)
        }
        with ExitStack() as stack:
            for trajectory in trajectories.values():
                stack.callback(trajectory.close)
            if not self.checkpoint.is_padded:
                use_packed_attention(self.checkpoint.model)
                use_float32_logits(self.checkpoint.model.get_output_embeddings())
                stack.enter_context(packed_weights(self.checkpoint.model))
            # If a prompt fills the context, its whole group is done already.
            prompts = {index: each.prompt_ids for (index, _), each in _still_sampling(trajectories).items()}
            numbers = range(sampling.num_samples)
            keys_by_prompt = [(prompt, [(index, number) for number in numbers]) for index, prompt in prompts.items()]
            self._decode(keys_by_prompt, trajectories, sampling, uniform_PGT)
            while forked := _still_sampling(trajectories):  # each has its own prompt
                keys_by_prompt = [(each.prompt_ids, [key]) for key, each in forked.items()]
                self._decode(keys_by_prompt, forked, sampling, uniform_PGT)
        return [[each.completion() for each in group] for group in groups]

    def _decode(
        self,
        keys_by_prompt: Sequence[tuple[tuple[int, ...], list[_Key]]],
        trajectories: Mapping[_Key, Trajectory],
        sampling: Sampling,
        uniform_PGT: Tensor,
    ) -> None:
        """Sample until each trajectory is done or has forked, given the keys of the trajectories of each prompt."""
        # Prompts of similar length need the least padding. A prompt after a fork is long, and counts as a group.
        ordered = sorted(keys_by_prompt, key=lambda group: len(group[0]))
        num_groups = max(1, self.max_batch_size // sampling.num_samples)
        for start in range(0, len(ordered), num_groups):
            batch = ordered[start : start + num_groups]
            prompts = [prompt for prompt, _ in batch]
            keys = [key for _, keys in batch for key in keys]
            rows = [trajectories[key] for key in keys]
            uniform_RT = torch.stack([uniform_PGT[key] for key in keys])
            if self.checkpoint.is_padded:
                padded_sampling.run_to_completion(self.checkpoint, rows, sampling.temperature, uniform_RT)
            else:
                group_size = len(keys) // len(prompts)
                decoding.Decoding(self.checkpoint, prompts, group_size, sampling.temperature).run(rows, uniform_RT)

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """Do nothing: the weights are those of the policy."""

    def update_weights(self, version: int) -> float:
        """Do nothing: the weights are those of the policy."""
        return 0.0

    def sleep(self) -> None:
        """Do nothing: all memory is the policy's."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""


def _still_sampling(trajectories: Mapping[_Key, Trajectory]) -> dict[_Key, Trajectory]:
    """Return the trajectories that are not done."""
    return {key: each for key, each in trajectories.items() if each.status is Status.SAMPLING}


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
