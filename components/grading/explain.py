"""An explanation of one verdict: how both answers were read, and the rule that decided.

Run it as the function of a `Verifier`: it parses the model's text once more, which may take long.
"""

from collections.abc import Iterator
from dataclasses import replace

from components.grading.grade import grade, is_unit_tests, prepare
from components.grading.parsing import Answer, Kind, parse, parse_structure
from components.grading.units import read_question
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
    yield "verdict", f"{graded.verdict}: {graded.why}"
    yield "expected", _shown(gold)
    yield "extracted", "nothing" if graded.extracted is None else _shown(graded.extracted)
    if graded.extracted is not None and not is_unit_tests(gold):
        try:
            context = read_question(question, gold)
            yield "read as", _described(parse(gold.strip(), context))
            yield "and as", _described(parse(graded.extracted, context))
        except MemoryError:
            raise
        except Exception as error:  # the parser may fail in any way on a model's text
            yield "read as", f"nothing: it cannot be read ({type(error).__name__})"
    yield "rule", graded.reason.rule


def _shown(text: str) -> str:
    """The beginning of a text in one line, without characters that could change a terminal."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]}..."


def _described(answer: Answer) -> str:
    unit = f" in the unit {answer.unit.kind}" if answer.unit else ""
    if answer.number:
        value = answer.number.value
        written = f"the decimal {value}" if answer.number.places else f"the number {value}"
        return _shown(written) + unit
    structure = parse_structure(answer.latex)
    if structure.kind is Kind.EXPRESSION:
        return _shown(f"{structure.kind} {answer.latex}") + unit
    listed = " ; ".join(structure.parts[:_MAX_PARTS])
    return _shown(f"{structure.kind} of {len(structure.parts)}: {listed}") + unit
