import json
import math
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from components.grading.verifier import Grade, Verdict
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from components.shared.tokenizer import tokenizer_for
from components.train_grpo.steps import Step, TextStep, outcome, verified_steps, worked_steps
from tests import tiny
from tests.processor_time import processor_time

RIGHT, WRONG, UNSCORABLE = (Grade(verdict, extracted=None, reason="") for verdict in Verdict)
DATA = Path("../shared/data")
WORKED = "3+5=8\n10+9=18\n#### 18"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """An untrained model whose tokens are whole words and numbers."""
    return tiny.checkpoint()


@pytest.fixture(scope="module")
def byte_pairs() -> Tokenizer:
    """A byte-level BPE; it knows none but the tokens of `tiny.PROBLEMS`, and all bytes."""
    return tokenizer_for(
        ModelConfig(base="scratch:math", prompt="{question}\n", answer=AnswerPolicy.DECLARED), tiny.PROBLEMS
    )


def _completion(ids: Sequence[int], text: str) -> Completion:
    return Completion(TokenSequence((0,), tuple(ids)), (0.0,) * len(ids), text, finished=True)


def _by_character(text: str, grade: Grade, *, end_tokens: int = 1) -> list[Step]:
    """The steps of a text whose tokens are its characters, and end tokens that decode to nothing."""
    ids = [*map(ord, text), *[0] * end_tokens]
    return verified_steps(_completion(ids, text), grade, lambda some: "".join(map(chr, filter(None, some))))


def test_a_step_ends_with_the_newline_of_each_worked_line() -> None:
    """Lines that state nothing belong to the step after them; the answer's line is none."""
    text = "Tom works it out.\n3+5=8\nThat is a lot.\nAnd then\n10+9=18\n#### 18"
    ends = [text.index("That"), text.index("####")]
    assert worked_steps(text) == [TextStep(ends[0], right=True), TextStep(ends[1], right=False)]


def test_the_last_step_is_the_answer() -> None:
    """It ends at the end token, and what follows the last worked line belongs to it."""
    assert _by_character(WORKED, RIGHT) == [Step(6, 1.0), Step(14, 0.0), Step(22, 1.0)]
    assert _by_character(WORKED, WRONG) == [Step(6, 1.0), Step(14, 0.0), Step(22, 0.0)]


@pytest.mark.parametrize(("grade", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)])
@pytest.mark.parametrize("text", ["#### 18", "It is 18.", "", "3+5=8", "#### 3+5=8\n"])
def test_a_completion_without_worked_lines_is_one_step(text: str, grade: Grade, reward: float) -> None:
    """Process supervision is then outcome supervision."""
    assert _by_character(text, grade) == [Step(len(text) + 1, reward)]


def test_an_answer_that_cannot_be_scored_is_not_a_wrong_one() -> None:
    """The lines above it keep their rewards."""
    first, second, last = _by_character(WORKED, UNSCORABLE)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert math.isnan(last.reward)
    assert math.isnan(outcome(UNSCORABLE))


@pytest.mark.parametrize(
    "text",
    [
        "So 3+5=8 #### 8\n",
        "So \\boxed{8} since 3+5=8\n",
        "So \\fbox{8}, 3+5=8\nthat is\n",
        "#### 8\n3+5=8\n2+2=4\n",
        "#### Step 1\n3+5=8\n#### 8",
    ],
)
def test_nothing_from_the_last_answer_marker_on_is_worked(text: str) -> None:
    """Neither the marker's own line nor sums that pad the text below; a heading above hides nothing."""
    heading = text.startswith("#### Step")
    assert worked_steps(text) == ([TextStep(len("#### Step 1\n3+5=8\n"), right=True)] if heading else [])


@pytest.mark.parametrize("cut", ["12*5=6", "12*5=60"])
def test_a_line_that_is_cut_off_is_not_judged(cut: str) -> None:
    """Nobody knows what it would have said; it belongs to the step of the missing answer."""
    text = f"3+5=8\n{cut}"
    assert worked_steps(text) == [TextStep(6, right=True)]
    assert _by_character(text, WRONG, end_tokens=0) == [Step(6, 1.0), Step(len(text), 0.0)]


def test_where_the_completion_is_cut_off_behind_a_step_its_end_is_the_answer() -> None:
    """Two steps cannot end at one token, and the missing answer outweighs the sum."""
    assert _by_character("2+2=4\n3+5=8\n", WRONG, end_tokens=0) == [Step(6, 1.0), Step(12, 0.0)]


@pytest.mark.parametrize(
    "pad", ["3+5=8", "5+3=8", "8=3+5", "3 + 5 + 0 = 8.0", "1=1", "8 = 8", "0+0=0", "1*1=1", "7*1=7", "4+2=2+4"]
)
def test_padding_is_no_step(pad: str) -> None:
    """What was said before in any order, and what needs no calculation, earns nothing."""
    text = f"3+5=8\n2*6=12\n{pad}\n{pad}\n2+2=4\n#### 4"
    assert worked_steps(text) == [
        TextStep(6, right=True),
        TextStep(13, right=True),
        TextStep(text.index("####"), right=True),
    ]


def test_a_wrong_line_that_is_repeated_counts_once() -> None:
    """As a right one does."""
    assert worked_steps("3+5=9\n3+5=9\n2+2=4\n") == [TextStep(6, right=False), TextStep(18, right=True)]


def test_a_line_is_right_if_all_that_it_adds_holds() -> None:
    """One false equation makes it wrong, wherever it stands; one that was said before is not judged again."""
    assert [step.right for step in worked_steps("3+5=8 and 8+1=9\n4+4=9, 9-2=7\n9-2=7, 4+4=9, 2*6=12\n")] == [
        True,
        False,
        True,
    ]


def test_a_mark_and_the_text_around_it_are_one_step() -> None:
    """The formats of GSM8K and of the built-in word problems."""
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = <<48+24=72>>71.\n#### 72"
    assert [step.right for step in worked_steps(text)] == [True, False]


def test_whole_word_tokens(checkpoint: Checkpoint) -> None:
    """With the tokenizer of a model from scratch: 3 + 5 = 8 newline is six tokens, 10 + 9 = 18 newline as many."""
    ids = (*checkpoint.encode(WORKED), checkpoint.end_ids[0])
    completion = _completion(ids, checkpoint.decode(ids))
    assert completion.text == WORKED
    assert verified_steps(completion, RIGHT, checkpoint.decode) == [Step(6, 1.0), Step(12, 0.0), Step(len(ids), 1.0)]


@pytest.mark.parametrize(
    "prose", ["", "Tom has apples. ", "\u20ac 5 \U0001f34e\u00e9 ", "\U0001f34e", "\ufffd", "\ufffd\ufffd"]
)
def test_byte_tokens(byte_pairs: Tokenizer, prose: str) -> None:
    """A step ends at the token that completes its newline, though characters before it take several tokens."""
    lines = [f"{prose} so 3+5=8. \U0001f34e\n", f"10+9=18. {prose}\n", f"{prose}#### 18"]
    ids = [byte_pairs.encode(line).ids for line in lines]
    completion = _completion([*chain(*ids)], "".join(lines))
    assert byte_pairs.decode(completion.tokens.completion_ids) == completion.text
    ends = list(accumulate(map(len, ids)))
    found = verified_steps(completion, RIGHT, byte_pairs.decode)
    assert found == [Step(ends[0], 1.0), Step(ends[1], 0.0), Step(ends[2], 1.0)]


def test_bytes_that_each_decode_to_a_character_of_their_own() -> None:
    """As byte fallback does: the parts of a character are longer than it is, and no step may end inside of it."""
    text = "3+5=8. \U0001f34e\n#### 8"
    ids = list(text.encode())

    def decode(some: Sequence[int]) -> str:
        known = bytes(some).decode(errors="ignore")
        return known + "\ufffd" * (len(some) - len(known.encode()))

    newline = ids.index(ord("\n"))
    assert verified_steps(_completion(ids, text), RIGHT, decode) == [Step(newline + 1, 1.0), Step(len(ids), 1.0)]


def test_a_decoder_that_strips_spaces() -> None:
    """The newline is seen with the token after it, which is where the step then ends."""
    ids = [ord(character) for character in WORKED]
    found = verified_steps(_completion(ids, WORKED), RIGHT, lambda some: "".join(map(chr, some)).strip())
    assert found == [Step(7, 1.0), Step(15, 0.0), Step(21, 1.0)]


def test_a_decoder_that_loses_text() -> None:
    """Steps that the tokens never reach end with the completion: they are the answer."""
    ids = [ord(character) for character in WORKED]
    assert verified_steps(_completion(ids, WORKED), RIGHT, lambda _: "") == [Step(len(ids), 1.0)]


def test_steps_that_end_in_one_token_are_one() -> None:
    """It is right if all are."""
    pieces = ["10+9=18\n3+5=8\n", "2+2=4\n3+3=6\n", "#### 18"]
    steps = verified_steps(
        _completion(range(3), "".join(pieces)), RIGHT, lambda some: "".join(pieces[token] for token in some)
    )
    assert steps == [Step(1, 0.0), Step(2, 1.0), Step(3, 1.0)]


@given(
    st.lists(
        st.sampled_from(["3+5=8", "4+5=8", "x", "\n", "\n", " ", "2*3=6\n", "#### 8", "\\boxed{", "\ufffd", "\u20ac"])
    )
)
def test_ends_increase_to_the_last_token(pieces: list[str]) -> None:
    """Whatever is written, and however it is cut into tokens: every token belongs to exactly one step."""
    pieces.append("")
    text = "".join(pieces)
    ids = range(len(pieces))
    steps = verified_steps(_completion(ids, text), WRONG, lambda some: "".join(pieces[token] for token in some))
    ends = [step.end for step in steps]
    assert ends == sorted(set(ends))
    assert ends[0] > 0
    assert ends[-1] == len(ids)
    assert len(steps) <= len(worked_steps(text)) + 1
    for step, found in zip(worked_steps(text), steps, strict=False):
        assert "".join(pieces[: found.end]).startswith(text[: step.end])


@pytest.mark.parametrize("line", ["", "3+5=8", "5 = 5", "<<1+1=2>>2"])
def test_many_lines_take_time_in_proportion(line: str) -> None:
    """Ten thousand lines take well under a second or two."""
    with processor_time(10):
        assert len(worked_steps(f"{line}\n" * 10_000)) <= 1


@pytest.mark.long
@pytest.mark.slow
def test_real_solutions_have_a_right_step_for_nearly_every_line() -> None:
    """GSM8K's own solutions: at most one row in two hundred has a line that looks false."""
    path = DATA / "gsm8k_train.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}, which is not part of the project")
    rows = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [worked_steps(row) for row in rows]
    assert sum(map(len, steps)) > 0.85 * sum(row.count("\n") for row in rows)
    assert sum(any(not step.right for step in some) for some in steps) < len(rows) / 200
