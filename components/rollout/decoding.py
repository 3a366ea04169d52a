"""Decoding with transformers: all trajectories of a batch in step, until the last is done.

Each call of the model reads one token of every row that samples, and the whole observation of every row whose
environment has answered, end to end. A row that waits for its environment is left out. Its wait is counted in calls of
the model, never in seconds: so the tokens alone decide which rows are computed together, and how results are rounded.

Shape suffixes:
    R  completions in progress   V  vocabulary   B, C  blocks of the vocabulary, tokens of a block
    T  tokens that may be sampled, X  tokens of a call, end to end
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint
from components.rollout.cache import GroupCache
from components.rollout.trajectory import Status, Trajectory

_CALLS_TO_ANSWER = 8
"""Calls of the model that an environment has time for before the batch waits for its answer."""
_MAX_READ_TOKENS = 16_384
"""Tokens of partial completions that are read at once, counted by the longest; one at least is read."""


class Decoding:
    """One batch of trajectories, new ones and continued ones, to the end of the last."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]], group_size: int, temperature: float
    ) -> None:
        self.checkpoint, self.prompts, self.temperature = checkpoint, prompts, temperature
        self.cache = GroupCache([len(prompt) for prompt in prompts], group_size, checkpoint.device)

    def run(self, trajectories: Sequence[Trajectory | None], uniform_RT: Tensor) -> None:
        """Sample until every trajectory is done or has forked; they are in the order of their prompts.

        None is not sampled. `uniform` has a number in [0, 1) for each token that may be sampled.
        """
        self._active = {number: each for number, each in enumerate(trajectories) if each is not None}
        self._prompt_ids = {number: each.prompt_ids for number, each in self._active.items()}
        ready, logits_RV = self._read_first()
        due: dict[int, int] = {}
        calls = 0
        while ready or due:
            if ready:
                self._sample_next(ready, logits_RV, uniform_RT)
            calls += 1
            waiting = [number for number in ready if self._active[number].status is Status.WAITING]
            due |= dict.fromkeys(waiting, calls + _CALLS_TO_ANSWER)
            if due and not any(self._active[number].status is Status.SAMPLING for number in ready):
                calls = max(calls, min(due.values()))  # nothing else is to be computed meanwhile
            for number in [number for number, call in due.items() if call <= calls]:
                del due[number]
                asked = self._active[number].asked
                assert asked is not None, "a trajectory that waits has asked"
                self._active[number].receive(asked.result())
            self._drop_done()
            ready = [number for number in self.cache.numbers if number not in due]
            if ready:
                logits_RV = self._read(ready)

    def _read_first(self) -> tuple[list[int], Tensor]:
        """Read the prompts and the partial completions; return the numbers of all completions, and their logits."""
        device, lengths = self.checkpoint.device, self.cache.prompt_lengths
        ids_X = torch.tensor([token for prompt in self.prompts for token in prompt], device=device)
        position_X = torch.tensor([place for length in lengths for place in range(length)], device=device)
        logits_PV = self._logits(ids_X, position_X, torch.tensor(lengths, device=device).cumsum(0) - 1)
        self._drop_done()
        fresh = [number for number in self.cache.numbers if not self._active[number].ids]
        partial = [number for number in self.cache.numbers if self._active[number].ids]
        size = max(1, _MAX_READ_TOKENS // max((len(self._active[number].ids) for number in partial), default=1))
        parts = [self._read(partial[start : start + size]) for start in range(0, len(partial), size)]
        logits_RV = logits_PV[[number // self.cache.group_size for number in fresh]]
        return fresh + partial, torch.cat([logits_RV, *parts])

    def _read(self, numbers: Sequence[int]) -> Tensor:
        """Read what these completions have that is unread, in one call; return the logits of their next tokens."""
        unread = [self._active[number].ids[self.cache.num_read[number] :] for number in numbers]
        counts = [len(ids) for ids in unread]
        position_X = self.cache.begin_call(numbers, counts)
        ids_X = torch.tensor([token for ids in unread for token in ids], device=position_X.device)
        return self._logits(ids_X, position_X, torch.tensor(counts, device=position_X.device).cumsum(0) - 1)

    def _logits(self, ids_X: Tensor, position_X: Tensor, place_R: Tensor) -> Tensor:
        model = self.checkpoint.model
        hidden_1XD = model.get_decoder()(
            input_ids=ids_X[None], position_ids=position_X[None], layout=self.cache, use_cache=False
        ).last_hidden_state
        logits_RV: Tensor = model.get_output_embeddings()(hidden_1XD[0, place_R])
        return logits_RV

    def _sample_next(self, numbers: Sequence[int], logits_RV: Tensor, uniform_RT: Tensor) -> None:
        places = [self._active[number].num_sampled for number in numbers]
        token_R, logprob_R = self._sample(logits_RV, uniform_RT[list(numbers), places])
        for number, token, logprob in zip(numbers, token_R.tolist(), logprob_R.tolist(), strict=True):
            self._active[number].append(token, logprob)

    def _sample(self, logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row with its log-probability: the likeliest at temperature 0, else a random one."""
        if self.temperature not in (0, 1):
            logits_RV = logits_RV / self.temperature
        likeliest_R = None if self.temperature else logits_RV.argmax(-1)
        # On CPUs in the memory of the logits, which the caches have.
        probability_RV = torch.softmax(logits_RV, -1, out=None if logits_RV.is_cuda else logits_RV)
        token_R = inverse_cdf(probability_RV, uniform_R) if likeliest_R is None else likeliest_R
        return token_R, probability_RV.gather(1, token_R[:, None]).squeeze(1).log()

    def _drop_done(self) -> None:
        """Drop the rows of trajectories that are not there, are done, or have forked."""
        done = [
            number not in self._active or not self._active[number].goes_on(self._prompt_ids[number])
            for number in self.cache.numbers
        ]
        if any(done):
            self.cache.drop(torch.tensor(done, device=self.checkpoint.device))


def inverse_cdf(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return for each row the index whose share of the cumulative weights contains `uniform`, a number in [0, 1).

    Weights are summed in float64, so that rounding drops no token, and by blocks first, so that only one block per row
    is summed weight by weight.
    """
    vocabulary_size = weights_RV.shape[1]
    size = math.isqrt(vocabulary_size) + 1
    whole = vocabulary_size // size * size
    rest_R1 = weights_RV[:, whole:].sum(-1, keepdim=True)
    sums_RB = torch.cat([weights_RV[:, :whole].unflatten(1, (-1, size)).sum(-1), rest_R1], dim=1)
    stops_RB = cumulative_sum(sums_RB)
    threshold_R1 = uniform_R[:, None] * stops_RB[:, -1:]
    block_R1 = torch.searchsorted(stops_RB, threshold_R1, right=True)
    start_R1, stop_R1 = (torch.nn.functional.pad(stops_RB, (1, 0)).gather(1, block_R1 + more) for more in (0, 1))
    # Below one whatever was rounded: an index beyond the last that has a weight is never returned.
    uniform_R1 = ((threshold_R1 - start_R1) / (stop_R1 - start_R1)).clamp(max=1 - 2**-53)
    place_RC = block_R1 * size + torch.arange(size, device=weights_RV.device)
    block_RC = weights_RV.gather(1, place_RC.clamp(max=vocabulary_size - 1))
    block_RC.masked_fill_(place_RC >= vocabulary_size, 0)
    stops_RC = cumulative_sum(block_RC)
    place_R1 = torch.searchsorted(stops_RC, uniform_R1 * stops_RC[:, -1:], right=True)
    return (block_R1 * size + place_R1).squeeze(1)


def cumulative_sum(weights_RC: Tensor) -> Tensor:
    """Return the cumulative sum of each row in float64; equal weights give equal sums, on GPUs too."""
    return cumulative_sum_by_product(weights_RC) if weights_RC.is_cuda else weights_RC.cumsum(-1, dtype=torch.float64)


def cumulative_sum_by_product(weights_RC: Tensor) -> Tensor:
    """Return the same by a matrix of ones: torch's own cumsum is not deterministic on GPUs, and therefore refused."""
    size = weights_RC.shape[1]
    ones_CC = torch.ones(size, size, dtype=torch.float64, device=weights_RC.device).triu()
    return weights_RC.double() @ ones_CC
