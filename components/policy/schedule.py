"""The learning rate over the steps of a run."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int, final_fraction: float) -> float:
    """Return the rate of `step` (from 0): linear up to `peak`, then linear down to `final_fraction` of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return peak * (1 - (1 - final_fraction) * done)
