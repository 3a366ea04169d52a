"""Decoding with transformers: all completions of a batch in step, one token each per call of the model.

Keys and values of a prompt are stored once for its group.

Shape suffixes:
    P  prompts of the batch, G  completions per prompt    R  completions in progress   V  vocabulary
    K  heads of keys and values, Q  heads of queries per head of keys     D  size of a head
    S  tokens of the longest prompt, T  tokens decoded, X  tokens of all prompts end to end
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from components.policy.attention import Segments, attend, attend_all
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, StopTexts

FIRST_CAPACITY = 64
"""Tokens of each completion that there is room for at first; doubled when they are full."""


class Decoding:
    """One batch of completions, from its prompts to the end of the last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompts: Sequence[tuple[int, ...]],
        group_size: int,
        temperature: float,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        self.checkpoint, self.prompts, self.temperature = checkpoint, prompts, temperature
        self.cache = GroupCache([len(prompt) for prompt in prompts], group_size, checkpoint.device)
        lengths_P = torch.tensor(self.cache.prompt_lengths, device=checkpoint.device)
        self._prompt_length_R = lengths_P.repeat_interleave(group_size)
        self._stop = StopTexts(stop, checkpoint.decode)
        self._in_thought = [checkpoint.opens_thought(prompt) for prompt in prompts]
        self._end_ids = torch.tensor(checkpoint.end_ids, device=checkpoint.device)

    def run(self, uniform_RT: Tensor) -> list[list[Completion]]:
        """Return the groups of completions; `uniform` has a number in [0, 1) for each token that may be sampled."""
        length_R = torch.full_like(uniform_RT[:, 0], uniform_RT.shape[1], dtype=torch.long)
        ids_RT = torch.zeros_like(uniform_RT, dtype=torch.long)
        logprobs_RT = torch.zeros_like(uniform_RT, dtype=torch.float32)
        finished_R = torch.zeros_like(length_R, dtype=torch.bool)
        logits_RV = self._read_prompts()
        for t in range(uniform_RT.shape[1]):
            row_R = self.cache.row_R
            token_R, logprob_R = self._sample(logits_RV, uniform_RT[row_R, t])
            ids_RT[row_R, t], logprobs_RT[row_R, t] = token_R, logprob_R
            ended_R = self.ends(token_R, t)
            if self._stop.texts:
                ended_R = ended_R | self._stopped(ids_RT[row_R, : t + 1])
            if ended_R.any():
                length_R[row_R[ended_R]] = t + 1
                finished_R[row_R[ended_R]] = True
                self.cache.drop(ended_R)
                token_R = ids_RT[self.cache.row_R, t]
            if not len(token_R) or t + 1 == uniform_RT.shape[1]:
                break
            logits_RV = self._read_tokens(token_R)
        rows = zip(length_R.tolist(), ids_RT.tolist(), logprobs_RT.tolist(), finished_R.tolist(), strict=True)
        groups: list[list[Completion]] = [[] for _ in self.prompts]
        for number, (length, ids, logprobs, finished) in enumerate(rows):
            prompt = number // self.cache.group_size
            tokens = TokenSequence(self.prompts[prompt], tuple(ids[:length]))
            ended = ids[length - 1] in self.checkpoint.end_ids
            text = self._stop.before(self.checkpoint.decode(ids[: length - ended]))
            groups[prompt].append(
                Completion(
                    tokens, tuple(logprobs[:length]), text, finished=finished, in_thought=self._in_thought[prompt]
                )
            )
        return groups

    def _stopped(self, ids_RT: Tensor) -> Tensor:
        """Which rows have been stopped by their last token."""
        return torch.tensor([self._stop.ends(ids) for ids in ids_RT.tolist()], device=ids_RT.device)

    def ends(self, token_R: Tensor, t: int) -> Tensor:
        """Return which rows end with this token, at place `t`."""
        del t
        return torch.isin(token_R, self._end_ids)

    def _read_prompts(self) -> Tensor:
        """Compute each prompt once; return the logits that all its completions start from."""
        device, lengths = self.checkpoint.device, self.cache.prompt_lengths
        ids_X = torch.tensor([token for prompt in self.prompts for token in prompt], device=device)
        position_X = torch.tensor([place for length in lengths for place in range(length)], device=device)
        logits_PV = self._logits(ids_X, position_X, torch.tensor(lengths, device=device).cumsum(0) - 1)
        self.cache.prefilled = True
        return logits_PV.repeat_interleave(self.cache.group_size, dim=0)

    def _read_tokens(self, token_R: Tensor) -> Tensor:
        position_R = self._prompt_length_R[self.cache.row_R] + self.cache.num_decoded
        logits_RV = self._logits(token_R, position_R, torch.arange(len(token_R), device=token_R.device))
        self.cache.num_decoded += 1
        return logits_RV

    def _logits(self, ids: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        model = self.checkpoint.model
        hidden_1TD = model.get_decoder()(
            input_ids=ids[None], position_ids=positions[None], layout=self.cache, use_cache=False
        ).last_hidden_state
        logits_RV: Tensor = model.get_output_embeddings()(hidden_1TD[0, places])
        return logits_RV

    def _sample(self, logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token per row with its log-probability: the likeliest at temperature 0, else a random one."""
        if self.temperature not in (0, 1):
            logits_RV = logits_RV / self.temperature
        likeliest_R = None if self.temperature else logits_RV.argmax(-1)
        # On CPUs in the memory of the logits, which the caches have.
        probability_RV = torch.softmax(logits_RV, -1, out=None if logits_RV.is_cuda else logits_RV)
        token_R = inverse_cdf(probability_RV, uniform_R) if likeliest_R is None else likeliest_R
        return token_R, probability_RV.gather(1, token_R[:, None]).squeeze(1).log()


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
        self._has_dropped = False
        self._mask: Tensor | None = None
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
        self._has_dropped = True
        order_R = torch.arange(alive, device=ended_R.device)
        order_R[holes] = movers
        self.row_R, self._slot_R = self.row_R[order_R], self._slot_R[order_R]
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

    def _attend_completions(self, layer: int, q_RHD: Tensor, k_RKD: Tensor, v_RKD: Tensor, scale: float) -> Tensor:
        """Attend to the completion's own keys and to the prompt's: two softmaxes, joined into one."""
        keys_RKTD = self._appended(self._keys, layer, k_RKD)
        values_RKTD = self._appended(self._values, layer, v_RKD)
        return self._attend_rows(layer, q_RHD, keys_RKTD, values_RKTD, scale)

    def _attend_rows(
        self,
        layer: int,
        q_RHD: Tensor,
        keys_RKTD: Tensor,
        values_RKTD: Tensor,
        scale: float,
        mask_R11T: Tensor | None = None,
    ) -> Tensor:
        """Return what a query of each row attends to among its own keys, but for masked ones, and the prompt's."""
        q_RKQD = q_RHD.unflatten(1, (keys_RKTD.shape[1], -1))
        prompts = (self._prompt_keys[layer], self._prompt_values[layer])
        own_RKQD, own_lse_RKQ = attend_all(q_RKQD, keys_RKTD, values_RKTD, scale, mask_R11T)
        prompt, lse = attend_all(self._to_slots(q_RKQD), *prompts, scale, self._padding_mask(q_RHD))
        prompt_RKQD, lse_RKQ1 = self._to_rows(prompt), self._to_rows(lse[..., None])
        share_RKQ1 = torch.sigmoid(lse_RKQ1 - own_lse_RKQ[..., None]).to(own_RKQD.dtype)
        out_RHD: Tensor = own_RKQD.lerp(prompt_RKQD, share_RKQ1).flatten(1, 2)
        return out_RHD

    def _appended(self, tensors: list[Tensor], layer: int, x_RKD: Tensor) -> Tensor:
        """Store the keys or values of a token in each row; return those of all tokens so far, (R, K, T, D)."""
        if len(tensors) == layer:
            rows, heads, size = x_RKD.shape
            tensors.append(x_RKD.new_empty(rows, heads, FIRST_CAPACITY, size))
        elif tensors[layer].shape[2] == self.num_decoded:
            tensors[layer] = torch.cat([tensors[layer], torch.empty_like(tensors[layer])], dim=2)
        tensors[layer][:, :, self.num_decoded] = x_RKD
        return tensors[layer][:, :, : self.num_decoded + 1]

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
