from pathlib import Path
from typing import get_args

import pytest
import torch

from components.cluster.launch import run_ranks
from components.policy.logprobs import completion_logprobs
from components.policy.parallel import init_ranks
from components.train_grpo.config import ReferencePlacement, TrainGRPOConfig
from components.train_grpo.reference import Reference
from tests import tiny
from tests.train_grpo.settings import grpo_config


def compare(config: TrainGRPOConfig, *, folder: Path) -> dict[str, float]:
    """Score the same in every placement, before and after a reset; return the largest differences."""
    del folder
    init_ranks(config.engine)
    checkpoint, other = tiny.checkpoint(), tiny.checkpoint(seed=2)
    examples = [checkpoint.example(problem) for problem in tiny.PROBLEMS[:4]]
    batches = tiny.batches(examples, 60)
    num_tokens = sum(len(example.completion_ids) for example in examples)
    references = [Reference(checkpoint.model, placement, temperature=0.7) for placement in get_args(ReferencePlacement)]
    result = {}
    for name, weights in (("first", None), ("other", other.model.state_dict())):
        scores = []
        for reference in references:
            if weights is not None:
                reference.load(weights)
            state = reference.state(main=True)
            assert (state is None) is (weights is None)
            assert state is None or all(torch.equal(state[key], weight) for key, weight in (weights or {}).items())
            with reference.onloaded():
                scores.append(completion_logprobs(reference, batches, num_tokens))
        result[name] = max(float((each - scores[0]).abs().max()) for each in scores)
        result[f"{name}_mean"] = float(scores[0].mean())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_placement_of_the_reference_does_not_change_its_scores(tmp_path: Path, num_processes: int) -> None:
    """Replicated, sharded or offloaded, and also after a reset to other weights."""
    config, work = grpo_config(engine__num_processes=num_processes), tmp_path / "work"
    result = run_ranks(compare, config, {"folder": tmp_path}, num_processes=num_processes, work=work, grace_s=1)
    assert result["first"] < 1e-5
    assert result["other"] < 1e-5
    assert abs(result["first_mean"] - result["other_mean"]) > 1e-3
