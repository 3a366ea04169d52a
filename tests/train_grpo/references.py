"""What ranks do in tests of the reference."""

from pathlib import Path
from typing import get_args

import torch

from components.policy.logprobs import completion_logprobs
from components.policy.parallel import init_ranks
from components.train_grpo.config import ReferencePlacement, TrainGRPOConfig
from components.train_grpo.reference import Reference
from tests import tiny


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
    for name, model in (("first", checkpoint.model), ("other", other.model)):
        scores = []
        for reference in references:
            with reference.onloaded():
                scores.append(completion_logprobs(reference, batches, num_tokens))
        result[name] = max(float((each - scores[0]).abs().max()) for each in scores)
        result[f"{name}_mean"] = float(scores[0].mean())
        weights = model.state_dict()
        for reference in references:
            state = reference.state(main=True)
            if name == "first":
                assert state is None
            else:
                assert state is not None
                assert state.keys() == weights.keys()
                assert all(torch.equal(state[key], weights[key]) for key in weights)
            reference.load(other.model.state_dict())
    return result
