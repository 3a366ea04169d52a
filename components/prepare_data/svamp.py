"""SVAMP: one-step word problems with distractors (arXiv 2103.07191)."""

import re
from typing import Any, Literal

from components.prepare_data.source import Fields, FileSource, text, text_or_number

_WHOLE_NUMBER = re.compile(r"(\d+)\.0(?!\d)")
_SPACES_WITHIN = re.compile(r"(?<=\() | (?=\))")


class SVAMP(FileSource):
    """SVAMP as published: one JSON array of rows with `Body`, `Question`, `Equation`, `Answer` and `Type`.

    Its authors give no split: `test_fraction` and `dev_fraction` make one.
    """

    kind: Literal["svamp"]

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem: the question is `Body` and `Question`, and the solution the equation as a worked line."""
        body, answer = text(columns, "Body").strip(), text_or_number(columns, "Answer")
        if body[-1] not in ".?!":
            body += "."
        question = f"{body} {text(columns, 'Question').strip()}"
        solution = f"{_calculation(text(columns, 'Equation'))} = {answer}\n#### {answer}"
        return Fields(question, solution, answer, text(columns, "Type").replace("Divison", "Division"))


def _calculation(equation: str) -> str:
    """Return `76 - 25` for `( 76.0 - 25.0 )`."""
    calculation = _SPACES_WITHIN.sub("", _WHOLE_NUMBER.sub(r"\1", equation.strip()))
    return calculation[1:-1] if calculation.startswith("(") and calculation.endswith(")") else calculation
