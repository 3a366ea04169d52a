"""What a policy learns from trajectories whose chat template rewrote the history: several branches, counted as one."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.checkpoint import save
from components.policy.logprobs import LogprobModel
from components.policy.packing import Shard, TokenSequence, pack_shard
from components.policy.padded import use_padded_rows
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.shared import jsonl
from components.shared.problem import Split, write_problems
from components.shared.tools import ToolsConfig
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import UpdateMetrics
from components.train_grpo.update import Experience, _loss, loss_is_sum, split_minibatches
from tests import tiny
from tests.policy import plain
from tests.rollout import acting as words
from tests.rollout.test_forks import FORGETTING
from tests.train_grpo.groups import SHORTNESS
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_resume import RESUMED, SEGMENTS, assert_equal, run_both
from tests.train_grpo.written_out import plain_scores

BRANCHES = [
    [
        TokenSequence((1, 2, 3), (4, 5, 6, 7), ((1, 2),)),
        TokenSequence((1, 2, 3, 8, 9), (10, 11)),
        TokenSequence((12, 1), (13, 14, 15)),
    ],
    [TokenSequence((1, 2, 3), (8, 17, 3))],
    [TokenSequence((15, 16), (17,)), TokenSequence((15, 18), (19, 20, 21, 22), ((0, 2),))],
    [TokenSequence((15, 16), (5, 0, 3, 9))],
]
ADVANTAGES_B = (1.3, -0.7, -1.0, 1.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "sequence mean": {},
    "token mean": {"loss__aggregation": "token_mean"},
    "prompt mean": {"loss__aggregation": "prompt_mean"},
    "ratio and weight of sequences": {
        "loss__ratio": "sequence",
        "sampler__correction__weight": {"level": "sequence", "max": 1.1},
    },
}


def _experience(model: PreTrainedModel) -> Experience:
    """Return what the sampler, the policy before the update and the reference said, each at some distance."""
    with torch.no_grad():
        own_M = torch.cat([plain_scores(model, branch)[0] for branches in BRANCHES for branch in branches])
    noise = torch.randn(3, len(own_M), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    old_M, sampler_M, reference_M = own_M + 0.1 * noise
    sequences = [plain.forked(*branches) for branches in BRANCHES]
    lengths = torch.tensor([sequence.num_sampled for sequence in sequences])
    advantages_M = torch.tensor(ADVANTAGES_B, dtype=torch.float64).repeat_interleave(lengths)
    return Experience(sequences, torch.ones(4, dtype=torch.bool), advantages_M, sampler_M, old_M, reference_M)


def _written_out(config: TrainGRPOConfig, experience: Experience, model: PreTrainedModel) -> Tensor:
    """Return the loss, from the full logits of each branch alone."""
    assert experience.reference_logprobs_M is not None
    lengths = [8, 3, 3, 4]
    inputs = (experience.old_logprobs_M, experience.sampler_logprobs_M, experience.reference_logprobs_M)
    total = torch.zeros((), dtype=torch.float64)
    for number, (branches, advantage) in enumerate(zip(BRANCHES, ADVANTAGES_B, strict=True)):
        logprobs_T = torch.cat([plain_scores(model, branch)[0] for branch in branches])
        old_T, sampler_T, reference_T = (values_M.split(lengths)[number] for values_M in inputs)
        assert len(logprobs_T) == lengths[number]
        ratio_T, weight = (logprobs_T - old_T).exp(), torch.ones(())
        if config.loss.ratio == "sequence":
            ratio_T = (logprobs_T - old_T).mean().exp().expand(lengths[number])
            weight = (old_T - sampler_T).sum().exp().clamp(max=1.1)
        clipped_T = ratio_T.clamp(1 - config.loss.clip.low, 1 + config.loss.clip.high)
        objective_T = weight * torch.minimum(ratio_T * advantage, clipped_T * advantage)
        x_T = reference_T - logprobs_T
        objective_T = objective_T - config.loss.kl.coefficient * (x_T.exp() - x_T - 1)
        divisor = {"sequence_mean": 4 * lengths[number], "token_mean": 18, "prompt_mean": 2 * (11, 11, 7, 7)[number]}
        total = total - objective_T.sum() / divisor[config.loss.aggregation]
    return total


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 14, 100])
def test_the_loss_counts_the_branches_of_a_trajectory_as_one(name: str, padded: bool, max_tokens: int) -> None:
    """Loss and gradient are those of the objective written out in float64, however branches are packed."""
    fixed = {"prompts_per_step": 2, "group_size": 2, "loss__kl__coefficient": 0.5, "sampler__max_mismatch": 1.0}
    config = grpo_config(**fixed, **VARIANTS[name], engine__micro_batch_tokens=max_tokens)
    model = plain.gpt2()
    experience, expected = _experience(model), copy.deepcopy(model)
    _written_out(config, experience, expected).backward()
    scorer = LogprobModel(use_padded_rows(model, "a test") if padded else model, temperature=1.0)
    (minibatch,) = split_minibatches(config, experience, ranks=SINGLE_PROCESS, padded=padded)
    assert (len(minibatch.shard.batches) > 1) == (max_tokens < 100)
    for batch in minibatch.shard.batches:
        token_loss = functools.partial(
            _loss, config, batch, minibatch.weights_B, experience, UpdateMetrics(), is_first=False
        )
        scorer(batch, token_loss, is_sum=loss_is_sum(config)).backward()
    for (key, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        plain.assert_near(weight.grad, other.grad, 1e-10, key)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [{}, SEGMENTS], ids=["whole", "in segments"])
def test_a_resumed_run_with_forks_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, segments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, with trajectories in flight that have forked."""
    has_forks: list[bool] = []

    def packed(ranks: Ranks, sequences: Sequence[TokenSequence], **options: Any) -> Shard:
        has_forks.append(any(each.forks for each in sequences))
        return pack_shard(ranks, sequences, **options)

    monkeypatch.setattr("components.train_grpo.update.pack_shard", packed)
    for name in ("zero_2", "problems", "reference"):
        (tmp_path / name).mkdir()
    write_problems(tmp_path / "problems", Split.TRAIN, tiny.PROBLEMS)
    checkpoint = words.checkpoint(words.qwen3, FORGETTING, b="</think>")
    tools = ToolsConfig(environment="tests.environments.own:Counting", max_turns=4, max_observation_tokens=12)
    config = checkpoint.config.model_copy(update={"tools": tools})
    save(dataclasses.replace(checkpoint, config=config), tmp_path / "reference")
    settings = {"num_steps": 4, "prompts_per_step": 4, "sampling__max_new_tokens": 30}
    training = grpo_config(**settings, reward__weights=SHORTNESS, **segments)
    run_both(training, problems=tmp_path / "problems", reference=tmp_path / "reference", folder=tmp_path)
    assert_equal(tmp_path / "zero_2", num_steps=4)
    rows = [row for _, row in jsonl.read_rows(tmp_path / "zero_2" / RESUMED / "training" / "steps.jsonl")]
    assert all(has_forks)
    assert not segments or rows[1]["groups_in_flight"] > 0
