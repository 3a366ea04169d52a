"""Steps without a learning signal: where the rewards of each group are all equal, the policy learns nothing from them.

All of it is read off the rows of the curves, which a checkpoint holds: a resumed run counts on from where it was.
"""

import statistics
from collections.abc import Mapping, Sequence

from components.shared.errors import PipelineError
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig

_WARN_AFTER = 5
_KEY = "train_grpo.reward.max_steps_without_signal"
Row = Mapping[str, float | None]
"""The figures of a step, None for what could not be measured."""


def limit_reached(config: TrainGRPOConfig, curves: Sequence[Row]) -> bool:
    """Tell whether as many steps in a row had no signal as the config lets pass."""
    limit = config.reward.max_steps_without_signal
    return 0 < limit <= len(_last_without_signal(curves))


def warn(curves: Sequence[Row]) -> None:
    """Print a line when some steps in a row had no signal."""
    rows = _last_without_signal(curves)
    if len(rows) == _WARN_AFTER:
        say("train_grpo", f"warning: {_described(rows)}")


def refuse_limit(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError where the limit is reached."""
    if limit_reached(config, curves):
        raise PipelineError(
            f"{_described(_last_without_signal(curves))}. Train on problems that the reference solves now and then, or "
            f"add a reward that varies between completions (train_grpo.reward.weights). To continue anyway, set "
            f"{_KEY}: 0"
        )


def refuse_nothing_learned(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError where no step of a whole run had a signal: the policy would be its reference.

    A run whose every answer was right ends well, with a warning: there was nothing left to learn.
    """
    if curves and all(row["groups_all_right_fraction"] == 1 for row in curves):
        say("train_grpo", "warning: every answer was right in every step: there was nothing left to learn")
        return
    if config.reward.max_steps_without_signal and all(map(_has_no_spread, curves)):
        raise PipelineError(
            "no rollout of the run had anything to learn from: the rewards of each group were all equal; the reference "
            f"has to be right now and then, and wrong now and then ({_KEY}: 0 lets such a run end)"
        )


def _last_without_signal(curves: Sequence[Row]) -> Sequence[Row]:
    start = len(curves)
    while start and _has_no_spread(curves[start - 1]) and curves[start - 1]["groups_all_right_fraction"] != 1:
        start -= 1
    return curves[start:]


def _has_no_spread(row: Row) -> bool:
    return row["groups_without_spread_fraction"] == 1


def _described(rows: Sequence[Row]) -> str:
    shown = {"mean reward": "reward", "accuracy": "accuracy", "share cut off": "truncated_fraction"}
    known = {name: [value for row in rows if (value := row[key]) is not None] for name, key in shown.items()}
    figures = ", ".join(f"{name} {statistics.fmean(values):.3g}" for name, values in known.items() if values)
    return f"nothing to learn from in the last {len(rows)} steps: the rewards of each group were all equal ({figures})"
