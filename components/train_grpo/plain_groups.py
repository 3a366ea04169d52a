"""Groups of completions as plain values, for checkpoints: a rollout that was sampled and not yet learned from."""

from dataclasses import asdict
from typing import Any

from components.grading.verifier import Grade, Verdict
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared.problem import Problem
from components.train_grpo.failure import Failure
from components.train_grpo.rollout import Group
from components.train_grpo.scoring import Scored
from components.train_grpo.steps import Step


def to_plain(group: Group) -> dict[str, Any]:
    """Return a group as numbers, text, lists and dicts."""
    scored_G = [asdict(scored) for scored in group.scored_G]
    for scored in scored_G:
        scored["grade"]["verdict"] = scored["grade"]["verdict"].value
        scored["rewards"] = {str(name): values for name, values in scored["rewards"].items()}
    return {"problem": group.problem.model_dump(mode="json"), "scored_G": scored_G}


def from_plain(values: dict[str, Any]) -> Group:
    """Return the group that `to_plain` was given."""
    return Group(Problem.model_validate(values["problem"]), [_scored(each) for each in values["scored_G"]])


def _scored(values: dict[str, Any]) -> Scored:
    completion, grade, failure = values["completion"], values["grade"], values["failure"]
    return Scored(
        completion=Completion(**{**completion, "tokens": TokenSequence(**completion["tokens"])}),
        grade=Grade(**{**grade, "verdict": Verdict(grade["verdict"])}),
        steps=tuple(Step(**step) for step in values["steps"]),
        rewards=dict(values["rewards"]),
        failure=Failure(**failure) if failure else None,
    )
