"""The grader against text that was not written to be read: random, enormous, deeply nested, hostile to parsers."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.grading.parsing import parse, parse_structure
from components.grading.verifier import Submission, Verdict, Verifier, grade
from components.shared.answer_policy import AnswerPolicy
from tests.grading.processes import processor_time
from tests.grading.test_answer import PIECES

NESTED = [
    *(("{", "}"), ("(", ")"), ("[", "]"), (r"\{", r"\}"), ("|", "|"), ("-", ""), (r"\left(", r"\right)")),
    *((r"\boxed{", "}"), (r"\frac{1}{", "}"), (r"\frac{", "}{1}"), (r"\sqrt{", "}"), ("2^{", "}"), ("x_{", "}")),
    *((r"\text{", "}"), (r"\sin(", ")"), (r"\begin{pmatrix}", r"\end{pmatrix}"), ("<think>", "</think>")),
]
"""Openings and closings that can be nested."""

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
"""Short answers that take forever, or all memory, if they are computed, and others that only look so."""


def _submissions(texts: list[str], golds: tuple[str, ...] = ("48611",)) -> list[Submission]:
    return [Submission(gold, text, AnswerPolicy.STATED) for gold, text in product(golds, texts)]


def _not_wrong(verify: Verifier, submissions: list[Submission]) -> list[Submission]:
    grades = zip(submissions, verify(submissions), strict=True)
    return [submission for submission, each in grades if each.verdict is not Verdict.WRONG]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text("12xy(),;[]{}\\&=<>|andor ") | st.text())
def test_any_text_can_be_parsed(written: str) -> None:
    r"""Nothing raises; spaces around an answer change nothing, and (but for `\pm`) no part is longer than the whole."""
    assert parse(f" {written} ") == parse(written)
    latex = parse(written).latex
    assert latex == latex.strip()
    assert r"\pm" in latex or all(len(part) <= len(latex) for part in parse_structure(latex).parts)


@pytest.mark.parametrize(
    "piece",
    ["(", "-", "\\frac", "\\sqrt", "2^", "x(", "{", "\\sin ", "!", "x!", "1+(", "|", "[1,", "$", "x_", "1,", "$1$ "],
)
def test_reading_a_question_takes_linear_time(piece: str) -> None:
    """And no more stack for deeper nesting."""
    with processor_time(5):
        grade("3", r"\boxed{\frac{6}{2}}", AnswerPolicy.BOXED, piece * 5000)


@settings(max_examples=200)
@given(
    st.sampled_from(["5", r"\frac{1}{2}", "(1,2)", "x=5", r"\text{even}", "52_8", "x>3", r"\{1,2\}"]),
    st.text() | st.text("0123456789.,/-+%$ \\{}()[]_=:|abcx<>"),
    st.sampled_from(AnswerPolicy),
)
def test_any_answer_gets_a_verdict(gold: str, answer: str, policy: AnswerPolicy) -> None:
    """No text that a model could write raises, or makes a readable answer unscorable."""
    for response in (answer, f"#### {answer}", rf"\boxed{{{answer}}}"):
        assert grade(gold, response, policy).verdict in {Verdict.RIGHT, Verdict.WRONG}


@given(
    before=st.lists(st.sampled_from([piece for piece in PIECES if "box" not in piece and "think" not in piece])),
    after=st.text("abc .\n$*`"),
)
def test_paragraphs_around_the_last_box_do_not_matter(before: list[str], after: str) -> None:
    """An answer in the last box is right regardless of what is written in sentences before and after it."""
    response = "".join(before) + ".\n\n" + r"\boxed{48611}." + "\n\n" + after
    for policy in AnswerPolicy.BOXED, AnswerPolicy.DECLARED, AnswerPolicy.STATED:
        assert grade("48611", response, policy).verdict is Verdict.RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("depth", [30, 100_000])
def test_deep_nesting_is_wrong_and_does_not_time_out(verify: Verifier, depth: int) -> None:
    """In a box and out of it, closed and unclosed."""
    texts = []
    for opening, closing in NESTED:
        nested = opening * depth + "5" + closing * depth
        texts += [rf"\boxed{{{nested}}}", rf"\boxed{{{opening * depth}", f"Answer: {nested}"]
    assert _not_wrong(verify, _submissions(texts)) == []


@pytest.mark.parametrize("depth", [3, 6, 8])
def test_brackets_in_brackets_are_graded_in_time(verify: Verifier, depth: int) -> None:
    """Of numbers, of variables, of fractions and roots, in an answer that is right."""
    brackets = [("(", ")"), ("(1+", ")"), ("(x+", ")"), ("((x+1)", ")"), (r"\sqrt{1+", "}"), ("2(x-", ")^2")]
    answers = [opening * depth + "x" + closing * depth for opening, closing in brackets]
    cases = [
        Submission(f"{each}+1", rf"\boxed{{1+{each}}}", AnswerPolicy.BOXED) for each in answers if each.count("(") <= 8
    ]
    assert {each.verdict for each in verify(cases)} == {Verdict.RIGHT}


@pytest.mark.slow
def test_heavy_answers_end_at_the_deadline_and_harm_no_other() -> None:
    """An answer that is too much to compute costs at most the deadline, and the honest one beside it is right."""
    honest = Submission(r"\frac{3}{4}", r"So it is \boxed{\dfrac34}.", AnswerPolicy.BOXED)
    heavy = _submissions([rf"\boxed{{{answer}}}" for answer in HEAVY], ("x^2+1",))
    expected = _submissions([r"\boxed{5}"], tuple(HEAVY[::4]))
    with Verifier(deadline_s=0.3) as verify:
        verdicts = [each.verdict for each in verify([each for bad in heavy + expected for each in (honest, bad)])]
        itself = verify([Submission(answer, rf"\boxed{{{answer}}}", AnswerPolicy.BOXED) for answer in HEAVY])
    assert set(verdicts[::2]) == {Verdict.RIGHT}
    assert Verdict.RIGHT not in verdicts[1::2]
    assert {each.verdict for each in itself} == {Verdict.RIGHT}


@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "exec('open({path!r}, \"w\")')",
        "S('open({path!r}, \"w\")')",
        "lambda: open({path!r}, 'w')",
        r"\operatorname{{open}}({path!r})",
        r"\immediate\write18{{touch {path}}}",
        "$(touch {path})",
        "; touch {path}",
    ],
)
def test_no_answer_is_executed(code: str, tmp_path: Path) -> None:
    """An answer, expected or not, is read as mathematics and never evaluated as a program."""
    path = tmp_path / "made"
    answer = code.format(path=str(path))
    for gold, response in ((answer, r"\boxed{5}"), ("5", rf"\boxed{{{answer}}}"), ("x^2+1", f"#### {answer}")):
        grade(gold, response, AnswerPolicy.STATED)
    assert not path.exists()
