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
from components.policy.training import explain_memory_for_update
from components.shared.errors import PipelineError
from components.shared.live import LIVE
from components.shared.model import context_tokens_of
from components.shared.page import percent
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import is_unanswered
from components.train_grpo.records import Row, column_mean
from components.train_grpo.rollouts import Rollout, rewards_differ
from components.train_grpo.scoring import Group, ScoredCompletion

_REASONS_SHOWN = 3
_WARN_AFTER_STEPS = 5
_CATEGORIES = ("right", "wrong", "truncated", "without an answer", "unscorable")
_MIN_MIXED = 0.25
"""Share of groups whose rewards differ, below which the first rollout prints advice."""
_MAIN_CAUSE = 0.5
"""Share of completions from which the advice is about this cause alone."""
_ENOUGH_ENDED = 0.1
"""Share of completions that end, from which on their share of right answers tells something."""
_RARELY_RIGHT = 0.1
"""Share of right answers among the completions that end, below which a higher token limit would not help."""
_DIVERGED_KL = 1.0
"""Nats per token; KL divergence from the reference above which the policy has probably been destroyed."""
_COLUMNS_SHOWN = {
    "mean reward": "reward",
    "accuracy": "accuracy",
    "truncated": "truncated_fraction",
    "without an answer": "unanswered_fraction",
}
_SIGNAL_KEY = "train_grpo.reward.max_steps_without_signal"


def require_scorable(config: TrainGRPOConfig, groups: Sequence[Group]) -> None:
    """Raise PipelineError if more completions are unscorable than the config allows.

    The policy is not the cause, but grader, data, a reward or the environment: truncated completions are scorable.
    """
    num_completions = sum(len(group.scored_G) for group in groups)
    num_failures, limit = Counter[str](), config.reward.max_unscorable_fraction
    first: dict[str, str] = {}  # the first failure of each kind
    for group in groups:
        for failure in filter(None, (scored.why_unscorable for scored in group.scored_G)):
            num_failures[failure.kind] += 1
            first.setdefault(failure.kind, f"first for problem {group.problem.id}: {failure.message}")
    fraction = num_failures.total() / num_completions
    if fraction <= limit:
        return
    advice = []
    if Reason.ENVIRONMENT in num_failures:
        advice.append("Check the environment (train_sft.model.tools, its timeout_s too).")
    if set(num_failures) - {Reason.ENVIRONMENT}:
        advice.append("Check these rewards, and the answers of these problems in train.jsonl of the problems")
    reasons = [f"{count} times, {first[kind]}" for kind, count in num_failures.most_common(_REASONS_SHOWN)]
    raise PipelineError(
        f"{percent(fraction, 0)} of the {num_completions} completions of a rollout are unscorable, and "
        f"train_grpo.reward.max_unscorable_fraction is {limit:g}. {'; '.join(reasons)}. {' '.join(advice)}"
    )


def try_largest_pass(config: TrainGRPOConfig, policy: Policy, checkpoint: Checkpoint, rollout: Rollout) -> None:
    """Run a forward and backward pass, with a loss of zero, of the largest micro-batch that the limits allow.

    If memory is too small for it, the run thus fails before its first update, not in a later and longer rollout.
    """
    prompt_ids = rollout.sampled[0].scored_G[0].completion.tokens.prompt_ids
    context = context_tokens_of(checkpoint.model.config.to_dict())
    length = config.sampling.max_new_tokens
    if context is not None:
        length = min(length, context - len(prompt_ids))
    if length < 1:  # the prompt fills the context
        return
    longest = TokenSequence(prompt_ids, prompt_ids[:1] * length)
    padded, max_tokens = checkpoint.is_padded, max(config.engine.micro_batch_tokens, len(longest))
    # In a padded batch each sequence has its own prompt; otherwise all share one.
    count = max_tokens // len(longest) if padded else (max_tokens - len(prompt_ids)) // length
    (batch,) = pack([longest] * count, max_tokens=max_tokens, device=checkpoint.device, padded=padded)
    with explain_memory_for_update("train_grpo", config.engine):
        policy.learn(batch, lambda scores, _: 0.0 * scores.logprobs_N.sum())


# The learning signal --------------------------------------------------------------------------------------------------
#
# A step teaches nothing if the rewards of each group are all equal. Such steps are counted in the rows of the curves,
# which are in the checkpoint: a resumed run continues the count.


def first_look(config: TrainGRPOConfig, groups: Sequence[Group]) -> Iterator[str]:
    """Yield lines that say whether the policy can learn from the first rollout, and what to change if not."""
    scored = [each for group in groups for each in group.scored_G]
    counts = Counter(map(_category, scored))
    shares = {category: counts[category] / len(scored) for category in _CATEGORIES if counts[category]}
    num_mixed = sum(rewards_differ(config, group) for group in groups)
    shown = ", ".join(f"{percent(share, 0)} {category}" for category, share in shares.items())
    yield f"the first {len(scored)} samples: {shown}; rewards differ in {num_mixed} of {len(groups)} groups"
    if num_mixed < _MIN_MIXED * len(groups) and not config.teacher:
        yield f"warning: only groups whose rewards differ are learned from. {_what_to_change(config, shares)}"


def check_first(config: TrainGRPOConfig, groups: Sequence[Group], *, is_main: bool) -> list[str]:
    """Return the lines of `first_look`, and print them with `is_main`; PipelineError if too few groups are mixed."""
    lines = list(first_look(config, groups))
    if is_main:
        for line in lines:
            say("train_grpo", line)
    needed, num_mixed = config.reward.min_mixed_at_start, sum(rewards_differ(config, group) for group in groups)
    if num_mixed < needed * len(groups):
        found = f"rewards differ in {num_mixed} of the first {len(groups)} groups"
        raise PipelineError(f"{found}; train_grpo.reward.min_mixed_at_start asks for {100 * needed:g} % of them")
    return lines


def _category(scored: ScoredCompletion) -> str:
    """Return which of `_CATEGORIES` a completion has."""
    if scored.why_unscorable is not None:
        return "unscorable"
    if scored.completion.truncated:
        return "truncated"
    if is_unanswered(scored):
        return "without an answer"
    return "right" if scored.grade.verdict is Verdict.RIGHT else "wrong"


def _what_to_change(config: TrainGRPOConfig, shares: Mapping[str, float]) -> str:
    """Return advice that may give a run a learning signal, by the shares of `_CATEGORIES` among its completions."""
    truncated = shares.get("truncated", 0.0)
    if truncated >= _MAIN_CAUSE:
        limit, ended = config.sampling.max_new_tokens, 1 - truncated
        cause = f"Most completions are truncated at {limit} tokens"
        if ended >= _ENOUGH_ENDED and shares.get("right", 0.0) < _RARELY_RIGHT * ended:
            return (
                f"{cause}, and those that end are hardly ever right: fine-tune the model first (train_sft.num_steps), "
                "on solutions that end as its prompt asks; a higher limit alone would not help"
            )
        return f"{cause}: raise train_grpo.sampling.max_new_tokens to {2 * limit}"
    if shares.get("without an answer", 0.0) >= _MAIN_CAUSE:
        return (
            "Most completions have no answer where train_sft.model.answer looks for it: ask for that form in the "
            "prompt or system message, fine-tune on solutions that have it, or set answer: last_sentence"
        )
    select = (
        "select problems by their pass rates (`grpo-pipeline preview --pass-rates FILE`): set prepare_data.difficulty"
    )
    if shares.get("right", 0.0) >= _MAIN_CAUSE:
        return (
            f"Most answers are right, the problems are too easy: {select} and lower its max_pass_rate, or raise "
            "train_grpo.sampling.temperature"
        )
    return (
        f"Most answers are wrong, the problems are too hard: {select} and raise its min_pass_rate, raise "
        "train_sft.num_steps or train_grpo.group_size, or add a reward that differs between completions "
        "(train_grpo.reward.weights)"
    )


def missing_signal(config: TrainGRPOConfig, curves: Sequence[Row]) -> str | None:
    """Return why the run has to stop, if too many steps in a row had no learning signal; print a warning before.

    With a teacher every step has a signal.
    """
    if config.teacher:
        return None
    rows = list(takewhile(_teaches_nothing, reversed(curves)))
    problem = f"no learning signal in the last {len(rows)} steps: {_equal_rewards(config, rows)}"
    if 0 < config.reward.max_steps_without_signal <= len(rows):
        return f"{problem}. To continue anyway, set {_SIGNAL_KEY}: 0"
    if len(rows) == _WARN_AFTER_STEPS:
        say("train_grpo", f"warning: {problem}")
    return None


def require_learning(config: TrainGRPOConfig, curves: Sequence[Row]) -> None:
    """Raise PipelineError if no step of the run had a learning signal: the policy would equal its reference."""
    if all(row["groups_all_right_fraction"] == 1 for row in curves):
        say("train_grpo", "warning: every answer was right in every step: there was nothing left to learn")
    elif (
        config.reward.max_steps_without_signal
        and not config.teacher
        and all(row["groups_without_spread_fraction"] == 1 for row in curves)
    ):
        problem = f"no learning signal in any step of the run: {_equal_rewards(config, curves)}"
        raise PipelineError(f"{problem}. To finish anyway, set {_SIGNAL_KEY}: 0")


def _equal_rewards(config: TrainGRPOConfig, rows: Sequence[Row]) -> str:
    """Return a description of steps in which the rewards of each group were equal, and advice on what to change."""
    pairs = [(name, column_mean(rows, column)) for name, column in _COLUMNS_SHOWN.items()]
    means = {name: mean for name, mean in pairs if mean is not None}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in means.items())
    advice = _what_to_change(config, {**means, "right": means.get("accuracy", 0.0)})
    kl = column_mean(rows, "kl")
    if kl is not None and kl > _DIVERGED_KL:
        advice = f"The KL divergence is {kl:.3g}: train_grpo.learning_rate is probably too high. Otherwise: {advice}"
    return f"the rewards of each group were all equal ({shown}). {advice}"


def _teaches_nothing(row: Row) -> bool:
    """Return whether no group of a step had a spread of rewards, although not all answers were right."""
    return row["groups_without_spread_fraction"] == 1 and row["groups_all_right_fraction"] != 1


# Timing ---------------------------------------------------------------------------------------------------------------


class StepTimer:
    """Measures the phases of each step, and the share of the speed of plain matrix products that an update reaches."""

    def __init__(self, config: TrainGRPOConfig, checkpoint: Checkpoint) -> None:
        """Count the operations of a model, whose weights must not be sharded yet, and measure matrix products."""
        self._flops = FlopCounter(checkpoint.model)
        self._matmul_flops = measure_matmul_flops(checkpoint.device, checkpoint.model.dtype)
        # A backward pass has two products for each of the forward pass; only one for frozen weights, without gradient.
        self._passes = (2 if config.engine.lora else 3) * config.updates_per_rollout

    def start(self) -> None:
        """Begin a step."""
        self._started = time.monotonic()
        self._seconds = {"reference_s": 0.0, "update_s": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the block, and mark it as a range in a profile."""
        started = time.monotonic()
        with record_function(name.removesuffix("_s")):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def row(self, step: int, rollout: Rollout, batches: Sequence[MicroBatch], ranks: Ranks) -> dict[str, float]:
        """Return the timing of a step whose update was on `batches`; all processes call it together."""
        step_s, update_s = time.monotonic() - self._started, self._seconds["update_s"]
        num_flops = self._passes * self._flops.forward_flops(batches)
        num_tokens = sum(scored.completion.num_tokens for group in rollout.sampled for scored in group.scored_G)
        timing = {
            "sampling_s": rollout.sampling_s,
            "scoring_s": rollout.scoring_s,
            "sync_s": rollout.sync_s,
            **self._seconds,
            "update_flop_utilisation": num_flops / update_s / self._matmul_flops if update_s else 0.0,
            "step_s": step_s,
        }
        row = {"step": step, **{name: round(value, 4) for name, value in timing.items()}}
        if ranks.world_size > 1:  # the others wait for the slowest process after sampling and scoring
            rollouts_s = ranks.all_gather(rollout.sampling_s + rollout.scoring_s, "the timing of a rollout")
            row["slowest_rank"] = rollouts_s.index(max(rollouts_s))
            row["slowest_rank_behind_median_s"] = round(max(rollouts_s) - statistics.median_low(rollouts_s), 4)
        return {**row, "tokens_per_s": round(num_tokens / step_s, 1)}


class Profiler:
    """Writes a trace of each step in `profile_steps`, and of the next step when the file live/profile appears.

    The traces are in the work folder until the end: a resumed run has those of its earlier steps.
    """

    def __init__(self, config: TrainGRPOConfig, work: Path) -> None:
        self._steps, self._request = config.profile_steps, work / LIVE / "profile"
        self._traces = work / LIVE / "traces"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """If a trace of the block is due, write it: gzipped JSON for Perfetto or chrome://tracing."""
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
