import pytest
import torch
from torch import Tensor

from components.rollout import group_cache
from components.rollout.group_cache import GroupCache

NUM_LAYERS, KEY_HEADS, QUERY_HEADS, SIZE, SCALE = 2, 2, 6, 4, 0.3
CPU = torch.device("cpu")


class _Decoder:
    """Feeds a cache with random keys and values, and keeps those of each completion to compute attention plainly."""

    def __init__(self, prompt_lengths: list[int], group_size: int) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.cache = GroupCache(prompt_lengths, group_size, CPU)
        num_rows = len(prompt_lengths) * group_size
        self.keys = [[torch.empty(0, KEY_HEADS, SIZE)] * num_rows for _ in range(NUM_LAYERS)]
        self.values = [[torch.empty(0, KEY_HEADS, SIZE)] * num_rows for _ in range(NUM_LAYERS)]

    def _random(self, rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, SIZE, dtype=torch.float64, generator=self.generator)

    def read_prompts(self) -> float:
        """Give the cache all prompts; return the largest error."""
        lengths, error = self.cache.prompt_lengths, 0.0
        for layer in range(NUM_LAYERS):
            q, k, v = (self._random(sum(lengths), heads) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS))
            found = self.cache.attend(layer, q, k, v, SCALE)
            expected = [
                _plain_attention(q_T[None, place], k_T[: place + 1], v_T[: place + 1])
                for q_T, k_T, v_T in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
                for place in range(len(q_T))
            ]
            error = max(error, float((found - torch.cat(expected)).abs().max()))
            for prompt, (k_T, v_T) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
                for row in range(prompt * self.cache.group_size, (prompt + 1) * self.cache.group_size):
                    self.keys[layer][row], self.values[layer][row] = k_T, v_T
        self.cache.prefilled = True
        return error

    def read_tokens(self) -> float:
        """Give the cache one token for each completion under way; return the largest error."""
        rows, error = self.cache.row_R.tolist(), 0.0
        for layer in range(NUM_LAYERS):
            q, k, v = (self._random(len(rows), heads) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS))
            for place, row in enumerate(rows):
                self.keys[layer][row] = torch.cat([self.keys[layer][row], k[place, None]])
                self.values[layer][row] = torch.cat([self.values[layer][row], v[place, None]])
            found = self.cache.attend(layer, q, k, v, SCALE)
            expected = [
                _plain_attention(q[place, None], self.keys[layer][row], self.values[layer][row])
                for place, row in enumerate(rows)
            ]
            error = max(error, float((found - torch.cat(expected)).abs().max()))
        self.cache.num_decoded += 1
        return error

    def drop(self, rows: set[int]) -> None:
        """End these completions."""
        self.cache.drop(torch.tensor([row in rows for row in self.cache.row_R.tolist()]))


def _plain_attention(q_1HD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    k_SHD, v_SHD = (x.repeat_interleave(QUERY_HEADS // KEY_HEADS, dim=1) for x in (k_SKD, v_SKD))
    weights_HS = (torch.einsum("thd,shd->hs", q_1HD, k_SHD) * SCALE).softmax(-1)
    return torch.einsum("hs,shd->hd", weights_HS, v_SHD)[None]


def test_each_completion_attends_to_its_prompt_and_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one softmax over both, in float64, while completions end in any order and the room grows from two."""
    monkeypatch.setattr(group_cache, "_FIRST_CAPACITY", 2)
    decoder = _Decoder([3, 1, 5, 2], group_size=3)
    errors = [decoder.read_prompts()]
    ending: list[set[int]] = [set(), {4}, set(), {0, 11, 2}, {1, 3, 5}, set(), {9, 10}, set(), {7}]
    for rows in ending:
        errors.append(decoder.read_tokens())
        if rows:
            decoder.drop(rows)
    errors.append(decoder.read_tokens())
    assert sorted(decoder.cache.row_R.tolist()) == [6, 8]
    assert max(errors) < 1e-13


def test_rows_may_be_dropped_before_anything_was_decoded_and_to_the_last() -> None:
    """Completions that end with their first token do not affect the others."""
    decoder = _Decoder([2, 4], group_size=2)
    decoder.read_prompts()
    decoder.drop({0, 3})
    assert sorted(decoder.cache.row_R.tolist()) == [1, 2]
    assert max(decoder.read_tokens(), decoder.read_tokens()) < 1e-13
    decoder.drop({1, 2})
    assert len(decoder.cache.row_R) == 0


def test_prompts_are_dropped_once_half_of_them_are_needed() -> None:
    """The memory of prompts whose completions have all ended is freed, and the others attend as before."""
    decoder = _Decoder([3, 1, 5, 2], group_size=2)
    decoder.read_prompts()
    decoder.read_tokens()
    decoder.drop({2, 3})
    assert len(decoder.cache._prompt_keys[1]) == 4
    assert decoder.read_tokens() < 1e-13
    decoder.drop({0, 1})
    assert {len(each) for each in (*decoder.cache._prompt_keys, *decoder.cache._prompt_values)} == {2}
    assert decoder.read_tokens() < 1e-13
