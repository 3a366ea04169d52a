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
        # Write `( 76.0 - 25.0 )` as `76 - 25`.
        equation = _SPACES_WITHIN.sub("", _WHOLE_NUMBER.sub(r"\1", text(columns, "Equation").strip()))
        if equation.startswith("(") and equation.endswith(")"):
            equation = equation[1:-1]
        solution = f"{equation} = {answer}\n#### {answer}"
        return Fields(question, solution, answer, text(columns, "Type").replace("Divison", "Division"))
