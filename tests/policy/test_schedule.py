import pytest

from components.policy.training import learning_rate


def test_the_rate_rises_to_its_peak_and_falls_to_its_end() -> None:
    """Warm-up counts from the first step, the peak follows it, and the last step has the final share."""
    rates = [learning_rate(step, peak=1.0, warmup_steps=4, num_steps=9, final_fraction=0.2) for step in range(9)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    """No step is wasted at a rate of zero."""
    assert learning_rate(0, peak=0.5, warmup_steps=0, num_steps=1, final_fraction=0.0) == 0.5
