"""What is put before the grader."""

from dataclasses import dataclass

from components.shared.answer_policy import AnswerPolicy


@dataclass(frozen=True, slots=True)
class Submission:
    """A response, and what its final answer should be."""

    gold: str
    response: str
    policy: AnswerPolicy
    """Where the response has to state its final answer."""
