"""Decoding with transformers where completions have turns: rows of a batch with lengths of their own.

Each call of the model reads one token of every row that samples, and the whole observation of every row whose
environment has answered, end to end. A row that waits for its environment is left out. Its wait is counted in calls of
the model, never in seconds: so the tokens alone decide which rows are computed together, and how results are rounded.

Shape suffixes as in decoding.py, and:
    X  tokens of a call, end to end    Y  those of them in rows that read several
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from components.policy.attention import Segments, attend, join_softmaxes
from components.policy.checkpoint import Checkpoint
from components.rollout.decoding import FIRST_CAPACITY, Decoding, GroupCache
from components.rollout.trajectory import Status, Trajectory

_CALLS_TO_ANSWER = 8
"""Calls of the model that an environment has time for before the batch waits for its answer."""
_MAX_READ_TOKENS = 16_384
"""Tokens of partial completions that are read at once; one that is longer is read by itself."""


class TurnDecoding(Decoding):
    """One batch of trajectories, new ones and continued ones, to the end of the last."""

    def __init__(
        self, checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]], group_size: int, temperature: float
    ) -> None:
        super().__init__(checkpoint, prompts, group_size, temperature)
        self.turns = self.cache = TurnCache(self.cache.prompt_lengths, group_size, checkpoint.device)

    def run_to_completion(self, trajectories: Sequence[Trajectory | None], uniform_RT: Tensor) -> None:
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
            due |= {number: calls + _CALLS_TO_ANSWER for number in ready if self._is(number, Status.WAITING)}
            if due and not any(self._is(number, Status.SAMPLING) for number in ready):
                calls = max(calls, min(due.values()))  # nothing else is to be computed meanwhile
            for number in [number for number, call in due.items() if call <= calls]:
                del due[number]
                self._receive(number)
            self._drop_done()
            ready = [number for number in self.turns.numbers if number not in due]
            if ready:
                logits_RV = self._read(ready)

    def _read_first(self) -> tuple[list[int], Tensor]:
        """Read the prompts and the partial completions; return the numbers of all completions, and their logits."""
        logits_RV = self._read_prompts()
        self._drop_done()
        fresh = [number for number in self.turns.numbers if not self._active[number].ids]
        partial = [number for number in self.turns.numbers if self._active[number].ids]
        parts = [logits_RV[fresh], *(self._read(portion) for portion in self._portions(partial))]
        return fresh + partial, torch.cat(parts)

    def _portions(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield completions that are read at once."""
        portion: list[int] = []
        num_tokens = 0
        for number in numbers:
            length = len(self._active[number].ids)
            if portion and num_tokens + length > _MAX_READ_TOKENS:
                yield portion
                portion, num_tokens = [], 0
            portion.append(number)
            num_tokens += length
        if portion:
            yield portion

    def _read(self, numbers: Sequence[int]) -> Tensor:
        """Read what these completions have that is unread, in one call; return the logits of their next tokens."""
        unread = {number: self._active[number].ids[self.turns.num_read[number] :] for number in numbers}
        position_X = self.turns.begin_call({number: len(ids) for number, ids in unread.items()})
        ids_X = torch.tensor([token for ids in unread.values() for token in ids], device=position_X.device)
        ends_R = torch.tensor([len(ids) for ids in unread.values()], device=position_X.device).cumsum(0)
        logits_RV = self._logits(ids_X, position_X, ends_R - 1)
        self.turns.end_call()
        return logits_RV

    def _sample_next(self, numbers: Sequence[int], logits_RV: Tensor, uniform_RT: Tensor) -> None:
        places = [self._active[number].num_sampled for number in numbers]
        token_R, logprob_R = self._sample(logits_RV, uniform_RT[list(numbers), places])
        for number, token, logprob in zip(numbers, token_R.tolist(), logprob_R.tolist(), strict=True):
            self._active[number].extend((token,), (logprob,))

    def _receive(self, number: int) -> None:
        asked = self._active[number].asked
        assert asked is not None, "a trajectory that waits has asked"
        self._active[number].receive(asked.result())

    def _is(self, number: int, status: Status) -> bool:
        return self._active[number].status is status

    def _drop_done(self) -> None:
        done = [not (number in self._active and self._goes_on(number)) for number in self.turns.numbers]
        if any(done):
            self.turns.drop(torch.tensor(done, device=self.checkpoint.device))

    def _goes_on(self, number: int) -> bool:
        return self._active[number].goes_on(self._prompt_ids[number])


@dataclass(frozen=True)
class _Reading:
    """The tokens that a row reads in a call of the model."""

    row: int
    tokens: range
    """Their places among all tokens of the call."""
    num_past: int
    """Tokens of the completion that were read before."""


class _Call:
    """What the rows read in one call of the model: some of them one token, some several, some none."""

    def __init__(self, readings: Sequence[_Reading], num_rows: int, device: torch.device) -> None:
        """The readings are in the order of their rows."""
        singles = [each for each in readings if len(each.tokens) == 1]
        self.chunks = [each for each in readings if len(each.tokens) > 1]
        self.are_all_single = len(singles) == num_rows
        self.width = max(each.num_past + len(each.tokens) for each in readings)
        """Tokens of the longest completion, with those that are read."""
        self.row_X = torch.tensor([each.row for each in readings for _ in each.tokens], device=device)
        self.place_X = torch.tensor(
            [each.num_past + place for each in readings for place in range(len(each.tokens))], device=device
        )
        """The place of each token in its completion."""
        self.single_X = torch.tensor([each.tokens.start for each in singles], dtype=torch.long, device=device)
        self.single_R = torch.tensor([each.row for each in singles], dtype=torch.long, device=device)
        self.chunk_Y = torch.tensor([token for each in self.chunks for token in each.tokens], device=device)
        num_seen = [self.width] * num_rows
        for each in singles:
            num_seen[each.row] = each.num_past + 1
        self._num_seen_R = torch.tensor(num_seen, device=device) if min(num_seen) < self.width else None
        self._mask_R11T: Tensor | None = None

    def mask(self, like: Tensor) -> Tensor | None:
        """Return what is added to the scores of each row's own tokens: -inf beyond its end; None if that is nowhere."""
        if self._mask_R11T is None and self._num_seen_R is not None:
            hidden_RT = torch.arange(self.width, device=like.device) >= self._num_seen_R[:, None]
            mask_RT = like.new_zeros(hidden_RT.shape).masked_fill_(hidden_RT, -torch.inf)
            self._mask_R11T = mask_RT[:, None, None]
        return self._mask_R11T


class TurnCache(GroupCache):
    """A layout whose rows have lengths of their own: `begin_call` says what each of them reads next."""

    def __init__(self, prompt_lengths: Sequence[int], group_size: int, device: torch.device) -> None:
        self._counts: dict[int, int] = {}
        self._call: _Call | None = None
        super().__init__(prompt_lengths, group_size, device)
        self.numbers: list[int] = self.row_R.tolist()
        """Which completion of the batch each row is."""
        self.num_read = [0] * len(self.numbers)
        """Tokens of each completion that have been read."""

    @property
    def longest(self) -> int:
        """See `GroupCache`."""
        return max(self.prompt_lengths) + (self._call.width if self._call else 0)

    def begin_call(self, counts: dict[int, int]) -> Tensor:
        """Let completions, in the order of their rows, read so many tokens each; return the positions of all, (X,)."""
        rows = {number: row for row, number in enumerate(self.numbers)}
        stops = accumulate(counts.values())
        readings = [
            _Reading(rows[number], range(stop - count, stop), self.num_read[number])
            for (number, count), stop in zip(counts.items(), stops, strict=True)
        ]
        self._counts, self._call = counts, _Call(readings, len(rows), self.row_R.device)
        lengths_X = [self._prompt_length(number) for number, count in counts.items() for _ in range(count)]
        return self._call.place_X + torch.tensor(lengths_X, device=self.row_R.device)

    def end_call(self) -> None:
        """Count what has been read."""
        for number, count in self._counts.items():
            self.num_read[number] += count
        self.num_decoded = max(self.num_decoded, *(self.num_read[number] for number in self._counts))

    def drop(self, ended_R: Tensor) -> None:
        """See `GroupCache`."""
        super().drop(ended_R)
        self.numbers = self.row_R.tolist()

    def _prompt_length(self, number: int) -> int:
        return self.prompt_lengths[number // self.group_size]

    def _attend_completions(self, layer: int, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        """Attend to the completion's own keys and to the prompt's, in rows with one token and in those with several."""
        call = self._call
        assert call is not None, "begin_call comes first"
        keys_RKTD, values_RKTD = (
            self._stored(tensors, layer, x_XKD, call) for tensors, x_XKD in ((self._keys, k_XKD), (self._values, v_XKD))
        )
        if call.are_all_single:
            return self._attend_rows(layer, q_XHD, keys_RKTD, values_RKTD, scale, call.mask(q_XHD))
        out_XHD = torch.empty_like(q_XHD)
        if len(call.single_X):
            q_RHD = q_XHD.new_zeros(len(self.numbers), *q_XHD.shape[1:])
            q_RHD[call.single_R] = q_XHD[call.single_X]
            out_RHD = self._attend_rows(layer, q_RHD, keys_RKTD, values_RKTD, scale, call.mask(q_XHD))
            out_XHD[call.single_X] = out_RHD[call.single_R]
        if call.chunks:
            qkv = (q_XHD[call.chunk_Y], k_XKD[call.chunk_Y], v_XKD[call.chunk_Y])
            out_XHD[call.chunk_Y] = self._attend_chunks(layer, *qkv, call.chunks, scale)
        return out_XHD

    def _stored(self, tensors: list[Tensor], layer: int, x_XKD: Tensor, call: _Call) -> Tensor:
        """Store the keys or values of the tokens of a call; return those of all tokens so far, (R, K, T, D)."""
        # Zeros: what is masked has no weight, but must be a number.
        if len(tensors) == layer:
            capacity = max(FIRST_CAPACITY, call.width)
            tensors.append(x_XKD.new_zeros(len(self.numbers), x_XKD.shape[1], capacity, x_XKD.shape[2]))
        missing = call.width - tensors[layer].shape[2]
        if missing > 0:
            more = max(missing, tensors[layer].shape[2])
            tensors[layer] = torch.nn.functional.pad(tensors[layer], (0, 0, 0, more))
        tensors[layer][call.row_X, :, call.place_X] = x_XKD
        return tensors[layer][:, :, : call.width]

    def _attend_chunks(
        self, layer: int, q_YHD: Tensor, k_YKD: Tensor, v_YKD: Tensor, chunks: Sequence[_Reading], scale: float
    ) -> Tensor:
        """Attend to the tokens of the chunk up to each, and to all before it: two softmaxes, joined into one."""
        bounds = tuple(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        past = [self._past(layer, chunk) for chunk in chunks]
        past_bounds = tuple(accumulate((len(keys_SKD) for keys_SKD, _ in past), initial=0))
        repeats = q_YHD.shape[1] // k_YKD.shape[1]
        pasts = (torch.cat(each) for each in zip(*past, strict=True))
        k_YHD, v_YHD, k_SHD, v_SHD = (x.repeat_interleave(repeats, dim=1) for x in (k_YKD, v_YKD, *pasts))
        out_YHD, lse_YH = attend(q_YHD, k_YHD, v_YHD, Segments(bounds, bounds, causal=True), scale)
        before = attend(q_YHD, k_SHD, v_SHD, Segments(bounds, past_bounds, causal=False), scale)
        join_softmaxes(out_YHD, lse_YH, *before)
        return out_YHD

    def _past(self, layer: int, chunk: _Reading) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a row's prompt and of its completion before the chunk, (S, K, D) each."""
        # Where its prompt is among those still stored, of which `drop` makes fewer.
        place = int(self._slot_R[chunk.row]) // self.group_size
        length = self._prompt_length(self.numbers[chunk.row])

        def past(prompts_PKSD: Tensor, own_RKTD: Tensor) -> Tensor:
            parts = (prompts_PKSD[place, :, :length], own_RKTD[chunk.row, :, : chunk.num_past])
            return torch.cat(parts, dim=1).transpose(0, 1)

        return past(self._prompt_keys[layer], self._keys[layer]), past(self._prompt_values[layer], self._values[layer])
