"""What a dataset says of one problem, before it gets its place among the others."""

from typing import NamedTuple


class Fields(NamedTuple):
    """The part of a Problem that is read from a raw row."""

    question: str
    solution: str
    answer: str
    subject: str
    level: int | None
