from pathlib import Path
from typing import Any

import pytest

from components.cluster.launch import run_ranks
from components.policy.engine import Policy, torch_dtype
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.lora import add_adapters
from components.policy.parallel import init_ranks
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.reference import AdapterReference, Reference
from tests import tiny
from tests.train_grpo.settings import grpo_config

LORA = {"rank": 2, "alpha": 6.0, "targets": ["all-linear"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fp32": {"zero_stage": 2},
    "bf16": {"zero_stage": 2, "precision": "bf16"},
    "zero 3": {"zero_stage": 3},
}


def compare_with_adapters(config: TrainGRPOConfig, *, folder: Path) -> dict[str, float]:
    """Score with a copy and with disabled adapters, before and after a step of training; return the differences."""
    del folder
    result = {}
    for name, changes in ENGINES.items():
        engine = config.engine.model_validate({**config.engine.model_dump(), **changes})
        init_ranks(engine)
        checkpoint = tiny.checkpoint(dtype=torch_dtype(engine))
        examples = checkpoint.examples(tiny.PROBLEMS[:4])
        batches, num_tokens = tiny.batches(examples, 60), sum(len(each.completion_ids) for each in examples)
        copy = Reference(checkpoint.model, "replicated", temperature=0.7)
        add_adapters(checkpoint.model, engine.lora, seed=1)
        policy = Policy(LogprobModel(checkpoint.model, temperature=0.7), engine)
        reference = AdapterReference(policy, checkpoint.model)
        for step in ("before", "after"):
            copied, own, trained = (
                completion_logprobs(each, batches, num_tokens) for each in (copy, reference, policy)
            )
            result[f"{name}, {step}"] = float((own - copied).abs().max())
            result[f"{name}, moved {step}"] = float((trained - copied).abs().mean())
            for batch in batches:
                policy.backward(-policy(batch).logprobs_N.sum() / num_tokens)
            result[f"{name}, norm {step}"] = policy.step(1e-2)["gradient_norm"]
    return result


@pytest.mark.slow
def test_the_policy_without_its_adapters_is_the_reference(tmp_path: Path) -> None:
    """However far training has moved the adapters; in fp32 up to rounding: the copy is computed by fewer operators."""
    config, work = grpo_config(engine__num_processes=2, engine__lora=LORA), tmp_path / "work"
    result = run_ranks(compare_with_adapters, config, {"folder": tmp_path}, num_processes=2, work=work, grace_s=1)
    for name in ENGINES:
        bound = 0.0 if name == "bf16" else 1e-5
        assert max(result[f"{name}, {value}"] for value in ("before", "after", "moved before")) <= bound
        assert result[f"{name}, moved after"] > 1e-3
        assert result[f"{name}, norm after"] > 1e-3


def test_adapters_are_the_reference_where_they_can_be() -> None:
    """With adapters and one iteration, unless the params say otherwise; a new iteration has another reference."""
    assert grpo_config().reference_placement == "replicated"
    assert grpo_config(engine__lora=LORA).reference_placement == "adapters"
    assert grpo_config(engine__lora=LORA, num_iterations=3).reference_placement == "replicated"
    assert grpo_config(engine__lora=LORA, reference="offloaded").reference_placement == "offloaded"
