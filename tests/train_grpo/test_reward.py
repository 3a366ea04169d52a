import math

from components.shared.grading import Grade, Verdict
from components.train_grpo.reward import accuracy_reward


def test_right_is_one_wrong_is_zero_and_unscorable_is_neither() -> None:
    """A crash of the verifier must not be taken for a wrong answer."""
    values = {verdict: accuracy_reward(Grade(verdict, extracted=None, reason="")) for verdict in Verdict}
    assert (values[Verdict.RIGHT], values[Verdict.WRONG]) == (1.0, 0.0)
    assert math.isnan(values[Verdict.UNSCORABLE])
