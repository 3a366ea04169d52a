"""The grader against text that was not written to be read: random, enormous, deeply nested, hostile to parsers."""

import random
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.grading.answer import final_answer, has_reasoning
from components.grading.verifier import Grade, Submission, Verdict, Verifier, grade
from components.shared.answer_policy import AnswerPolicy
from tests.processor_time import processor_time

_DEADLINE_S = 0.3

_SYMBOLS = r"""
48611 2 - + / = < , . : ! % ^ _ ' & ~ # | $ $$ ( ) [ ] { } }{ \{ \} \ \\ \( \) \[ \] x y i e e9 0x None assert
\boxed{ \boxed \fbox{ #### <think> </think> Answer: ** \frac \frac{ \sqrt \sqrt[ \text{ \left( \right) \pi \pm \le
\infty \sin \log \begin{pmatrix} \end{pmatrix} \overline{ \cup \in \cdot \sum_{ \binom
"""
PIECES = [
    *_SYMBOLS.split(),
    *("The answer is ", "not ", "or ", " ", "\n", "\t", "\0"),
    *("\u200b", "\u202e", "\u0665", "\uff15", "\u00bd", "\u00b2", "\u20ac", "\ud800", "\U0001d7d3"),
]
"""What random responses are made of."""

_BAIT = r"""
5 x , . - = / ' % $ * # _ ^ & < \ ( ) [ ] { } () {} {{}} 1, 5. 1/ \{ \\ \( \[ \text{ \frac{ \frac{1}{ \sqrt \left(
\boxed{ \boxed{5 \boxed{5} boxed \fbox{ }\boxed{ #### <think <think> </think> <think></think> Answer: **Answer**
\begin{align*} \end{align*}
"""
UNITS = [
    *_BAIT.split(),
    *(
        " ",
        "\n",
        "\t",
        "\0",
        "\u202e",
        ", ",
        ". ",
        "\n\n",
        "a ",
        "1 ",
        " 5",
        "= 5 ",
        "1 1/2 ",
        "| 5 ",
        "$ $",
        "$5$ ",
        "```\n",
    ),
    *("\\boxed ", "#### ", "#### 5\n", "Answer: 5\n", "The answer is ", "the answer is 5. ", "answer ", "is ", "not "),
    *("if ", "so ", "or 5 ", "5 or "),
]
"""What a long text repeats, to have a regular expression go back over it or a parser descend into it."""

NESTED = [
    *(("{", "}"), ("(", ")"), ("[", "]"), (r"\{", r"\}"), ("|", "|"), ("-", ""), (r"\left(", r"\right)")),
    *((r"\boxed{", "}"), (r"\frac{1}{", "}"), (r"\frac{", "}{1}"), (r"\sqrt{", "}"), ("2^{", "}"), ("x_{", "}")),
    *((r"\text{", "}"), (r"\sin(", ")"), (r"\begin{pmatrix}", r"\end{pmatrix}"), ("<think>", "</think>")),
]
"""What opens and what closes a thing that may be inside itself."""

HEAVY = [
    *("9^{9^{9^{9}}}", "9999999!^{9999999!}", "10000000!", "99!!!!!", r"\binom{10^9}{5\cdot 10^8}", "2^{10^9}"),
    *("10^{10^{10}}", "1e999999999", "1e-999999999", "(1+10^{-12})^{10^{12}}", r"\log_2(3^{10^8})", "1_{10^9}"),
    *(r"\sum_{k=1}^{10^{9}} \frac{1}{k^2}", r"\prod_{k=1}^{10^{7}} k", r"\int_0^1 e^{\sin(x^{17})} \log(x)\,dx"),
    *("(x+1)^{100000}", "(a+b+c+d+f+g+h)^{60}", "x^{x^{x^{x^{x}}}}", "x=x^x=x^{x^x}", "x^{999999999}-1=0"),
    *(r"\sqrt{2+" * 20 + "2" + "}" * 20, r"1+\frac{1}{" * 20 + "2" + "}" * 20, r"\sqrt{" + "7" * 250 + "}"),
    *(r"\sin^{50} x\cos^{50} x\tan^{50} x", "i^{i^{i^{i}}}+(1+i)^{1000000}", r"3^{10^{9}} \pmod{10^{9}+7}"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{1000000}", r"0.\overline{" + "1234567" * 30 + "}"),
    "".join(f"(x_{{{n}}}+y_{{{n}}})" for n in range(18)),
    "+".join(rf"\sqrt{{{n}}}" for n in range(2, 26)),
    "".join(rf"\tan({n}x)" for n in range(1, 30)),
    "".join(rf"\pm {n}" for n in range(1, 40)),
    ",".join(rf"\pm {n}" for n in range(1, 40)),
    ",".join(rf"\sqrt{{{n}}}" for n in range(1, 25)),
    ",".join(map(str, range(20_000))),
    r"\cup".join(f"({n},{n + 1})" for n in range(25)),
    r"\begin{vmatrix}" + r"\\".join("&".join(f"x^{{{n * m}}}" for n in range(5)) for m in range(5)) + r"\end{vmatrix}",
    "7" * 5000,
    "0." + "7" * 5000,
    rf"\frac{{{'7' * 140}}}{{{'3' * 140}}}",
]
"""Short answers that take forever, or all memory, if they are worked out, and others that only look so."""


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """A verifier that all tests of this module share, so what one submission does to it is seen by the next."""
    with Verifier(deadline_s=_DEADLINE_S) as verifier:
        yield verifier


def _submissions(texts: list[str], golds: tuple[str, ...] = ("48611",)) -> list[Submission]:
    return [Submission(gold, text, AnswerPolicy.STATED) for gold, text in product(golds, texts)]


def _check(grades: list[Grade], submissions: list[Submission]) -> None:
    assert len(grades) == len(submissions)
    for each, submission in zip(grades, submissions, strict=True):
        assert isinstance(each.verdict, Verdict)
        assert each.reason
        if each.verdict is Verdict.RIGHT:
            assert submission.gold in submission.response, submission


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), min_size=8, max_size=16))
def test_anything_made_of_what_models_write_gets_a_verdict(verify: Verifier, texts: list[str]) -> None:
    """No mixture of notation, bare or in a box, crashes the verifier or is right without holding the answer."""
    submissions = _submissions([*texts, *(rf"\boxed{{{text}}}" for text in texts)])
    _check(verify(submissions), submissions)


@given(text=st.text(st.characters(exclude_categories=())), policy=st.sampled_from(AnswerPolicy))
def test_the_answer_of_any_text_is_a_part_of_it(text: str, policy: AnswerPolicy) -> None:
    """Whatever characters a text has, its answer is None or something that it says."""
    answer = final_answer(text, policy)
    assert answer is None or (answer and answer in text)
    assert isinstance(has_reasoning(text, policy), bool)


@given(
    before=st.lists(st.sampled_from([piece for piece in PIECES if "box" not in piece and "think" not in piece])),
    after=st.text("abc .\n$*`"),
)
def test_what_surrounds_the_last_box_does_not_matter(before: list[str], after: str) -> None:
    """An answer in the last box is right, whatever is written before it and whatever else follows."""
    response = "".join(before) + "\n" + r"\boxed{48611}" + after
    for policy in AnswerPolicy.BOXED, AnswerPolicy.DECLARED, AnswerPolicy.STATED:
        assert grade("48611", response, policy).verdict is Verdict.RIGHT


@pytest.mark.parametrize("policy", AnswerPolicy)
def test_random_bytes_have_a_verdict(policy: AnswerPolicy) -> None:
    """Bytes that are no text are wrong in every encoding that can read them."""
    generator = random.Random(0)
    for size in (1, 10, 1_000, 100_000):
        noise = generator.randbytes(size)
        for text in (noise.decode("latin-1"), noise.decode(errors="surrogateescape"), noise.decode(errors="replace")):
            for response in (text, rf"\boxed{{{text}}}", f"#### {text}", f"The answer is {text}."):
                assert grade("48611", response, policy).verdict is not Verdict.RIGHT


@pytest.mark.parametrize("policy", AnswerPolicy)
@pytest.mark.parametrize("unit", UNITS)
def test_the_time_to_find_an_answer_grows_with_the_length_alone(unit: str, policy: AnswerPolicy) -> None:
    """A text four times as long takes about four times as long, not sixteen times, whatever it repeats."""
    for opening in ("", r"\boxed{5} ", r"\boxed{", "#### ", "The answer is ", "<think>"):
        times = (_seconds_to_find(opening, unit, policy) for _ in range(5))
        # What takes no time is no concern, and one measurement in five that nothing disturbed is enough.
        assert any(long_s < max(0.1, 9 * short_s) for short_s, long_s in times), opening


def _seconds_to_find(opening: str, unit: str, policy: AnswerPolicy) -> list[float]:
    """The time for about 2,000 characters, and for about 8,000."""
    return [_seconds(opening + unit * (length // len(unit)), policy) for length in (2_000, 8_000)]


def _seconds(text: str, policy: AnswerPolicy) -> float:
    started = time.thread_time()
    final_answer(text, policy)
    has_reasoning(text, policy)
    return time.thread_time() - started


@pytest.mark.slow
def test_a_million_characters_are_read_at_once() -> None:
    """Finding an answer in a million characters of all kinds of bait takes a few seconds at most."""
    baits = [unit * (1_000_000 // len(UNITS) // len(unit)) for unit in UNITS]
    for text in ("".join(baits), "".join(reversed(baits)), " ".join(sorted(baits))):
        for policy in AnswerPolicy:
            with processor_time(5):
                final_answer(text, policy)
                has_reasoning(text, policy)


@pytest.mark.slow
def test_bait_in_a_box_is_wrong_at_once(verify: Verifier) -> None:
    """An answer of a few hundred characters that mean nothing is wrong, and not for want of time."""
    baits = [rf"\boxed{{{unit * (290 // len(unit))}}}" for unit in UNITS]
    _check_all_wrong(verify, _submissions(baits, ("x^2+1", "(3,4)")))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [30, 100_000])
def test_deep_nesting_is_wrong_and_not_for_want_of_time(depth: int) -> None:
    """Whatever is inside itself many times is no answer, in a box and out of it, closed and unclosed."""
    texts = []
    for opening, closing in NESTED:
        nested = opening * depth + "5" + closing * depth
        texts += [rf"\boxed{{{nested}}}", rf"\boxed{{{opening * depth}", f"Answer: {nested}"]
    with Verifier() as verify:
        _check_all_wrong(verify, _submissions(texts))


def _check_all_wrong(verify: Verifier, submissions: list[Submission]) -> None:
    judged = zip(submissions, verify(submissions), strict=True)
    assert [(each, grade) for each, grade in judged if grade.verdict is not Verdict.WRONG] == []


@pytest.mark.slow
def test_heavy_answers_end_at_the_deadline_and_harm_no_other(verify: Verifier) -> None:
    """An answer that cannot be worked out costs at most the deadline, and the honest one beside it is right."""
    honest = Submission(r"\frac{3}{4}", r"So it is \boxed{\dfrac34}.", AnswerPolicy.BOXED)
    heavy = _submissions([rf"\boxed{{{answer}}}" for answer in HEAVY], ("x^2+1",))
    verdicts = [grade.verdict for grade in verify([each for bad in heavy for each in (honest, bad)])]
    assert verdicts[::2] == [Verdict.RIGHT] * len(heavy)
    assert Verdict.RIGHT not in verdicts[1::2]


@pytest.mark.slow
def test_a_heavy_answer_may_be_the_expected_one(verify: Verifier) -> None:
    """An expected answer that cannot be worked out does no more harm than a given one, and equals its own text."""
    others = verify(_submissions([r"\boxed{5}"], tuple(HEAVY[::4])))
    assert Verdict.RIGHT not in {grade.verdict for grade in others}
    itself = verify([Submission(answer, rf"\boxed{{{answer}}}", AnswerPolicy.BOXED) for answer in HEAVY])
    assert {grade.verdict for grade in itself} == {Verdict.RIGHT}


@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "exec('open({path!r}, \"w\")')",
        "eval(\"open({path!r}, 'w')\")",
        "S('open({path!r}, \"w\")')",
        "open({path!r}, 'w')",
        "[].__class__.__base__.__subclasses__()",
        "lambda: open({path!r}, 'w')",
        r"\operatorname{{open}}({path!r})",
        r"\write18{{touch {path}}}",
        r"\immediate\write18{{touch {path}}}",
        "$(touch {path})",
        "`touch {path}`",
        "; touch {path}",
    ],
)
def test_no_answer_is_run(code: str, tmp_path: Path) -> None:
    """An answer is read as mathematics and never evaluated as a program, as the expected answer neither."""
    path = tmp_path / "made"
    answer = code.format(path=str(path))
    for gold, response in ((answer, r"\boxed{5}"), ("5", rf"\boxed{{{answer}}}"), ("x^2+1", f"#### {answer}")):
        grade(gold, response, AnswerPolicy.STATED)
    assert not path.exists()
