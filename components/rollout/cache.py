"""Keys and values of completions that are decoded in step: those of a prompt are stored once for its group.

Shape suffixes:
    P  prompts of the batch, G  completions per prompt    R  completions in progress
    K  heads of keys and values, Q  heads of queries per head of keys     D  size of a head
    S  tokens of the longest prompt, T  tokens of the longest completion so far
    X  tokens of a call, end to end    Y  those of them in rows that read several
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from components.policy.attention import Segments, attend, attend_all, join_softmaxes

FIRST_CAPACITY = 64
"""Tokens of each completion that there is room for at first; doubled when they are full."""


@dataclass(frozen=True)
class _Chunk:
    """Several tokens that a row reads in a call of the model."""

    row: int
    tokens: range
    """Their places among all tokens of the call."""
    num_past: int
    """Tokens of the completion that were read before."""


class _Call:
    """What the rows read in one call of the model: some of them one token, some several, some none."""

    def __init__(
        self, rows: Sequence[int], counts: Sequence[int], pasts: Sequence[int], num_rows: int, device: torch.device
    ) -> None:
        """Rows, in their order, read so many tokens after so many that were read before."""
        self.width = max(past + count for past, count in zip(pasts, counts, strict=True))
        """Tokens of the longest completion, with those that are read."""
        self.row_X: Tensor | slice = slice(None)
        self.place_X: Tensor | int = pasts[0]
        """The place of each token in its completion."""
        self.chunks: list[_Chunk] = []
        self.are_all_single = len(rows) == num_rows == sum(counts)
        self._num_seen_R: Tensor | None = None
        self._mask_R11T: Tensor | None = None
        if self.are_all_single and min(pasts) == max(pasts):
            return
        readings = list(zip(rows, counts, pasts, accumulate(counts, initial=0), strict=False))
        self.row_X = torch.tensor([row for row, count, _, _ in readings for _ in range(count)], device=device)
        places = [past + place for _, count, past, _ in readings for place in range(count)]
        self.place_X = torch.tensor(places, device=device)
        self.chunks = [
            _Chunk(row, range(start, start + count), past) for row, count, past, start in readings if count > 1
        ]
        singles = [(row, past, start) for row, count, past, start in readings if count == 1]
        self.single_X = torch.tensor([start for _, _, start in singles], dtype=torch.long, device=device)
        self.single_R = torch.tensor([row for row, _, _ in singles], dtype=torch.long, device=device)
        self.chunk_Y = torch.tensor([token for each in self.chunks for token in each.tokens], device=device)
        num_seen = [self.width] * num_rows
        for row, past, _ in singles:
            num_seen[row] = past + 1
        if min(num_seen) < self.width:
            self._num_seen_R = torch.tensor(num_seen, device=device)

    def mask(self, like: Tensor) -> Tensor | None:
        """Return what is added to the scores of each row's own tokens: -inf beyond its end; None if that is nowhere."""
        if self._mask_R11T is None and self._num_seen_R is not None:
            hidden_RT = torch.arange(self.width, device=like.device) >= self._num_seen_R[:, None]
            self._mask_R11T = like.new_zeros(hidden_RT.shape).masked_fill_(hidden_RT, -torch.inf)[:, None, None]
        return self._mask_R11T


class GroupCache:
    """A layout (see `use_packed_attention`), called first with all prompts end to end, then as `begin_call` says."""

    def __init__(self, prompt_lengths: Sequence[int], group_size: int, device: torch.device) -> None:
        self.prompt_lengths, self.group_size = list(prompt_lengths), group_size
        self.row_R = torch.arange(len(prompt_lengths) * group_size, device=device)
        """Which completion of the batch each row is: at first group after group."""
        self.numbers: list[int] = self.row_R.tolist()
        """The same."""
        self.num_read = [0] * len(self.numbers)
        """Tokens of each completion of the batch that have been read."""
        self._call: _Call | None = None
        """None while the prompts are read."""
        self._prompt_keys: list[Tensor] = []
        self._prompt_values: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slot_R = self.row_R
        """The place of each row's query among the P x G queries to the prompts."""
        self._has_dropped = False
        self._mask: Tensor | None = None
        lengths_P = torch.tensor(self.prompt_lengths, device=device)
        self._prompt_length_R = lengths_P.repeat_interleave(group_size)
        self._is_padding_PS = torch.arange(self.longest, device=device) >= lengths_P[:, None]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence so far, with those that are being read."""
        return max(self.prompt_lengths) + (self._call.width if self._call else 0)

    def begin_call(self, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Let completions, in the order of their rows, read so many tokens each; return the positions of all, (X,)."""
        rows: Sequence[int] = range(len(numbers))
        if len(numbers) < len(self.numbers):
            row_of = {number: row for row, number in enumerate(self.numbers)}
            rows = [row_of[number] for number in numbers]
        pasts = [self.num_read[number] for number in numbers]
        self._call = _Call(rows, counts, pasts, len(self.numbers), self.row_R.device)
        for number, count in zip(numbers, counts, strict=True):
            self.num_read[number] += count
        return self._prompt_length_R[self._call.row_X] + self._call.place_X

    def attend(self, layer: int, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        """Store the keys and values, and return what each query attends to."""
        if self._call is None:
            # Models in which a layer does not attend, or more than once, are refused when they are loaded.
            assert layer == len(self._prompt_keys), f"layer {layer} attends where {len(self._prompt_keys)} is next"
            return self._attend_prompts(q_XHD, k_XKD, v_XKD, scale)
        return self._attend_completions(layer, q_XHD, k_XKD, v_XKD, scale, self._call)

    def drop(self, ended_R: Tensor) -> None:
        """Drop the rows that have ended, moving the last ones into their places."""
        alive = len(ended_R) - int(ended_R.sum())
        holes = ended_R[:alive].nonzero().squeeze(1)
        movers = alive + (~ended_R[alive:]).nonzero().squeeze(1)
        width = max(self.num_read)
        for tensor in (*self._keys, *self._values):
            tensor[holes, :, :width] = tensor[movers, :, :width]
        self._keys = [keys[:alive] for keys in self._keys]
        self._values = [values[:alive] for values in self._values]
        self._has_dropped = True
        order_R = torch.arange(alive, device=ended_R.device)
        order_R[holes] = movers
        self.row_R, self._slot_R = self.row_R[order_R], self._slot_R[order_R]
        self._prompt_length_R, self.numbers = self._prompt_length_R[order_R], self.row_R.tolist()
        # Prompts whose completions have all ended are dropped once they are half of all: the others are copied.
        prompt_R, place_R = self._slot_R // self.group_size, self._slot_R % self.group_size
        alive_P = torch.unique(prompt_R)
        if 2 * len(alive_P) <= len(self._is_padding_PS):
            self._prompt_keys = [keys[alive_P] for keys in self._prompt_keys]
            self._prompt_values = [values[alive_P] for values in self._prompt_values]
            self._is_padding_PS, self._mask = self._is_padding_PS[alive_P], None
            self._slot_R = torch.searchsorted(alive_P, prompt_R) * self.group_size + place_R

    def _attend_prompts(self, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        for tensors, x_XKD in ((self._prompt_keys, k_XKD), (self._prompt_values, v_XKD)):
            x_PSKD = torch.nn.utils.rnn.pad_sequence(x_XKD.split(self.prompt_lengths), batch_first=True)
            tensors.append(x_PSKD.transpose(1, 2).contiguous())
        bounds = tuple(accumulate(self.prompt_lengths, initial=0))
        repeats = q_XHD.shape[1] // k_XKD.shape[1]
        k_XHD, v_XHD = (x.repeat_interleave(repeats, dim=1) for x in (k_XKD, v_XKD))
        return attend(q_XHD, k_XHD, v_XHD, Segments(bounds, bounds, causal=True), scale)[0]

    def _attend_completions(
        self, layer: int, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float, call: _Call
    ) -> Tensor:
        """Attend to the completion's own keys and to the prompt's, in rows with one token and in those with several."""
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

    def _attend_rows(
        self,
        layer: int,
        q_RHD: Tensor,
        keys_RKTD: Tensor,
        values_RKTD: Tensor,
        scale: float,
        mask_R11T: Tensor | None,
    ) -> Tensor:
        """Return what a query of each row attends to among its own keys, but for masked ones, and the prompt's.

        Two softmaxes, joined into one.
        """
        q_RKQD = q_RHD.unflatten(1, (keys_RKTD.shape[1], -1))
        prompts = (self._prompt_keys[layer], self._prompt_values[layer])
        own_RKQD, own_lse_RKQ = attend_all(q_RKQD, keys_RKTD, values_RKTD, scale, mask_R11T)
        prompt, lse = attend_all(self._to_slots(q_RKQD), *prompts, scale, self._padding_mask(q_RHD))
        prompt_RKQD, lse_RKQ1 = self._to_rows(prompt), self._to_rows(lse[..., None])
        share_RKQ1 = torch.sigmoid(lse_RKQ1 - own_lse_RKQ[..., None]).to(own_RKQD.dtype)
        out_RHD: Tensor = own_RKQD.lerp(prompt_RKQD, share_RKQ1).flatten(1, 2)
        return out_RHD

    def _attend_chunks(
        self, layer: int, q_YHD: Tensor, k_YKD: Tensor, v_YKD: Tensor, chunks: Sequence[_Chunk], scale: float
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

    def _past(self, layer: int, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a row's prompt and of its completion before the chunk, (S, K, D) each."""
        slot = int(self._slot_R[chunk.row]) // self.group_size
        length = int(self._prompt_length_R[chunk.row])
        pairs = ((self._prompt_keys, self._keys), (self._prompt_values, self._values))
        keys, values = (
            torch.cat([prompts[layer][slot][:, :length], own[layer][chunk.row][:, : chunk.num_past]], dim=1)
            for prompts, own in pairs
        )
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _padding_mask(self, like: Tensor) -> Tensor | None:
        """What is added to scores of prompts, (P, 1, 1, S): -inf where a shorter one is padded; None without padding.

        It is kept until prompts are dropped.
        """
        if self._mask is None and min(self.prompt_lengths) < max(self.prompt_lengths):
            self._mask = like.new_zeros(self._is_padding_PS.shape).masked_fill_(self._is_padding_PS, -torch.inf)
        return None if self._mask is None else self._mask[:, None, None]

    def _to_slots(self, x_RKQD: Tensor) -> Tensor:
        """(R, K, Q, D) -> (P, K, G * Q, D): the rows of each prompt together; rows that have ended are zero."""
        x_slots = x_RKQD
        if self._has_dropped:
            x_slots = x_RKQD.new_zeros(len(self._is_padding_PS) * self.group_size, *x_RKQD.shape[1:])
            x_slots.index_copy_(0, self._slot_R, x_RKQD)
        x_PKGD: Tensor = x_slots.unflatten(0, (-1, self.group_size)).transpose(1, 2).flatten(2, 3)
        return x_PKGD

    def _to_rows(self, x_PKGD: Tensor) -> Tensor:
        """The inverse of `_to_slots`."""
        x_PGKQD: Tensor = x_PKGD.unflatten(2, (self.group_size, -1)).transpose(1, 2)
        x_slots = x_PGKQD.flatten(0, 1)
        return x_slots.index_select(0, self._slot_R) if self._has_dropped else x_slots
