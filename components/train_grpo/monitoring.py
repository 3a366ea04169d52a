"""Whether a run is healthy: unscorable completions, steps without a learning signal, and the time that steps take."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from components.policy.checkpoint import Checkpoint
from components.policy.flops import FlopCounter, measure_matmul_flops
from components.policy.packing import MicroBatch
from components.policy.parallel import Ranks
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import Row
from components.train_grpo.rollouts import Group, Rollout

_REASONS_SHOWN = 3
_WARN_AFTER_STEPS = 5
_SIGNAL_KEY = "train_grpo.reward.max_steps_without_signal"


def require_scorable(config: TrainGRPOConfig, groups: Sequence[Group]) -> None:
    """Raise PipelineError where more completions cannot be scored than the config allows.

    That is a defect of grader, data or reward, not of the policy. A masked completion has a verdict: it does not count.
    """
    scored = [(group.problem.id, each.unscorable) for group in groups for each in group.scored_G]
    failed = [(problem, failure) for problem, failure in scored if failure is not None]
    fraction, limit = len(failed) / len(scored), config.reward.max_unscorable_fraction
    if fraction <= limit:
        return
    first = {failure.kind: (problem, failure.message) for problem, failure in reversed(failed)}
    counts = Counter(failure.kind for _, failure in failed)
    reasons = [
        f"{count} times, first for problem {first[kind][0]}: {first[kind][1]}"
        for kind, count in counts.most_common(_REASONS_SHOWN)
    ]
    raise PipelineError(
        f"{fraction:.0%} of the {len(scored)} completions of a rollout are unscorable, and "
        f"train_grpo.reward.max_unscorable_fraction is {limit:g}. {'; '.join(reasons)}. Check these rewards, and the "
        "answers of these problems in train.jsonl of the problems"
    )


# The learning signal --------------------------------------------------------------------------------------------------
#
# Where the rewards of each group are all equal, a step teaches nothing. All of it is derived from the rows of the
# curves, which are in the checkpoint: a resumed run continues the count.


def signal_limit_reached(config: TrainGRPOConfig, curves: Sequence[Row]) -> bool:
    """Return whether as many steps in a row had no learning signal as the config allows."""
    limit = config.reward.max_steps_without_signal
    return 0 < limit <= len(_last_without_signal(curves))


def warn_without_signal(curves: Sequence[Row]) -> None:
    """Print a line when some steps in a row had no learning signal."""
    rows = _last_without_signal(curves)
    if len(rows) == _WARN_AFTER_STEPS:
        say("train_grpo", f"warning: {_described(rows)}")


def require_signal(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError where too many steps in a row had no learning signal."""
    if signal_limit_reached(config, curves):
        raise PipelineError(
            f"{_described(_last_without_signal(curves))}. Train on problems that the reference sometimes solves, or "
            f"add a reward that differs between completions (train_grpo.reward.weights). To continue anyway, set "
            f"{_SIGNAL_KEY}: 0"
        )


def require_learning(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError where no step of a whole run had a learning signal: the policy would be its reference.

    A run in which every answer was right succeeds, with a warning: there was nothing left to learn.
    """
    if curves and all(row["groups_all_right_fraction"] == 1 for row in curves):
        say("train_grpo", "warning: every answer was right in every step: there was nothing left to learn")
        return
    if config.reward.max_steps_without_signal and all(map(_has_no_signal, curves)):
        raise PipelineError(
            "no learning signal in any step of the run: the rewards of each group were all equal. A group needs right "
            f"and wrong answers, or another reward that differs between them. To finish anyway, set {_SIGNAL_KEY}: 0"
        )


def _last_without_signal(curves: Sequence[Row]) -> Sequence[Row]:
    start = len(curves)
    while start and _has_no_signal(curves[start - 1]) and curves[start - 1]["groups_all_right_fraction"] != 1:
        start -= 1
    return curves[start:]


def _has_no_signal(row: Row) -> bool:
    return row["groups_without_spread_fraction"] == 1


def _described(rows: Sequence[Row]) -> str:
    columns = {"mean reward": "reward", "accuracy": "accuracy", "truncated": "truncated_fraction"}
    known = {name: [value for row in rows if (value := row[key]) is not None] for name, key in columns.items()}
    figures = ", ".join(f"{name} {statistics.fmean(values):.3g}" for name, values in known.items() if values)
    return f"no learning signal in the last {len(rows)} steps: the rewards of each group were all equal ({figures})"


# Timing ---------------------------------------------------------------------------------------------------------------


class StepTimer:
    """The time that a step takes, from the making of this object, and that of its phases."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds = {"reference_s": 0.0, "update_s": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the block."""
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def row(self, step: int, rollout: Rollout, *, utilisation: float, ranks: Ranks) -> dict[str, float]:
        """Return what is recorded of the timing of a finished step; all processes call it together."""
        step_s = time.monotonic() - self._started
        num_tokens = sum(scored.completion.num_tokens for group in rollout.sampled for scored in group.scored_G)
        figures = {
            "sampling_s": rollout.sampling_s,
            "scoring_s": rollout.scoring_s,
            "sync_s": rollout.sync_s,
            **self.seconds,
            "update_flop_utilisation": utilisation,
            "step_s": step_s,
        }
        return {
            "step": step,
            **{name: round(value, 4) for name, value in figures.items()},
            **_slowest_rank(rollout, ranks),
            "tokens_per_s": round(num_tokens / step_s, 1),
        }


def _slowest_rank(rollout: Rollout, ranks: Ranks) -> dict[str, float]:
    """Return which process the others waited for at the end of sampling and scoring, and how long."""
    if ranks.world_size == 1:
        return {}
    seconds = ranks.all_gather(rollout.sampling_s + rollout.scoring_s, "the timing of a rollout")
    slowest = max(seconds)
    return {
        "slowest_rank": seconds.index(slowest),
        "slowest_rank_behind_median_s": round(slowest - statistics.median_low(seconds), 4),
    }


class UtilisationMeter:
    """The floating-point operations of an update per second, as a share of what matrix products reach here."""

    def __init__(self, config: TrainGRPOConfig, checkpoint: Checkpoint) -> None:
        """Count the operations of a model; its weights must not be sharded yet."""
        self._flops = FlopCounter(checkpoint.model)
        self._matmul_flops = measure_matmul_flops(checkpoint.device, checkpoint.model.dtype)
        # A backward pass is two products for each one of the forward pass; frozen weights have no gradient.
        self._products = (2 if config.engine.lora else 3) * config.updates_per_rollout

    def of_update(self, batches: Sequence[MicroBatch], update_s: float) -> float:
        """Return the utilisation of an update on micro-batches."""
        return self._products * self._flops.forward_flops(batches) / update_s / self._matmul_flops
