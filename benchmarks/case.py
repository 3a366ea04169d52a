"""What both trainers are given: a model of random weights, prompts, and how long each completion is to be.

Shape suffixes:
    B  completions of a step, group after group
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_SEED = 1

_SIZES: dict[str, dict[str, Any]] = {
    # About the model of `make run`.
    "0.6m": {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "13m": {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # The shapes of Qwen2.5-0.5B and Qwen2.5-1.5B.
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1_536,
        "intermediate_size": 8_960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
MODELS = tuple(_SIZES)


@dataclass(frozen=True)
class Row:
    """The size of one optimizer step."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    shortest: int
    """Tokens of the shortest completion; lengths are spread evenly from here ..."""
    longest: int
    """... to here."""

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Read `4x8:117/64` (all completions of one length) or `4x8:117/16-256` (lengths spread evenly)."""
        match = re.fullmatch(r"(\d+)x(\d+):(\d+)/(?:(\d+)-)?(\d+)", text)
        if match is None:
            raise ValueError(f"{text} is no row; PROMPTSxGROUP:PROMPT/COMPLETION tokens is expected, like 4x8:117/64")
        num_prompts, group_size, prompt_tokens, shortest, longest = match.groups()
        return cls(int(num_prompts), int(group_size), int(prompt_tokens), int(shortest or longest), int(longest))

    def __str__(self) -> str:
        lengths = str(self.longest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return f"{self.num_prompts}x{self.group_size}:{self.prompt_tokens}/{lengths}"

    def lengths_B(self) -> list[int]:
        """Return the tokens of each completion, its end token included; which is long is shuffled, always alike."""
        size = self.num_prompts * self.group_size
        spread = [round(self.shortest + (self.longest - self.shortest) * i / (size - 1)) for i in range(size)]
        return random.Random(_SEED).sample(spread, size)


def save_model(folder: Path, *, model: str, dtype: torch.dtype) -> tuple[PretrainedConfig, int]:
    """Write a model with a tokenizer of one token per word; return its shape and how many parameters it has.

    It is a Qwen2 of random weights and one of the `MODELS`, or that of a folder.
    """
    vocabulary_size = _SIZES[model]["vocab_size"] if model in _SIZES else AutoConfig.from_pretrained(model).vocab_size
    words = [*_SPECIAL, *(f"w{index}" for index in range(len(_SPECIAL), vocabulary_size))]
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=_SPECIAL[2]))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, end, unknown = _SPECIAL
    PreTrainedTokenizerFast(tokenizer_object=built, pad_token=pad, eos_token=end, unk_token=unknown).save_pretrained(
        folder
    )
    torch.manual_seed(_SEED)
    ids: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if model in _SIZES:
        made = Qwen2ForCausalLM(Qwen2Config(**_SIZES[model], tie_word_embeddings=True, **ids)).to(dtype)
    else:
        made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        made.config.update(ids)
        made.generation_config = GenerationConfig(**ids)
    made.save_pretrained(folder)
    return made.config, made.num_parameters()


def write_case(path: Path, row: Row, *, model: Path, vocabulary_size: int, num_steps: int, **settings: Any) -> None:
    """Write everything that a worker reads: `settings` and what follows from the row.

    Rewards are random numbers, so that no group is without spread and none is left out.
    """
    draw = random.Random(_SEED)
    words = range(len(_SPECIAL), vocabulary_size)
    lengths_B = row.lengths_B()
    case = {
        "model": str(model),
        "end_id": _SPECIAL.index("<eos>"),
        "group_size": row.group_size,
        "prompt_tokens": row.prompt_tokens,
        "prompts": [
            [" ".join(f"w{word}" for word in draw.choices(words, k=row.prompt_tokens)) for _ in range(row.num_prompts)]
            for _ in range(num_steps)
        ],
        "lengths_B": lengths_B,
        "rewards_B": [draw.random() for _ in lengths_B],
        **settings,
    }
    path.write_text(json.dumps(case), encoding="utf-8")
