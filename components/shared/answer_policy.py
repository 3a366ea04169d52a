"""Where a response states its final answer; the grader and the configuration of a model both name it."""

from enum import StrEnum


class AnswerPolicy(StrEnum):
    """Where a response states its final answer; nothing else in it is graded."""

    BOXED = "boxed"
    r"""In its last `\boxed{}`, as in MATH."""
    MARKED = "marked"
    """After its last `####`, as in GSM8K."""
    DECLARED = "declared"
    """In the later of the two."""
    STATED = "stated"
    """In the later of the two or, without either, in a sentence that says so ("The answer is 42.") or concludes."""
    LAST_SENTENCE = "last_sentence"
    """As `stated` or, without a statement, the value that the last sentence gives ("She has 5 apples left.")."""
