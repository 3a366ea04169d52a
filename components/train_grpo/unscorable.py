"""How much of a rollout nothing can be said of: too much is a defect of grader, data or reward, not of the policy."""

from collections import Counter
from collections.abc import Sequence

from components.shared.errors import PipelineError
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.rollout import Group

_REASONS_SHOWN = 3


def refuse_unscorable(config: TrainGRPOConfig, groups: Sequence[Group]) -> None:
    """Raise PipelineError where more completions have no reward than the config lets pass.

    What was cut off and is masked has a verdict, and is not counted.
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
        f"train_grpo.reward.max_unscorable_fraction is {limit:g}. {'; '.join(reasons)}. Look at the rewards that are "
        "named here, and at the answers of these problems in train.jsonl of the problems"
    )
