"""Whether a run is healthy: unscorable completions, steps without a learning signal, and where the time goes."""

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from components.grading.verifier import Reason, Verdict
from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.flops import FlopCounter, measure_matmul_flops
from components.policy.packing import MicroBatch, TokenSequence, pack
from components.policy.parallel import Ranks
from components.policy.training import memory_for_update
from components.shared.errors import PipelineError
from components.shared.live import LIVE
from components.shared.model import context_tokens_of
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import is_unanswered
from components.train_grpo.records import Row
from components.train_grpo.rollouts import Rollout, differs
from components.train_grpo.scoring import Group, Scored

_REASONS_SHOWN = 3
_WARN_AFTER_STEPS = 5
_OUTCOMES = ("right", "wrong", "truncated", "without an answer", "unscorable")
_FEW = 0.25
"""Share of groups whose rewards differ below which the first rollout prints advice."""
_MOST = 0.5
"""Share of completions from which one cause is the only one named."""
_HARDLY = 0.1
"""Share of right answers among the completions that end, below which a higher limit of tokens does not help."""
_SHOWN = {
    "mean reward": "reward",
    "accuracy": "accuracy",
    "truncated": "truncated_fraction",
    "without an answer": "unanswered_fraction",
}
_SIGNAL_KEY = "train_grpo.reward.max_steps_without_signal"


def require_scorable(config: TrainGRPOConfig, groups: Sequence[Group]) -> None:
    """Raise PipelineError where more completions cannot be scored than the config allows.

    That is a defect of grader, data, reward or environment, not of the policy. A truncated completion has a verdict,
    masked or not: it can be scored.
    """
    scored = [(group.problem.id, each.unscorable) for group in groups for each in group.scored_G]
    failed = [(problem, failure) for problem, failure in scored if failure is not None]
    fraction, limit = len(failed) / max(1, len(scored)), config.reward.max_unscorable_fraction
    if fraction <= limit:
        return
    # Reversed, so that the first failure of each kind is the one that stays.
    first = {failure.kind: (problem, failure.message) for problem, failure in reversed(failed)}
    counts = Counter(failure.kind for _, failure in failed)
    advice = []
    if Reason.ENVIRONMENT in counts:
        advice.append("Check the environment (train_sft.model.tools, its timeout_s too).")
    if set(counts) - {Reason.ENVIRONMENT}:
        advice.append("Check these rewards, and the answers of these problems in train.jsonl of the problems")
    reasons = [
        f"{count} times, first for problem {first[kind][0]}: {first[kind][1]}"
        for kind, count in counts.most_common(_REASONS_SHOWN)
    ]
    raise PipelineError(
        f"{fraction:.0%} of the {len(scored)} completions of a rollout are unscorable, and "
        f"train_grpo.reward.max_unscorable_fraction is {limit:g}. {'; '.join(reasons)}. {' '.join(advice)}"
    )


def try_largest_pass(config: TrainGRPOConfig, policy: Policy, checkpoint: Checkpoint, rollout: Rollout) -> None:
    """Go forward and back through the largest micro-batch that the limits allow, for a loss of zero.

    So memory that is too small for it is found before the first update, and not by the first rollout that is as long.
    """
    prompt_ids = rollout.sampled[0].scored_G[0].completion.tokens.prompt_ids
    context, max_tokens = context_tokens_of(checkpoint.model.config.to_dict()), config.engine.micro_batch_tokens
    length = config.sampling.max_new_tokens
    length = length if context is None else min(length, context - len(prompt_ids))
    if length < 1:
        return
    longest = TokenSequence(prompt_ids, prompt_ids[:1] * length)
    padded = checkpoint.is_padded
    count = max(1, max_tokens // len(longest) if padded else (max_tokens - len(prompt_ids)) // length)
    (batch,) = pack(
        [longest] * count, max_tokens=max(max_tokens, len(longest)), device=checkpoint.device, padded=padded
    )
    with memory_for_update("train_grpo", config.engine):
        policy.learn(batch, lambda scores, _: 0.0 * scores.logprobs_N.sum())


# The learning signal --------------------------------------------------------------------------------------------------
#
# Where the rewards of each group are all equal, a step teaches nothing. All of it is derived from the rows of the
# curves, which are in the checkpoint: a resumed run continues the count.


def first_look(config: TrainGRPOConfig, groups: Sequence[Group]) -> Iterator[str]:
    """Yield whether the policy can learn, judging by the first rollout, and what to change where it cannot."""
    scored = [each for group in groups for each in group.scored_G]
    if not scored:
        return
    counts = Counter(map(_outcome, scored))
    shares = {what: counts[what] / len(scored) for what in _OUTCOMES if counts[what]}
    mixed = sum(differs(config, group) for group in groups)
    shown = ", ".join(f"{share:.0%} {what}" for what, share in shares.items())
    yield f"the first {len(scored)} completions: {shown}; rewards differ in {mixed} of {len(groups)} groups"
    if mixed < _FEW * len(groups) and shares.get("right", 0.0) < 1 and not config.teacher:
        yield f"warning: only groups whose rewards differ are learned from. {_what_to_change(config, shares)}"


def check_first(config: TrainGRPOConfig, groups: Sequence[Group], *, is_main: bool) -> list[str]:
    """Print and return what `first_look` says; PipelineError where rewards differ in too few groups."""
    lines = list(first_look(config, groups))
    for line in lines if is_main else ():
        say("train_grpo", line)
    needed, mixed = config.reward.min_mixed_at_start, sum(differs(config, group) for group in groups)
    if mixed < needed * len(groups):
        what = f"rewards differ in {mixed} of the first {len(groups)} groups"
        raise PipelineError(f"{what}; train_grpo.reward.min_mixed_at_start asks for {needed:.0%} of them")
    return lines


def _outcome(scored: Scored) -> str:
    if scored.unscorable is not None:
        return "unscorable"
    if scored.completion.truncated:
        return "truncated"
    if is_unanswered(scored):
        return "without an answer"
    return "right" if scored.grade.verdict is Verdict.RIGHT else "wrong"


def _what_to_change(config: TrainGRPOConfig, shares: Mapping[str, float]) -> str:
    """Return what may give a run a learning signal, from the shares of its completions."""
    right, truncated, unanswered = (shares.get(what, 0.0) for what in ("right", "truncated", "without an answer"))
    if truncated >= _MOST:
        limit, ended = config.sampling.max_new_tokens, 1 - truncated
        cause = f"Most completions are truncated at {limit} tokens"
        if ended >= _HARDLY and right < _HARDLY * ended:
            return (
                f"{cause}, and those that end are hardly ever right: fine-tune the model first (train_sft.num_steps), "
                "on solutions that end as its prompt asks; a higher limit alone would not help"
            )
        return f"{cause}: raise train_grpo.sampling.max_new_tokens to {2 * limit}"
    if unanswered >= _MOST:
        return (
            "Most completions have no answer where train_sft.model.answer looks for it: ask for that form in the "
            "prompt or system message, fine-tune on solutions that have it, or set answer: last_sentence"
        )
    return (
        "Train on problems that the reference sometimes solves, fine-tune it first, sample larger groups, or add a "
        "reward that differs between completions (train_grpo.reward.weights)"
    )


def missing_signal(config: TrainGRPOConfig, curves: Sequence[Row]) -> str | None:
    """Return why the run has to stop, if too many steps in a row had no learning signal; print a warning before.

    Steps in which partial rollouts had finished no group do not count. With a teacher every step has a signal.
    """
    if config.teacher or (curves and not _with_groups(curves[-1:])):
        return None
    rows = list(takewhile(_teaches_nothing, reversed(_with_groups(curves))))
    means = {
        name: statistics.fmean(values)
        for name, column in _SHOWN.items()
        if (values := [value for row in rows if (value := row.get(column)) is not None])
    }
    figures = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
    advice = _what_to_change(config, {**means, "right": means.get("accuracy", 0.0)})
    what = f"no learning signal in the last {len(rows)} steps: the rewards of each group were all equal ({figures})"
    if 0 < config.reward.max_steps_without_signal <= len(rows):
        return f"{what}. {advice}. To continue anyway, set {_SIGNAL_KEY}: 0"
    if len(rows) == _WARN_AFTER_STEPS:
        say("train_grpo", f"warning: {what}. {advice}")
    return None


def require_learning(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError where no step of a whole run had a learning signal: the policy would be its reference."""
    curves = _with_groups(curves)
    if all(row["groups_all_right_fraction"] == 1 for row in curves):
        say("train_grpo", "warning: every answer was right in every step: there was nothing left to learn")
    elif (
        config.reward.max_steps_without_signal
        and not config.teacher
        and all(row["groups_without_spread_fraction"] == 1 for row in curves)
    ):
        raise PipelineError(
            "no learning signal in any step of the run: the rewards of each group were all equal. A group needs right "
            f"and wrong answers, or another reward that differs between them. To finish anyway, set {_SIGNAL_KEY}: 0"
        )


def _with_groups(curves: Sequence[Row]) -> list[Row]:
    """Return the rows of steps that had groups to learn from."""
    return [row for row in curves if row["groups_without_spread_fraction"] is not None]


def _teaches_nothing(row: Row) -> bool:
    return row["groups_without_spread_fraction"] == 1 and row["groups_all_right_fraction"] != 1


# Timing ---------------------------------------------------------------------------------------------------------------


class StepTimer:
    """Measures the phases of each step, and how much of the speed of matrix products an update reaches."""

    def __init__(self, config: TrainGRPOConfig, checkpoint: Checkpoint) -> None:
        """Count the operations of a model; its weights must not be sharded yet."""
        self._flops = FlopCounter(checkpoint.model)
        self._matmul_flops = measure_matmul_flops(checkpoint.device, checkpoint.model.dtype)
        # A backward pass is two products for each one of the forward pass; frozen weights have no gradient.
        self._products = (2 if config.engine.lora else 3) * config.updates_per_rollout

    def start(self) -> None:
        """Begin a step."""
        self._started = time.monotonic()
        self._seconds = {"reference_s": 0.0, "update_s": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the block, which is a range in a profile."""
        started = time.monotonic()
        with record_function(name.removesuffix("_s")):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def row(self, step: int, rollout: Rollout, batches: Sequence[MicroBatch], ranks: Ranks) -> dict[str, float]:
        """Return what is recorded of the timing of a step, updated on `batches`; all processes call it together."""
        step_s, update_s = time.monotonic() - self._started, self._seconds["update_s"]
        num_flops = self._products * self._flops.forward_flops(batches)
        num_tokens = sum(scored.completion.num_tokens for group in rollout.sampled for scored in group.scored_G)
        figures = {
            "sampling_s": rollout.sampling_s,
            "scoring_s": rollout.scoring_s,
            "sync_s": rollout.sync_s,
            **self._seconds,
            "update_flop_utilisation": num_flops / update_s / self._matmul_flops if update_s else 0.0,
            "step_s": step_s,
        }
        row = {"step": step, **{name: round(value, 4) for name, value in figures.items()}}
        if ranks.world_size > 1:  # which process the others waited for at the end of sampling and scoring
            waited_s = ranks.all_gather(rollout.sampling_s + rollout.scoring_s, "the timing of a rollout")
            row["slowest_rank"] = waited_s.index(max(waited_s))
            row["slowest_rank_behind_median_s"] = round(max(waited_s) - statistics.median_low(waited_s), 4)
        return {**row, "tokens_per_s": round(num_tokens / step_s, 1)}


class Profiler:
    """Writes a trace of each step that the config names, or that a file requests during the run.

    The traces are in the folder of unfinished work until the end: a resumed run has those of the steps before.
    """

    def __init__(self, config: TrainGRPOConfig, work: Path) -> None:
        self._steps, self._request = config.profile_steps, work / LIVE / "profile"
        self._traces = work / LIVE / "traces"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Write a trace of the block, gzipped JSON that Perfetto and chrome://tracing read, if one is due."""
        is_requested = self._request.is_file()
        if step not in self._steps and not is_requested:
            yield
            return
        self._request.unlink(missing_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as profiler:
            yield
        self._traces.mkdir(parents=True, exist_ok=True)
        trace = self._traces / f"step-{step:06d}.json.gz"
        profiler.export_chrome_trace(str(trace))
        say("train_grpo", f"profile of step {step}: {trace}")

    def copy(self, training: Path) -> None:
        """Copy all traces into the outputs of a training."""
        if self._traces.is_dir():
            shutil.copytree(self._traces, training / "profile")
