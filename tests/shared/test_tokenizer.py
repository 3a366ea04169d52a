"""Tokenizers made from problems: what they learn, and that text survives them."""

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.problem import Problem, Split, write_problems
from components.shared.tokenizer import EOS, PAD, UNKNOWN, tokenizer_for

_WORDS = ModelConfig(base="scratch:tiny", prompt="Solve:\n{question}\n", answer=AnswerPolicy.DECLARED)
_BYTE_PAIRS = ModelConfig(base="scratch:math", prompt="Solve:\n{question}\n", answer=AnswerPolicy.DECLARED)
# As in any tokenizer, text that spells a special token is that token.
_PRINTABLE = st.text(st.characters(exclude_categories=["C"])).filter(
    lambda text: not any(token in text for token in (PAD, EOS, UNKNOWN))
)


def _problem(number: int) -> Problem:
    return Problem(
        id=f"sums/train/{number}",
        source="sums",
        split=Split.TRAIN,
        question=f"Ada has {number} apples and gets {number + 1} more. How many apples has she now?",
        solution=f"{number}+{number + 1}={2 * number + 1}\n#### {2 * number + 1}",
        answer=str(2 * number + 1),
        subject="",
        level=None,
    )


_PROBLEMS = [_problem(number) for number in range(60)]
_WORD_TOKENIZER = tokenizer_for(_WORDS, _PROBLEMS)
_BYTE_PAIR_TOKENIZER = tokenizer_for(_BYTE_PAIRS, _PROBLEMS)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text


@settings(deadline=None)
@given(text=_PRINTABLE)
def test_byte_pairs_give_any_text_back(text: str) -> None:
    """Bytes are the floor: no letter of any script is unknown."""
    encoded = _BYTE_PAIR_TOKENIZER.encode(text)
    assert _text(_BYTE_PAIR_TOKENIZER, encoded.ids) == text
    assert UNKNOWN not in encoded.tokens


@settings(deadline=None)
@given(text=st.text(string.digits + "aZ .,+-=", max_size=40))
def test_byte_pairs_read_digits_one_by_one(text: str) -> None:
    """No token holds a digit beside anything else, so that carrying can be learned."""
    tokens = _BYTE_PAIR_TOKENIZER.encode(text).tokens
    assert [token for token in tokens if set(token) & set(string.digits)] == [c for c in text if c in string.digits]


def test_byte_pairs_learn_what_the_problems_repeat() -> None:
    """A word that is in every problem is one token."""
    assert "Ġapples" in _BYTE_PAIR_TOKENIZER.encode("two apples").tokens


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["Ada", " has", " apples", " gets", " more.", " now?", "\n", "#### ", "+", "=", " "])
        | st.integers(0, 99).map(str)
        | st.sampled_from(string.printable[:95])
    )
)
def test_words_give_known_text_back(pieces: list[str]) -> None:
    """What the problems say, numbers up to 99 and every printable character of ASCII."""
    text = "".join(pieces)
    # Put together at random, known pieces may make an unknown word or number.
    known = UNKNOWN not in _WORD_TOKENIZER.encode(text).tokens
    separated = "\n".join(pieces)
    assert _text(_WORD_TOKENIZER, _WORD_TOKENIZER.encode(separated).ids) == separated
    assert not known or _text(_WORD_TOKENIZER, _WORD_TOKENIZER.encode(text).ids) == text


def test_words_give_every_problem_back() -> None:
    """Prompts and solutions alike."""
    for problem in _PROBLEMS:
        for text in (_WORDS.ask(problem.question), problem.solution):
            assert _text(_WORD_TOKENIZER, _WORD_TOKENIZER.encode(text).ids) == text


def test_words_are_whole_and_numbers_are_whole() -> None:
    """One token each, with the space or stop that goes with a word; an unknown word is one token, too."""
    assert _WORD_TOKENIZER.encode("Ada gets 12 more. 12+13=25").tokens == [
        *("Ada", " gets", " ", "12", " more.", " "),
        *("12", "+", "13", "=", "25"),
    ]
    assert _WORD_TOKENIZER.encode("Ada has zebras").tokens == ["Ada", " has", UNKNOWN]


@pytest.mark.parametrize("tokenizer", [_WORD_TOKENIZER, _BYTE_PAIR_TOKENIZER], ids=["words", "byte pairs"])
def test_the_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    """Their ids are the same for every vocabulary."""
    assert [tokenizer.token_to_id(token) for token in (PAD, EOS, UNKNOWN)] == [0, 1, 2]


def test_a_vocabulary_is_no_larger_than_asked_for() -> None:
    """The model's embedding has that many rows."""
    scratch = _BYTE_PAIRS.scratch
    assert scratch
    assert scratch.vocabulary_size
    assert _BYTE_PAIR_TOKENIZER.get_vocab_size() <= scratch.vocabulary_size


@pytest.mark.parametrize("model", [_WORDS, _BYTE_PAIRS], ids=["words", "byte pairs"])
def test_equal_problems_give_an_equal_tokenizer(tmp_path: Path, model: ModelConfig) -> None:
    """Byte for byte, also in another process, where sets have another order; other problems give another one."""
    write_problems(tmp_path, Split.TRAIN, _PROBLEMS)
    printed = {_printed_elsewhere(model, tmp_path, hash_seed) for hash_seed in ("1", "2")}
    assert printed == {tokenizer_for(model, _PROBLEMS).to_str()}
    other = [*_PROBLEMS, _problem(7).model_copy(update={"question": "Which zebras? Zebras! zebras zebras"})]
    assert tokenizer_for(model, other).to_str() != tokenizer_for(model, _PROBLEMS).to_str()


def _printed_elsewhere(model: ModelConfig, folder: Path, hash_seed: str) -> str:
    code = (
        "import sys; from pathlib import Path; from components.shared.model import ModelConfig; "
        "from components.shared.problem import Split, read_problems; "
        "from components.shared.tokenizer import tokenizer_for; "
        "model = ModelConfig.model_validate_json(sys.argv[1]); "
        "print(tokenizer_for(model, read_problems(Path(sys.argv[2]), Split.TRAIN)).to_str(), end='')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, model.model_dump_json(), str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_prompt_is_part_of_what_is_learned() -> None:
    """A prompt's words are known, though no problem holds them."""
    assert UNKNOWN not in _WORD_TOKENIZER.encode("Solve").tokens
    bare = tokenizer_for(ModelConfig(base="scratch:tiny", prompt="{question}", answer=AnswerPolicy.DECLARED), _PROBLEMS)
    assert UNKNOWN in bare.encode("Solve").tokens


@pytest.mark.parametrize("tokenizer", [_WORD_TOKENIZER, _BYTE_PAIR_TOKENIZER], ids=["words", "byte pairs"])
def test_a_saved_tokenizer_gives_the_same_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The folder stands for itself as a base model, whatever the problems are then."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_for(ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED), [])
    text = "Ada has 12 apples, zebras and 345 more.\n#### 7"
    assert read.encode(text).ids == tokenizer.encode(text).ids
    assert read.to_str() == tokenizer.to_str()


@pytest.mark.slow
@pytest.mark.parametrize("model", [_WORDS, _BYTE_PAIRS], ids=["words", "byte pairs"])
def test_the_tokenizer_that_training_saves_gives_the_same_ids(tmp_path: Path, model: ModelConfig) -> None:
    """Lengths are validated with one library and trained with another: both must count the same."""
    import torch

    from components.policy.checkpoint import create, load, save

    checkpoint = create(model, _PROBLEMS, seed=1, dtype=torch.float32)
    save(checkpoint, tmp_path)
    validated, trained = tokenizer_for(model, _PROBLEMS), load(tmp_path, dtype=torch.float32)
    saved = tokenizer_for(ModelConfig(base=str(tmp_path), prompt=model.prompt, answer=AnswerPolicy.DECLARED), [])
    known = [text for problem in _PROBLEMS for text in (model.ask(problem.question), problem.solution)]
    for text in (*known, "zebras  and\n\n345,  é"):
        ids = validated.encode(text).ids
        assert saved.encode(text).ids == ids
        assert list(trained.encode(text)) == ids
        assert trained.decode(ids) == _text(validated, ids).replace(UNKNOWN, "")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """The weights alone do not say what their rows mean."""
    with pytest.raises(PipelineError, match=f"^{tmp_path}: holds no tokenizer.json; a Hugging Face model folder is"):
        tokenizer_for(ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED), [])


@pytest.mark.parametrize("content", ['{"version": "1.0", "trunc', "", "{}", "\0"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    """A download that was cut off is found before anything is trained."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(PipelineError, match=f"^{path}: cannot be read as a tokenizer .*is the file truncated"):
        tokenizer_for(ModelConfig(base=str(tmp_path), prompt="{question}", answer=AnswerPolicy.DECLARED), [])
