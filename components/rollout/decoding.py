"""Decoding with transformers: all trajectories of a batch in step, until the last is done.

Each call of the model reads one token of every row that samples, and the whole observation of every row whose
environment has answered, end to end. It leaves out rows that wait for their environments. How long they wait is counted
in calls, not in seconds: so the tokens alone decide which rows are computed together, and how results are rounded.

Shape suffixes:
    P  prompts of the batch, R  rows: completions in progress   V  vocabulary, B  blocks of it, C  tokens of a block
    T  tokens that may be sampled   X  tokens of a call, end to end
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.rollout.cache import GroupCache
from components.rollout.trajectory import Status, Trajectory

_CALLS_TO_ANSWER = 8
"""Calls of the model that go on while an environment answers; after them the batch waits for it."""


class Decoding:
    """One batch of trajectories, which `run` samples to their ends."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]], group_size: int, temperature: float
    ) -> None:
        self.checkpoint, self.prompts, self.temperature = checkpoint, prompts, temperature
        self.cache = GroupCache([len(prompt) for prompt in prompts], group_size, checkpoint.device)

    def run(self, trajectories: Sequence[Trajectory], uniform_RT: Tensor) -> None:
        """Sample until every trajectory, group after group, is done or has forked.

        `uniform_RT` has a number in [0, 1) for each token that may be sampled.
        """
        self._trajectories = trajectories
        # Each prompt is read once for its group.
        position_X = torch.tensor([place for prompt in self.prompts for place in range(len(prompt))])
        logits_RV = self._logits(self.prompts, position_X.to(self.checkpoint.device))
        logits_RV = logits_RV.repeat_interleave(self.cache.group_size, 0)
        prompt_ids = [each.prompt_ids for each in trajectories]
        ready = self.cache.numbers
        # For each completion that waits for its environment, the number of calls after which it receives the answer.
        due: dict[int, int] = {}
        num_calls = 0
        while ready or due:
            if ready:
                self._sample_next(ready, logits_RV, uniform_RT)
            num_calls += 1
            statuses = {number: trajectories[number].status for number in ready}
            waiting = [number for number, status in statuses.items() if status is Status.WAITING]
            due |= dict.fromkeys(waiting, num_calls + _CALLS_TO_ANSWER)
            if due and Status.SAMPLING not in statuses.values():
                num_calls = max(num_calls, min(due.values()))  # no row has a token to read: the next answer is due now
            for number in [number for number, call in due.items() if call <= num_calls]:
                del due[number]
                answer = trajectories[number].pending_answer
                assert answer is not None, "a waiting trajectory has a pending answer"
                trajectories[number].receive(answer.result())
            # A trajectory that has forked goes on in another batch, as its prompt is another.
            ended = [not trajectories[number].goes_on(prompt_ids[number]) for number in self.cache.numbers]
            if any(ended):
                self.cache.drop(torch.tensor(ended, device=self.checkpoint.device))
            ready = [number for number in self.cache.numbers if number not in due]
            if ready:
                unread = [trajectories[number].ids[self.cache.num_read[number] :] for number in ready]
                logits_RV = self._logits(unread, self.cache.begin_call(ready, [len(ids) for ids in unread]))

    def _logits(self, sequences: Sequence[Sequence[int]], position_X: Tensor) -> Tensor:
        """Run the model on new tokens of each sequence, all in one row; return the logits at the last of each.

        Attention reads the earlier tokens from the cache, which it gets as the layout.
        """
        model, device = self.checkpoint.model, self.checkpoint.device
        ids_X = torch.tensor([token for ids in sequences for token in ids], device=device)
        hidden_1XD = model.get_decoder()(
            input_ids=ids_X[None], position_ids=position_X[None], layout=self.cache, use_cache=False
        ).last_hidden_state
        last_R = torch.tensor([len(ids) for ids in sequences], device=device).cumsum(0) - 1
        logits_RV: Tensor = model.get_output_embeddings()(hidden_1XD[0, last_R])
        return logits_RV

    def _sample_next(self, numbers: Sequence[int], logits_RV: Tensor, uniform_RT: Tensor) -> None:
        """Sample the next token of each of these completions from its logits, and add it to its trajectory."""
        places = [self._trajectories[number].num_sampled for number in numbers]
        token_R, logprob_R = self._sample(logits_RV, uniform_RT[list(numbers), places])
        for number, token, logprob in zip(numbers, token_R.tolist(), logprob_R.tolist(), strict=True):
            self._trajectories[number].append(token, logprob)

    def _sample(self, logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row with its log-probability: the likeliest at temperature 0, else a random one."""
        if self.temperature == 0:
            token_R = logits_RV.argmax(-1)
        elif self.temperature != 1:
            logits_RV = logits_RV / self.temperature
        # On CPUs the probabilities overwrite the logits, whose memory is in the processor's caches.
        probability_RV = torch.softmax(logits_RV, -1, out=None if logits_RV.is_cuda else logits_RV)
        if self.temperature != 0:
            token_R = inverse_cdf(probability_RV, uniform_R)
        return token_R, probability_RV.gather(1, token_R[:, None]).squeeze(1).log()


def inverse_cdf(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return for each row the index whose share of the cumulative weights contains `uniform_R`, in [0, 1).

    Weights are summed in float64, so that rounding drops no token. Blocks of about sqrt(V) weights are summed first:
    then only the weights of one block per row need a cumulative sum.
    """
    vocabulary_size = weights_RV.shape[1]
    block_size = math.isqrt(vocabulary_size) + 1
    num_in_whole_blocks = vocabulary_size // block_size * block_size
    last_sum_R1 = weights_RV[:, num_in_whole_blocks:].sum(-1, keepdim=True)
    whole_sums_RB = weights_RV[:, :num_in_whole_blocks].unflatten(1, (-1, block_size)).sum(-1)
    stops_RB = cumulative_sum(torch.cat([whole_sums_RB, last_sum_R1], dim=1))
    threshold_R1 = uniform_R[:, None] * stops_RB[:, -1:]
    block_R1 = torch.searchsorted(stops_RB, threshold_R1, right=True)
    bounds_RB = torch.nn.functional.pad(stops_RB, (1, 0))
    start_R1, stop_R1 = bounds_RB.gather(1, block_R1), bounds_RB.gather(1, block_R1 + 1)
    # The place of the threshold in its block, in [0, 1). Rounding may give 1, which would be past the last weight.
    uniform_R1 = ((threshold_R1 - start_R1) / (stop_R1 - start_R1)).clamp(max=1 - 2**-53)
    index_RC = block_R1 * block_size + torch.arange(block_size, device=weights_RV.device)
    block_RC = weights_RV.gather(1, index_RC.clamp(max=vocabulary_size - 1))
    block_RC.masked_fill_(index_RC >= vocabulary_size, 0)
    stops_RC = cumulative_sum(block_RC)
    place_R1 = torch.searchsorted(stops_RC, uniform_R1 * stops_RC[:, -1:], right=True)
    return (block_R1 * block_size + place_R1).squeeze(1)


def cumulative_sum(weights_RC: Tensor) -> Tensor:
    """Return the cumulative sum of each row in float64; equal weights give equal sums, on GPUs too."""
    return cumulative_sum_by_product(weights_RC) if weights_RC.is_cuda else weights_RC.cumsum(-1, dtype=torch.float64)


def cumulative_sum_by_product(weights_RC: Tensor) -> Tensor:
    """Return the cumulative sum by a matrix of ones: on GPUs, torch refuses cumsum as it is not deterministic there."""
    size = weights_RC.shape[1]
    ones_CC = torch.ones(size, size, dtype=torch.float64, device=weights_RC.device).triu()
    return weights_RC.double() @ ones_CC
