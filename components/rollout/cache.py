"""The KV cache of completions that are decoded in step; the keys and values of a prompt are stored once for its group.

Shape suffixes:
    P  prompts of the batch, G  completions per prompt    R  rows: completions in progress
    H  heads of queries, K  heads of keys and values, Q  heads of queries per head of keys     D  size of a head
    S  tokens of the longest prompt, T  tokens of the longest completion so far
    X  tokens of a call, end to end    Y  tokens of a call in rows that read several
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
    """Several tokens that one row reads in one call of the model."""

    row: int
    tokens: range
    """Their places among all tokens of the call."""
    num_past: int
    """Tokens of the row's completion that were read before."""


class _Call:
    """The tokens of one call of the model: each row reads one token (a single), several (a chunk), or none."""

    def __init__(
        self, rows: Sequence[int], counts: Sequence[int], pasts: Sequence[int], num_rows: int, device: torch.device
    ) -> None:
        """Row `rows[i]` of `num_rows` reads `counts[i]` tokens, and has read `pasts[i]` before."""
        self.width = max(past + count for past, count in zip(pasts, counts, strict=True))
        """Tokens of the longest completion of these rows, with those of this call."""
        self.row_X: Tensor | slice = slice(None)
        """The row of each token."""
        self.place_X: Tensor | int = pasts[0]
        """The place of each token in its completion."""
        self.chunks: list[_Chunk] = []
        self.are_all_single = list(counts) == [1] * num_rows
        """Whether each of the rows reads one token."""
        self._num_seen_R: Tensor | None = None
        self._mask_R11T: Tensor | None = None
        if self.are_all_single and min(pasts) == max(pasts):
            return  # the usual call: every row reads at the same place, so no tensor of indices is needed
        token_rows: list[int] = []
        places: list[int] = []
        singles: dict[int, int] = {}
        num_seen = [self.width] * num_rows  # changed below for singles; nothing uses the mask of other rows
        for row, count, past in zip(rows, counts, pasts, strict=True):
            start = len(places)
            token_rows += [row] * count
            places += range(past, past + count)
            if count == 1:
                singles[row], num_seen[row] = start, past + 1
            else:
                self.chunks.append(_Chunk(row, range(start, start + count), past))
        chunk_tokens = [token for chunk in self.chunks for token in chunk.tokens]
        self.row_X, self.place_X, self.single_R, self.single_X, self.chunk_Y = (
            torch.tensor(each, dtype=torch.long, device=device)
            for each in (token_rows, places, list(singles), list(singles.values()), chunk_tokens)
        )
        if min(num_seen) < self.width:
            self._num_seen_R = torch.tensor(num_seen, device=device)

    def mask(self, like: Tensor) -> Tensor | None:
        """Return -inf for places after a row's last token, else 0, (R, 1, 1, T); None if all rows are equally long."""
        if self._mask_R11T is None and self._num_seen_R is not None:
            hidden_RT = torch.arange(self.width, device=like.device) >= self._num_seen_R[:, None]
            self._mask_R11T = like.new_zeros(hidden_RT.shape).masked_fill_(hidden_RT, -torch.inf)[:, None, None]
        return self._mask_R11T


class GroupCache:
    """The KV cache of a batch, which a model takes as its `layout` (see `use_packed_attention`).

    The first call of the model reads all prompts, end to end. `begin_call` precedes each later one.
    """

    def __init__(self, prompt_lengths: Sequence[int], group_size: int, device: torch.device) -> None:
        self.prompt_lengths, self.group_size = list(prompt_lengths), group_size
        self.numbers = list(range(len(prompt_lengths) * group_size))
        """The number in the batch of each row's completion: at first group after group."""
        self.num_read = [0] * len(self.numbers)
        """Tokens of each completion of the batch that have been read."""
        self._call: _Call | None = None
        """None while the prompts are read."""
        self._prompt_keys: list[Tensor] = []
        self._prompt_values: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slot_R = torch.arange(len(self.numbers), device=device)
        """The place of each row's query among the P x G queries to the prompts: prompt * G + place in the group."""
        self._has_dropped = False
        self._mask_P11S: Tensor | None = None
        lengths_P = torch.tensor(self.prompt_lengths, device=device)
        self._prompt_length_R = lengths_P.repeat_interleave(group_size)
        self._is_padding_PS = torch.arange(self.max_length, device=device) >= lengths_P[:, None]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence so far, including those that are being read."""
        return max(self.prompt_lengths) + (self._call.width if self._call else 0)

    def begin_call(self, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Begin a call in which completion `numbers[i]` reads `counts[i]` tokens; return their positions, (X,)."""
        row_of = {number: row for row, number in enumerate(self.numbers)}
        rows = [row_of[number] for number in numbers]
        pasts = [self.num_read[number] for number in numbers]
        self._call = _Call(rows, counts, pasts, len(self.numbers), self._slot_R.device)
        for number, count in zip(numbers, counts, strict=True):
            self.num_read[number] += count
        return self._prompt_length_R[self._call.row_X] + self._call.place_X

    def attend(self, layer: int, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        """Store the keys and values, and return the output of attention for each query, (X, H, D).

        Rows that read one token are computed together, in the shape of the cache; rows with a chunk end to end.
        """
        call = self._call
        if call is None:
            # Models in which a layer does not attend, or more than once, are refused when they are loaded.
            assert layer == len(self._prompt_keys), f"layer {layer} attends where {len(self._prompt_keys)} is next"
            return self._attend_prompts(q_XHD, k_XKD, v_XKD, scale)
        keys_RKTD = self._store(self._keys, layer, k_XKD, call)
        values_RKTD = self._store(self._values, layer, v_XKD, call)
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

    def drop(self, ended_R: Tensor) -> None:
        """Drop the rows that have ended; the last of the others move into their places, so that few are copied."""
        num_alive = len(ended_R) - int(ended_R.sum())
        holes = ended_R[:num_alive].nonzero().squeeze(1)
        movers = num_alive + (~ended_R[num_alive:]).nonzero().squeeze(1)
        width = max(self.num_read)
        for tensor in (*self._keys, *self._values):
            tensor[holes, :, :width] = tensor[movers, :, :width]
        self._keys = [keys[:num_alive] for keys in self._keys]
        self._values = [values[:num_alive] for values in self._values]
        self._has_dropped = True
        order_R = torch.arange(num_alive, device=ended_R.device)
        order_R[holes] = movers
        self.numbers = [self.numbers[row] for row in order_R.tolist()]
        self._slot_R, self._prompt_length_R = self._slot_R[order_R], self._prompt_length_R[order_R]
        # Prompts without a row are dropped only when they are half of all, as dropping copies all others.
        prompt_R, place_R = self._slot_R // self.group_size, self._slot_R % self.group_size
        alive_P = torch.unique(prompt_R)
        if 2 * len(alive_P) <= len(self._is_padding_PS):
            self._prompt_keys = [keys[alive_P] for keys in self._prompt_keys]
            self._prompt_values = [values[alive_P] for values in self._prompt_values]
            self._is_padding_PS, self._mask_P11S = self._is_padding_PS[alive_P], None
            self._slot_R = torch.searchsorted(alive_P, prompt_R) * self.group_size + place_R

    def _attend_prompts(self, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        """Store the keys and values of the prompts, padded, (P, K, S, D); attend within each prompt."""
        for stored, x_XKD in ((self._prompt_keys, k_XKD), (self._prompt_values, v_XKD)):
            x_PSKD = torch.nn.utils.rnn.pad_sequence(x_XKD.split(self.prompt_lengths), batch_first=True)
            stored.append(x_PSKD.transpose(1, 2).contiguous())
        bounds = tuple(accumulate(self.prompt_lengths, initial=0))
        repeats = q_XHD.shape[1] // k_XKD.shape[1]
        k_XHD, v_XHD = (x.repeat_interleave(repeats, dim=1) for x in (k_XKD, v_XKD))
        return attend(q_XHD, k_XHD, v_XHD, Segments(bounds, bounds, causal=True), scale)[0]

    def _store(self, stored: list[Tensor], layer: int, x_XKD: Tensor, call: _Call) -> Tensor:
        """Store the keys or values of the tokens of a call; return those of all tokens so far, (R, K, T, D)."""
        # Zeros, not empty memory: a masked value has no weight, but 0 times NaN would be NaN.
        if len(stored) == layer:
            capacity = max(FIRST_CAPACITY, call.width)
            stored.append(x_XKD.new_zeros(len(self.numbers), x_XKD.shape[1], capacity, x_XKD.shape[2]))
        capacity = stored[layer].shape[2]
        if call.width > capacity:
            growth = max(call.width - capacity, capacity)
            stored[layer] = torch.nn.functional.pad(stored[layer], (0, 0, 0, growth))
        stored[layer][call.row_X, :, call.place_X] = x_XKD
        return stored[layer][:, :, : call.width]

    def _attend_rows(
        self, layer: int, q_RHD: Tensor, keys_RKTD: Tensor, values_RKTD: Tensor, scale: float, mask_R11T: Tensor | None
    ) -> Tensor:
        """Attend with one query per row to the row's own tokens and to its prompt, (R, H, D)."""
        q_RKQD = q_RHD.unflatten(1, (keys_RKTD.shape[1], -1))
        own_RKQD, own_lse_RKQ = attend_all(q_RKQD, keys_RKTD, values_RKTD, scale, mask_R11T)
        keys_PKSD, values_PKSD = self._prompt_keys[layer], self._prompt_values[layer]
        mask_P11S = self._padding_mask(q_RHD)
        prompt, lse = attend_all(self._to_slots(q_RKQD), keys_PKSD, values_PKSD, scale, mask_P11S)
        prompt_RKQD, lse_RKQ1 = self._to_rows(prompt), self._to_rows(lse[..., None])
        # The prompt's share of the joint softmax: exp(lse) / (exp(lse) + exp(own lse)), a sigmoid of the difference.
        weight_RKQ1 = torch.sigmoid(lse_RKQ1 - own_lse_RKQ[..., None]).to(own_RKQD.dtype)
        out_RHD: Tensor = own_RKQD.lerp(prompt_RKQD, weight_RKQ1).flatten(1, 2)
        return out_RHD

    def _attend_chunks(
        self, layer: int, q_YHD: Tensor, k_YKD: Tensor, v_YKD: Tensor, chunks: Sequence[_Chunk], scale: float
    ) -> Tensor:
        """Attend with each token of a chunk to the chunk up to it, and to all before the chunk, (Y, H, D)."""
        bounds = tuple(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        past_keys, past_values = zip(*(self._past(layer, chunk) for chunk in chunks), strict=True)
        past_bounds = tuple(accumulate(map(len, past_keys), initial=0))
        past_kv = (torch.cat(past_keys), torch.cat(past_values))
        repeats = q_YHD.shape[1] // k_YKD.shape[1]
        k_YHD, v_YHD, k_SHD, v_SHD = (x.repeat_interleave(repeats, dim=1) for x in (k_YKD, v_YKD, *past_kv))
        out_YHD, lse_YH = attend(q_YHD, k_YHD, v_YHD, Segments(bounds, bounds, causal=True), scale)
        before = attend(q_YHD, k_SHD, v_SHD, Segments(bounds, past_bounds, causal=False), scale)
        join_softmaxes(out_YHD, lse_YH, *before)  # into out_YHD
        return out_YHD

    def _past(self, layer: int, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a row's prompt and its completion before the chunk, (tokens, K, D) each."""
        prompt = int(self._slot_R[chunk.row]) // self.group_size
        length, row, past = int(self._prompt_length_R[chunk.row]), chunk.row, chunk.num_past
        keys = torch.cat([self._prompt_keys[layer][prompt, :, :length], self._keys[layer][row, :, :past]], dim=1)
        values = torch.cat([self._prompt_values[layer][prompt, :, :length], self._values[layer][row, :, :past]], dim=1)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _padding_mask(self, like: Tensor) -> Tensor | None:
        """Return -inf where a shorter prompt is padded, else 0, (P, 1, 1, S); None without padding."""
        if self._mask_P11S is None and min(self.prompt_lengths) < max(self.prompt_lengths):
            mask_PS = like.new_zeros(self._is_padding_PS.shape).masked_fill_(self._is_padding_PS, -torch.inf)
            self._mask_P11S = mask_PS[:, None, None]
        return self._mask_P11S

    def _to_slots(self, x_RKQD: Tensor) -> Tensor:
        """Return (P, K, G * Q, D): the rows of each prompt together, with zeros for rows that were dropped."""
        slots = x_RKQD
        if self._has_dropped:
            slots = x_RKQD.new_zeros(len(self._is_padding_PS) * self.group_size, *x_RKQD.shape[1:])
            slots.index_copy_(0, self._slot_R, x_RKQD)
        x_PKGD: Tensor = slots.unflatten(0, (-1, self.group_size)).transpose(1, 2).flatten(2, 3)
        return x_PKGD

    def _to_rows(self, x_PKGD: Tensor) -> Tensor:
        """Return (R, K, Q, D): the inverse of `_to_slots`. The dimension G of the input has G x Q elements."""
        x_PGKQD: Tensor = x_PKGD.unflatten(2, (self.group_size, -1)).transpose(1, 2)
        slots = x_PGKQD.flatten(0, 1)
        return slots.index_select(0, self._slot_R) if self._has_dropped else slots
