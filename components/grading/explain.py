"""An explanation of one verdict: how both answers were read, and the rule that decided.

Run it as the function of a `Verifier`: it parses the model's text once more, which may take long.
"""

from collections.abc import Iterator
from dataclasses import replace

from components.grading.grade import grade, is_unit_tests, prepare
from components.grading.parsing import Kind, parse, parse_structure
from components.grading.units import Context, read_question
from components.grading.verdicts import Grade
from components.shared.answer_policy import AnswerPolicy

__all__ = ["EXPLAIN", "explain", "prepare"]

EXPLAIN = "components.grading.explain:explain"
_MAX_SHOWN_CHARACTERS = 200
_MAX_PARTS = 8


def explain(gold: str, response: str, policy: AnswerPolicy, question: str = "") -> Grade:
    """Return the grade of a response, with an explanation in several lines as its detail."""
    graded = grade(gold, response, policy, question)
    return replace(graded, detail="\n".join(f"{name:<10}{text}" for name, text in _lines(gold, question, graded)))


def _lines(gold: str, question: str, graded: Grade) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each line."""
    yield "verdict", f"{graded.verdict}: {graded.why}"
    for name, text in (("expected", gold.strip()), ("extracted", graded.extracted)):
        yield name, "nothing" if text is None else _shown(text)
        if text is not None and graded.extracted is not None and not is_unit_tests(gold):
            yield "read as", _described(text, read_question(question, gold))
    yield "rule", graded.reason.rule


def _shown(text: str) -> str:
    """The beginning of a text in one line, without characters that could change a terminal."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]}..."


def _described(text: str, context: Context) -> str:
    """How the parser read an answer: its value, or its form and parts, and its unit."""
    try:
        answer = parse(text, context)
        structure = parse_structure(answer.latex)
    except MemoryError:
        raise
    except Exception as error:  # the parser may fail in any way on a model's text
        return f"nothing: it cannot be read ({type(error).__name__})"
    if answer.number and answer.number.places:
        described = f"the decimal {float(answer.number.value):.{answer.number.places}f}"
    elif answer.number:
        described = f"the number {answer.number.value}"
    elif structure.kind is Kind.EXPRESSION:
        described = f"the {structure.kind} `{answer.latex}`"
    else:
        described = f"{structure.kind} with {len(structure.parts)} parts: {' ; '.join(structure.parts[:_MAX_PARTS])}"
    unit = ""
    if answer.unit:  # 12 centimetres are the number 12 times 1/100 (length)
        factor = "" if answer.unit.factor == 1 else f" times {answer.unit.factor}"
        unit = f"{factor} ({answer.unit.kind})"
    return _shown(described) + unit
