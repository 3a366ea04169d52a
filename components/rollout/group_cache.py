"""Keys and values while completions are decoded: those of a prompt are stored once for its group.

All completions of a batch are decoded in step, one token each per call of the model. One that has ended is dropped at
once and its row is taken by the last, so that exactly the completions under way are computed.

Shape suffixes:
    P  prompts of the batch, G  completions per prompt    R  completions under way
    K  heads of keys and values, Q  heads of queries per head of keys     D  size of a head
    S  tokens of the longest prompt, T  tokens decoded, X  tokens of all prompts end to end
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from components.policy.attention import Segments, attend

_FIRST_CAPACITY = 64
"""Tokens of each completion that there is room for at first; doubled when they are full."""


class GroupCache:
    """A layout (see `use_packed_attention`), called first with all prompts end to end, then a token per completion."""

    def __init__(self, prompt_lengths: Sequence[int], group_size: int, device: torch.device) -> None:
        self.prompt_lengths = list(prompt_lengths)
        self.group_size = group_size
        self.row_R = torch.arange(len(prompt_lengths) * group_size, device=device)
        """Which completion of the batch each row is: group after group."""
        self.num_decoded = 0
        self.prefilled = False
        """Whether all prompts have been read, and completions are decoded from now on."""
        self._prompt_keys: list[Tensor] = []
        self._prompt_values: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slot_R = self.row_R
        """The place of each row's query among the P x G queries to the prompts."""
        length_P1 = torch.tensor(self.prompt_lengths, device=device)[:, None]
        self._is_padding_PS = torch.arange(self.longest, device=device) >= length_P1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence so far, with the token that is being read."""
        return max(self.prompt_lengths) + self.num_decoded + self.prefilled

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        """Store the keys and values, and return what each query attends to."""
        if not self.prefilled:
            # Models in which a layer does not attend, or more than once, are refused when they are loaded.
            assert layer == len(self._prompt_keys), f"layer {layer} attends where {len(self._prompt_keys)} is next"
            return self._attend_prompts(q_THD, k_TKD, v_TKD, scale)
        return self._attend_completions(layer, q_THD, k_TKD, v_TKD, scale)

    def drop(self, ended_R: Tensor) -> None:
        """Drop the rows that have ended, moving the last ones into their places."""
        alive = len(ended_R) - int(ended_R.sum())
        holes = ended_R[:alive].nonzero().squeeze(1)
        movers = alive + (~ended_R[alive:]).nonzero().squeeze(1)
        for tensor in (*self._keys, *self._values):
            tensor[holes, :, : self.num_decoded] = tensor[movers, :, : self.num_decoded]
        self._keys = [keys[:alive] for keys in self._keys]
        self._values = [values[:alive] for values in self._values]
        order_R = torch.arange(alive, device=ended_R.device)
        order_R[holes] = movers
        self.row_R, self._slot_R = self.row_R[order_R], self._slot_R[order_R]
        # Prompts whose completions have all ended are dropped once they are half of all: the others are copied.
        prompt_R, place_R = self._slot_R // self.group_size, self._slot_R % self.group_size
        alive_P = torch.unique(prompt_R)
        if 2 * len(alive_P) <= len(self._is_padding_PS):
            self._prompt_keys = [keys[alive_P] for keys in self._prompt_keys]
            self._prompt_values = [values[alive_P] for values in self._prompt_values]
            self._is_padding_PS = self._is_padding_PS[alive_P]
            self._slot_R = torch.searchsorted(alive_P, prompt_R) * self.group_size + place_R

    def _attend_prompts(self, q_XHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, scale: float) -> Tensor:
        for tensors, x_XKD in ((self._prompt_keys, k_XKD), (self._prompt_values, v_XKD)):
            x_PSKD = torch.nn.utils.rnn.pad_sequence(x_XKD.split(self.prompt_lengths), batch_first=True)
            tensors.append(x_PSKD.transpose(1, 2).contiguous())
        bounds = tuple(accumulate(self.prompt_lengths, initial=0))
        repeats = q_XHD.shape[1] // k_XKD.shape[1]
        k_XHD, v_XHD = (x.repeat_interleave(repeats, dim=1) for x in (k_XKD, v_XKD))
        return attend(q_XHD, k_XHD, v_XHD, Segments(bounds, bounds, causal=True), scale)[0]

    def _attend_completions(self, layer: int, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, scale: float) -> Tensor:
        """Attend to the prompt's keys and the completion's own, in one softmax."""
        for tensors, x_RKD in ((self._keys, k_RKD), (self._values, v_RKD)):
            if len(tensors) == layer:
                rows, heads, size = x_RKD.shape
                tensors.append(x_RKD.new_empty(rows, heads, _FIRST_CAPACITY, size))
            elif tensors[layer].shape[2] == self.num_decoded:
                tensors[layer] = torch.cat([tensors[layer], torch.empty_like(tensors[layer])], dim=2)
            tensors[layer][:, :, self.num_decoded] = x_RKD
        q_RKQD = q_RHD.unflatten(1, (self._keys[layer].shape[1], -1)) * scale
        keys_RKTD = self._keys[layer][:, :, : self.num_decoded + 1]
        values_RKTD = self._values[layer][:, :, : self.num_decoded + 1]
        prompt_scores_RKQS = self._to_rows(self._to_slots(q_RKQD) @ self._prompt_keys[layer].mT)
        prompt_scores_RKQS.masked_fill_(self._is_padding_PS[self._slot_R // self.group_size, None, None], -torch.inf)
        scores = torch.cat([prompt_scores_RKQS, q_RKQD @ keys_RKTD.mT], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        prompt_weights_RKQS, weights_RKQT = weights.split([prompt_scores_RKQS.shape[-1], keys_RKTD.shape[2]], dim=-1)
        from_prompt_RKQD = self._to_rows(self._to_slots(prompt_weights_RKQS) @ self._prompt_values[layer])
        out_RHD: Tensor = (from_prompt_RKQD + weights_RKQT @ values_RKTD).flatten(1, 2)
        return out_RHD

    def _to_slots(self, x_RKQD: Tensor) -> Tensor:
        """(R, K, Q, D) -> (P, K, G * Q, D): the rows of each prompt together; rows that have ended are zero."""
        x_slots = x_RKQD.new_zeros(len(self._is_padding_PS) * self.group_size, *x_RKQD.shape[1:])
        x_slots[self._slot_R] = x_RKQD
        x_PKGD: Tensor = x_slots.unflatten(0, (-1, self.group_size)).transpose(1, 2).flatten(2, 3)
        return x_PKGD

    def _to_rows(self, x_PKGD: Tensor) -> Tensor:
        """The inverse of `_to_slots`."""
        x_PGKQD: Tensor = x_PKGD.unflatten(2, (self.group_size, -1)).transpose(1, 2)
        return x_PGKQD.flatten(0, 1)[self._slot_R]
