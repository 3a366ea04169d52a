import re
from collections.abc import Iterator
from itertools import chain
from types import NoneType
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from components.preflight.config import Params
from components.shared.config import models_of, without_operational
from components.shared.tools import ARGUMENTS
from components.train_grpo.config import ImportanceWeightConfig, TrainGRPOConfig
from tests.presets import ROOT
from tests.train_grpo.groups import CHECKED
from tests.train_grpo.settings import REWARD_MODEL, SERVERS, grpo_config

STEPS = {"reward__weights": {CHECKED: 1.0}, "reward__supervision": "process"}
ADAPTERS = {"synchronise": "adapters"}
OVERLONG = {"reward__weights": {"overlong": 1}}
STALE = {"sampler__max_staleness": 2, "sampler__correction__weight": {"level": "token", "max": 2.0}}


def test_the_order_of_keys_in_the_params_file_has_no_effect() -> None:
    """Kubeflow keeps none: columns of curves, sums of rewards and lineage would differ from run to run."""
    weights = {"length": 1.0, "accuracy": 2.0, "format": 3.0}
    one, other = (grpo_config(reward__weights=dict(pairs)) for pairs in (weights.items(), [*weights.items()][::-1]))
    assert list(one.reward.weights) == list(other.reward.weights)
    assert one.model_dump_json() == other.model_dump_json()


def test_a_limit_that_only_stops_a_run_may_be_raised_on_the_way() -> None:
    """As its error advises: the run goes on from its checkpoints. What decides the result may not be changed."""
    changed = grpo_config(sampler__max_mismatch=7.0, reward__max_unscorable_fraction=0.7, checkpoint__every_steps=7)
    assert without_operational(changed) == without_operational(grpo_config())
    assert without_operational(grpo_config(checkpoint__keep_best=True)) != without_operational(grpo_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__weights": {"overlong": 1}}, r"weights\.overlong and overlong_buffer_tokens go together"),
        ({"reward__model": {"initial_rollouts": 0}}, "needs initial_rollouts to learn from"),
        ({"reward__supervision": "process"}, r"process needs weights\.reward_model, or a custom reward"),
        ({"prompts__source_weights": {"sums": 0}}, "one of source_weights must be above 0"),
        ({"reward__weights": {"accuracy": 0.0, "length": 0.0}}, r"reward\.weights: all are 0"),
        ({"warmup_steps": 3}, "warmup_steps must be smaller than num_steps"),
        ({"profile_steps": [1, 4]}, "profile_steps has steps above num_steps"),
        ({**STALE, "sampler__max_staleness": 3}, "max_staleness must be smaller than num_steps"),
        ({"num_iterations": 2}, "num_steps must be a multiple of num_iterations"),
        ({"minibatches_per_rollout": 2}, "prompts_per_step must be a multiple of minibatches_per_rollout"),
        ({**OVERLONG, "reward__overlong_buffer_tokens": 16}, "smaller than the 16 tokens"),
        ({"advantage__estimator": "mean_scaled", "reward__weights": {"accuracy": -1}}, r"weights\.accuracy can make"),
        ({"advantage__estimator": "mean_scaled", "reward__by_source": {"code": {"length": 1}}}, r"code\.length can"),
        ({"reward__weights": {"a.b:c": 1, "a:b_c": 1}}, r"2 rewards would share the column `reward_a_b_c`"),
        ({"reward__by_source": {"code": {}}}, "code: names no reward"),
        ({"reward__by_source": {"code": {"tidiness": 1}}}, r"no reward `tidiness`; .*package\.module:function"),
        ({**STEPS, "reward__by_source": {"code": {"format": 1}}}, "supervision: process needs"),
        ({"sampler__max_staleness": 1}, r"max_staleness above 0 needs correction\.weight"),
        ({"sampler__dtype": "bfloat16"}, "dtype is that of vLLM, which needs vllm or servers"),
        ({"sampler__vllm": ADAPTERS}, r"sampler\.vllm\.synchronise: adapters needs engine\.lora, .* at most 512"),
        ({"sampler__servers": {**SERVERS, **ADAPTERS}, "engine__lora": {"rank": 513}}, "rank of at most 512"),
        ({**STALE, "prompts__max_resampling_rounds": 1}, r"max_staleness above 0 needs prompts\.max_resampling_rounds"),
        ({"sampler__servers": SERVERS, "sampler__vllm": {}}, "exclude one another"),
        ({"tracking__mlflow": {"uri": "file:///tmp/mlruns"}}, "sqlite:////PATH/mlflow.db"),
        ({"sampler__correction__mask": {}}, r"correction\.mask needs vllm, servers or max_staleness above 0"),
        ({"sampler__correction__weight": {"max": None}}, r"weight needs max, such as 2\.0, or mask"),
        ({"limits__max_kl": 1.0, "loss__kl__coefficient": 0.0}, r"limits\.max_kl needs a KL term"),
        ({"reference": "adapters"}, r"reference: adapters needs engine\.lora"),
        ({"reference": "adapters", "engine__lora": {}, "num_iterations": 3}, "num_iterations: 1; the reference"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    """The message names the keys that do not fit."""
    with pytest.raises(ValidationError, match=message):
        grpo_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {**OVERLONG, "reward__overlong_buffer_tokens": 15},
        {"reward__weights": {"mine:tidiness": -1, "my.custom_rewards:tidiness_2": 1, "length": 1, "code_tests": 1}},
        {"reward__weights": {"reward_model": 1}, "reward__model": REWARD_MODEL, "reward__supervision": "process"},
        {**STALE, "sampler__correction__mask": {"low": 0}, "sampler__correction__weight": {"max": None}},
    ],
)
def test_settings_at_the_bounds_are_accepted(changes: dict[str, Any]) -> None:
    """What is just allowed, and what goes together, is."""
    grpo_config(**changes)


CORRECTIONS = [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/explanation/asynchrony.md").read_text(encoding="utf-8").splitlines()
    if re.search(r"\| `\{level: ", line)
]
"""Method, `correction.weight` and `correction.mask` of each row of the table of corrections."""


@pytest.mark.parametrize(("weight", "mask"), [row[1:] for row in CORRECTIONS], ids=[row[0] for row in CORRECTIONS])
def test_documented_corrections_are_complete(weight: str, mask: str) -> None:
    """They are accepted, and no key has a default beside null."""
    values = yaml.safe_load(f"{{weight: {weight}, mask: {mask}}}")
    correction = grpo_config(sampler={"max_staleness": 1, "correction": values}).sampler.correction
    assert correction.model_dump() == values


def test_a_key_that_may_be_null_is_null_by_default() -> None:
    """In a params file null resets a key to its default: it could not be set where the default is another value."""

    def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield model
        for field in model.model_fields.values():
            for inner in models_of(field):
                yield from models(inner)

    known = set(chain(models(Params), *map(models, ARGUMENTS.values())))
    assert {ImportanceWeightConfig, TrainGRPOConfig} < known
    wrong = [
        f"{model.__name__}.{name}"
        for model in known
        for name, field in model.model_fields.items()
        if NoneType in get_args(field.annotation) and not field.is_required() and field.get_default() is not None
    ]
    assert wrong == []
