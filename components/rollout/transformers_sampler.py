"""Sampling with transformers in this process: no second copy of the weights, so nothing to keep in sync."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from components.policy.attention import use_packed_attention
from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.logprobs import use_float32_logits
from components.policy.lora import copy_merged_weights
from components.policy.packed_weights import packed_weights
from components.policy.packing import TokenSequence
from components.rollout import decoding, padded_sampling
from components.rollout.sampler import Completion, PartialCompletions, Sampling
from components.rollout.trajectory import RolloutContext, Status, Trajectory
from components.shared.problem import Problem

_Key = TypeVar("_Key")


@dataclass
class TransformersSampler:
    """A `Sampler` that generates from the weights that `checkpoint` has at the moment of the call."""

    checkpoint: Checkpoint
    max_batch_size: int
    """Completions generated at once; bounds memory."""

    @torch.inference_mode()
    def generate(
        self, problems: Sequence[Problem], sampling: Sampling, partial: PartialCompletions | None = None
    ) -> list[list[Completion]]:
        """See `Sampler`; segments change nothing in what is sampled, where weights and seed stay the same."""
        # A random number per completion and place, so that samples do not depend on how they are batched.
        generator = torch.Generator().manual_seed(sampling.seed)
        shape = (len(problems), sampling.num_samples, sampling.max_new_tokens)
        uniform_PGT = torch.rand(*shape, dtype=torch.float64, generator=generator).to(self.checkpoint.device)
        groups = RolloutContext(self.checkpoint, sampling).begin(problems, partial)
        trajectories = {
            (index, number): each
            for index, group in enumerate(groups)
            for number, each in enumerate(group)
            if isinstance(each, Trajectory)
        }

        def sampled() -> dict[tuple[int, int], Trajectory]:
            return {key: each for key, each in trajectories.items() if each.status is Status.SAMPLING}

        with ExitStack() as stack:
            for each in trajectories.values():
                stack.callback(each.close)
            if not self.checkpoint.is_padded:
                use_packed_attention(self.checkpoint.model)
                use_float32_logits(self.checkpoint.model.get_output_embeddings())
                stack.enter_context(packed_weights(self.checkpoint.model))
            prompts = {index: each.prompt_ids for (index, _), each in sampled().items() if not each.has_forked}
            for batch in self._batches(prompts, sampling.num_samples):
                every = [trajectories.get((index, number)) for index in batch for number in range(sampling.num_samples)]
                rows = [None if each is None or each.has_forked else each for each in every]
                uniform_RT = uniform_PGT[batch].flatten(0, 1)
                self._decode([prompts[index] for index in batch], rows, sampling.temperature, uniform_RT)
            while forked := sampled():
                # As many prompts at once as before: each is now a whole conversation.
                prompts_now = {key: each.prompt_ids for key, each in forked.items()}
                for keys in self._batches(prompts_now, sampling.num_samples):
                    own = [forked[key] for key in keys]
                    uniform_RT = torch.stack([uniform_PGT[key] for key in keys])
                    self._decode([each.prompt_ids for each in own], own, sampling.temperature, uniform_RT)
        return [[each.completion() if isinstance(each, Trajectory) else each for each in group] for group in groups]

    def _decode(
        self,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Trajectory | None],
        temperature: float,
        uniform_RT: Tensor,
    ) -> None:
        """Sample trajectories, as many of each prompt, until they are done or have forked."""
        if self.checkpoint.is_padded:
            padded_sampling.run_to_completion(self.checkpoint, rows, temperature, uniform_RT)
        else:
            batch = decoding.Decoding(self.checkpoint, prompts, len(rows) // len(prompts), temperature)
            batch.run(rows, uniform_RT)

    def _batches(self, prompts: Mapping[_Key, Sequence[int]], num_samples: int) -> Iterator[list[_Key]]:
        """Yield the prompts, by their keys, whose completions are decoded together."""
        # Prompts of similar length waste the least padding in their cache.
        order = sorted(prompts, key=lambda index: len(prompts[index]))
        size = max(1, self.max_batch_size // num_samples)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """Do nothing: the weights are those of the policy."""

    def update_weights(self, version: int) -> float:
        """Do nothing: the weights are those of the policy."""
        return 0.0

    def sleep(self) -> None:
        """Do nothing: there is no memory beside the policy's."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""


class ShardedSampler(TransformersSampler):
    """Generates from a full copy of weights that training shards over processes (ZeRO 3).

    Decoding takes hundreds of passes, and each process another number of them: gathering every layer for each pass
    would be slow, and processes would wait for passes that never come.
    """

    def __init__(self, checkpoint: Checkpoint, max_batch_size: int) -> None:
        """Copy a model that is not sharded yet, and has no adapters."""
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
