"""Tokenizers made from problems: what they learn, and that text survives them."""

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem
from components.shared.tokenizer import EOS, PAD, UNKNOWN, tokenizer_for
from tests import tiny


def _model(base: str, prompt: str = "Solve:\n{question}\n") -> ModelConfig:
    return ModelConfig(base=base, prompt=prompt, answer=AnswerPolicy.DECLARED)


def _problem(number: int) -> Problem:
    """A sum as a story."""
    question = f"Ada has {number} apples and gets {number + 1} more. How many apples has she now?"
    solution = f"{number}+{number + 1}={2 * number + 1}\n#### {2 * number + 1}"
    return tiny.problem(number).model_copy(update={"question": question, "solution": solution})


_PROBLEMS = [_problem(number) for number in range(60)]
_WORDS, _BYTE_PAIRS = _model("scratch:tiny"), _model("scratch:math")
TOKENIZERS = [tokenizer_for(model, _PROBLEMS) for model in (_WORDS, _BYTE_PAIRS)]
_WORD_TOKENIZER, _BYTE_PAIR_TOKENIZER = TOKENIZERS


def _survives(tokenizer: Tokenizer, text: str) -> bool:
    return bool(tokenizer.decode(tokenizer.encode(text).ids) == text)


@given(text=st.text(string.printable + "éß→中😀\u0301", max_size=40))
def test_byte_pairs_encode_any_text(text: str) -> None:
    """Of any script; digits are tokens of their own, so that carrying can be learned."""
    tokens = _BYTE_PAIR_TOKENIZER.encode(text).tokens
    assert _survives(_BYTE_PAIR_TOKENIZER, text)
    assert UNKNOWN not in tokens
    assert [token for token in tokens if set(token) & set(string.digits)] == [c for c in text if c in string.digits]


def test_words_and_numbers_are_tokens() -> None:
    """With the space or stop that goes with a word; every problem survives, and an unknown word is one token."""
    for problem in _PROBLEMS:
        assert _survives(_WORD_TOKENIZER, _WORDS.ask(problem.question))
        assert _survives(_WORD_TOKENIZER, problem.solution)
    assert _survives(_WORD_TOKENIZER, "\n".join([*string.printable[:95], *map(str, range(100))]))
    assert _WORD_TOKENIZER.encode("Ada gets 12 more. 12+13=25").tokens == [
        *("Ada", " gets", " ", "12", " more.", " "),
        *("12", "+", "13", "=", "25"),
    ]
    assert _WORD_TOKENIZER.encode("Ada has zebras").tokens == ["Ada", " has", UNKNOWN]


def test_digits_are_tokens_and_so_is_what_frames_a_call() -> None:
    """A number of any length survives, in problems or not; fences with their language and `#### ` are one token."""
    called = [*_PROBLEMS, _problem(60).model_copy(update={"solution": "```calculator\n60*7\n```\n#### 420"})]
    tokenizer = tokenizer_for(_model("scratch:digits"), called)
    assert all(_survives(tokenizer, problem.solution) for problem in called)
    assert tokenizer.encode("Ada gets 120 more.").tokens == ["Ada", " gets", " ", "1", "2", "0", " more."]
    tokens = tokenizer.encode(called[-1].solution).tokens
    assert tokens == ["```calculator", "\n", "6", "0", "*", "7", "\n", "```", "\n", "#### ", "4", "2", "0"]


def test_the_prompt_is_learned_too() -> None:
    """Its words are known, though they are in no problem; ids of special tokens are the same in every vocabulary."""
    assert UNKNOWN not in _WORD_TOKENIZER.encode("Solve").tokens
    bare = tokenizer_for(_model("scratch:tiny", "{question}"), _PROBLEMS)
    assert UNKNOWN in bare.encode("Solve").tokens
    for tokenizer in (_WORD_TOKENIZER, _BYTE_PAIR_TOKENIZER, bare):
        assert [tokenizer.token_to_id(token) for token in (PAD, EOS, UNKNOWN)] == [0, 1, 2]


def test_equal_problems_give_an_equal_tokenizer() -> None:
    """Byte for byte, also in a process where sets have another order."""
    code = (
        "from tests.shared.test_tokenizer import *; print(*(each.to_str() for each in TOKENIZERS), sep='\\n', end='')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    printed = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == "\n".join(each.to_str() for each in TOKENIZERS)


@pytest.mark.slow
@pytest.mark.parametrize("model", [_WORDS, _BYTE_PAIRS], ids=["words", "byte pairs"])
def test_validation_and_training_count_the_same_tokens(tmp_path: Path, model: ModelConfig) -> None:
    """Lengths are validated with one library and trained with another."""
    import torch

    from components.policy.checkpoint import create, load, save

    save(create(model, _PROBLEMS, seed=1, dtype=torch.float32), tmp_path)
    validated, trained = tokenizer_for(model, _PROBLEMS), load(tmp_path, dtype=torch.float32)
    saved = tokenizer_for(_model(str(tmp_path), model.prompt), [])
    known = [text for problem in _PROBLEMS for text in (model.ask(problem.question), problem.solution)]
    for text in (*known, "zebras  and\n\n345,  é"):
        ids = validated.encode(text).ids
        assert saved.encode(text).ids == ids
        assert list(trained.encode(text)) == ids
        assert trained.decode(ids) == validated.decode(ids).replace(UNKNOWN, "")


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    """A truncated download is found before anything is trained."""
    path = tmp_path / "tokenizer.json"
    with pytest.raises(PipelineError, match=f"^model {tmp_path}: holds no tokenizer.json; a Hugging Face model folder"):
        tokenizer_for(_model(str(tmp_path)), [])
    path.write_text('{"version": "1.0", "trunc')
    with pytest.raises(PipelineError, match=f"^{path}: cannot be read as a tokenizer .*is the file truncated"):
        tokenizer_for(_model(str(tmp_path)), [])
