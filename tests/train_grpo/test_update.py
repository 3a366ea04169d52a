import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from components.policy import output_layer
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.shared.errors import PipelineError
from components.train_grpo.config import Aggregation, TrainGRPOConfig
from components.train_grpo.corrections import mask_completions
from components.train_grpo.metrics import UpdateMetrics, metrics_without_update
from components.train_grpo.update import (
    Experience,
    Minibatch,
    _loss,
    loss_is_sum,
    make_experience,
    rollout_advantages,
    split_minibatches,
    update,
)
from tests.policy import plain
from tests.train_grpo.groups import CHECKED, completion, group, rewarded, scored
from tests.train_grpo.runs import OneOf
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.written_out import plain_loss, plain_scores

CPU = torch.device("cpu")
NAN = math.nan
THIRD = 1 / math.sqrt(3)


PROCESS: dict[str, Any] = {"reward__weights": {CHECKED: 1.0}, "reward__supervision": "process"}


def test_process_supervision_normalises_over_all_steps_of_the_group() -> None:
    """By hand: steps 1, 1 and 1, 0 have mean 3/4 together; a token sums the steps to come; groups are independent."""
    one = scored({CHECKED: [1, 1]}, ends=[2, 4], num_tokens=4)
    other = scored({CHECKED: [1, 0]}, ends=[1, 4], num_tokens=5)
    few = group(scored({CHECKED: [1]}, ends=[3]), scored({CHECKED: [0]}, ends=[3]))
    result = rollout_advantages(grpo_config(**PROCESS), [group(one, other), few])
    expected = [THIRD * each for each in (2, 2, 1, 1, 1 - 3, -3, -3, -3, 0)]
    assert result.tolist() == pytest.approx([*expected, 1, 1, 1, -1, -1, -1], rel=1e-12)


@pytest.mark.parametrize(("truncated", "in_loss"), [("score", True), ("mask", False)])
def test_an_experience_lists_the_completions_group_after_group(truncated: str, in_loss: bool) -> None:
    """Sequences, advantages and the sampler's log-probabilities in order; a masked completion is not in the loss."""
    config = grpo_config(group_size=2, sampling__truncated=truncated)
    last = group(scored({"accuracy": [0]}), scored({"accuracy": [1]}, finished=False))
    groups = [rewarded(1, 0, lengths=[1, 2]), last]
    result = make_experience(config, groups, CPU)
    assert result.sequences_B == [completion(length).tokens for length in (1, 2, 3, 3)]
    assert result.num_tokens_B == [1, 2, 3, 3]
    assert result.advantages_M.tolist() == pytest.approx([1, -1, -1, -1, -1, -1, 1, 1, 1])
    assert result.sampler_logprobs_M.tolist() == [-1.0] * 9
    assert result.sampler_logprobs_M.dtype == torch.float64
    assert result.in_loss_B.tolist() == [True, True, True, in_loss]
    assert bool(result.old_logprobs_M.isnan().all())


@settings(max_examples=20)
@given(num_groups=st.integers(1, 12), group_size=st.integers(2, 5), count=st.integers(1, 6))
def test_minibatches_are_whole_groups_and_hold_every_completion_once(
    num_groups: int, group_size: int, count: int
) -> None:
    """Parts follow each other, and their sizes differ by one group at most; there are fewer where groups are few."""
    config = grpo_config(group_size=group_size, prompts_per_step=count, minibatches_per_rollout=count)
    groups = [rewarded(*range(group_size), lengths=[1] * group_size)] * num_groups
    minibatches = split_minibatches(config, make_experience(config, groups, CPU), ranks=SINGLE_PROCESS)
    parts = [(minibatch.weights_B > 0).nonzero().flatten().tolist() for minibatch in minibatches]
    assert [index for part in parts for index in part] == list(range(num_groups * group_size))
    assert all(len(part) % group_size == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= group_size
    assert len(parts) == min(count, num_groups)
    assert all(float(minibatch.weights_B.sum()) == pytest.approx(1) for minibatch in minibatches)


ADVANTAGES_B = [0.58, 0.58, -1.73, 1.0, -1.0, 0.3]
GSPO: dict[str, Any] = {"loss__ratio": "sequence", "loss__clip": {"low": 0.03, "high": 0.04}}
WEIGHT = "sampler__correction__weight"
TOKEN_MASK: dict[str, Any] = {
    "sampler__max_staleness": 1,
    "sampler__correction__mask": {"level": "token", "low": 0.8, "high": 1.3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "no KL": {"loss__kl__coefficient": 0.0},
    "token mean": {"loss__aggregation": "token_mean"},
    "prompt mean": {"loss__aggregation": "prompt_mean"},
    "constant": {"loss__aggregation": "constant"},
    "other clips": {"loss__clip": {"low": 0.1, "high": 0.3}},
    "sequence ratio": GSPO,
    "CISPO": {"loss__policy_loss": "cispo"},
    "SAPO": {"loss__policy_loss": "sapo"},
    "GMPO": {"loss__policy_loss": "gmpo"},
    "DPPO": {"loss__policy_loss": "dppo", "loss__clip": {"low": 0.003, "high": 0.02}},
    "corrected k3": {"loss__kl__estimator": "k3_corrected"},
    "importance weights": {WEIGHT: {"level": "token", "max": 1.2}},
    "importance weights of completions": {WEIGHT: {"level": "sequence", "max": 1.2}},
    "IcePop": {**TOKEN_MASK, WEIGHT: {"level": "token", "max": None}},
    "a mask of tokens, weights of completions, CISPO": {
        **TOKEN_MASK,
        WEIGHT: {"level": "sequence", "max": 1.5},
        "loss__policy_loss": "cispo",
    },
    "a teacher behind a server": {"teacher": {"base": "t", "server": "http://t/v1", "coefficient": 0.5}},
    "steps": {},
    "forks": {},
    "forks, ratio and weights of completions": {**GSPO, WEIGHT: {"level": "sequence", "max": 1.1}},
}
NO_KL: dict[str, Any] = {"loss__kl__coefficient": 0.0}


def _config(name: str = "the paper's", **changes: Any) -> TrainGRPOConfig:
    """Return settings for two groups of three, with a large KL coefficient, so that it shows in the gradient."""
    fixed = {"prompts_per_step": 2, "group_size": 3, "loss__kl__coefficient": 0.5, "sampler__max_mismatch": 1.0}
    return grpo_config(**{**fixed, "engine__zero_stage": 0, **VARIANTS[name], **changes})


def gradients_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each weight that has one, and remove them."""
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    return gradients


exact_model = functools.cache(plain.gpt2)
"""Returns a transformer that computes everything in float64."""
EXACT_SEQUENCES = [
    TokenSequence((1, 2, 3), (4, 5, 6, 7)),
    TokenSequence((1, 2, 3), (8,)),
    TokenSequence((1, 2, 3), (9, 10, 11, 12, 13, 14, 4)),
    TokenSequence((15, 16), (17, 18)),
    TokenSequence((15, 16), (5, 0, 3)),
    TokenSequence((15, 16), (2, 6, 1, 1, 0)),
]

TRAJECTORIES = [
    TokenSequence((1, 2, 3), (4, 5, 6, 7, 1, 12), ((2, 4),)),  # an observation in the middle,
    TokenSequence((1, 2, 3), (8, 17, 3), ((0, 2),)),  # at the beginning,
    TokenSequence((1, 2, 3), (9, 10, 11, 12, 13, 14, 4, 2, 5), ((1, 3), (3, 4), (6, 6), (6, 8))),  # next to another,
    TokenSequence((15, 16), (17, 18)),  # none,
    TokenSequence((15, 16), (5, 0, 3, 9), ((1, 1), (3, 4))),  # an empty one, and one at the end;
    TokenSequence((4, 15), (2, 6, 1, 1, 0), ((2, 4),)),  # and in a sequence that shares its prompt with no other.
]


FORKED = [
    plain.forked(
        TokenSequence((1, 2, 3), (4, 5, 6, 7), ((1, 2),)),
        TokenSequence((1, 2, 3, 8, 9), (10, 11)),
        TokenSequence((12, 1), (13, 14, 15)),
    ),
    TokenSequence((1, 2, 3), (8, 17, 3)),
    TokenSequence((1, 2, 3), (9, 10)),
    plain.forked(TokenSequence((15, 16), (17,)), TokenSequence((15, 18), (2, 3, 4, 5), ((0, 2),))),
    TokenSequence((15, 16), (5, 0, 3, 9)),
    TokenSequence((15, 16), (2, 6)),
]
"""Trajectories whose chat template rewrote the history: several branches, counted as one."""


def exact_experience(
    name: str, sequences: list[TokenSequence] = EXACT_SEQUENCES, model: PreTrainedModel | None = None
) -> Experience:
    """Return two groups of three completions, off-policy: ratios are on either side of the clips.

    They have an advantage each, one per token in "steps", and one of them is masked in "masked".
    """
    lengths = torch.tensor([sequence.num_sampled for sequence in sequences])
    advantages_M = torch.tensor(ADVANTAGES_B, dtype=torch.float64).repeat_interleave(lengths)
    if name == "steps":
        advantages_M *= torch.linspace(1.5, -0.5, len(advantages_M))
    with torch.no_grad():
        own_M = torch.cat([plain_scores(model or exact_model(), sequence)[0] for sequence in sequences])
    torch.manual_seed(9)
    old, sampler, reference = (spread * torch.randn(len(own_M), dtype=torch.float64) for spread in (0.4, 0.3, 0.7))
    return Experience(
        sequences,
        torch.tensor([name != "masked" or number != 1 for number in range(6)]),
        advantages_M,
        old_logprobs_M=own_M + old,
        sampler_logprobs_M=own_M + old + sampler,
        reference_logprobs_M=own_M + reference,
        **({"teacher_logprobs_M": own_M - reference} if "teacher" in name else {}),
    )


def loss_of_step(
    config: TrainGRPOConfig, experience: Experience, model: PreTrainedModel, ranks: Ranks = SINGLE_PROCESS
) -> tuple[Tensor, Any]:
    """Return a process's part of the loss of one optimizer step, micro-batch by micro-batch, and its metrics."""
    scorer = LogprobModel(model, temperature=1.0)
    if config.loss.kl.coefficient == 0:
        experience = dataclasses.replace(experience, reference_logprobs_M=None)
    metrics = UpdateMetrics()
    (minibatch,) = split_minibatches(config, experience, ranks=ranks)
    batches, weights_B = minibatch.shard.batches, minibatch.weights_B
    is_sum = loss_is_sum(config)
    losses = []
    for batch in batches:
        loss = functools.partial(_loss, config, batch, weights_B, experience, metrics, is_first=False)
        losses.append(scorer(batch, loss, is_sum=is_sum))
    return torch.stack(losses).sum(), metrics.figures([{}])


def _assert_written_out(config: TrainGRPOConfig, experience: Experience, world_size: int = 1) -> dict[str, float]:
    """Loss and gradient of all processes together are those written out, to ten digits; return the metrics of one."""
    written_out, packed = copy.deepcopy(exact_model()), copy.deepcopy(exact_model())
    expected = plain_loss(config, experience, written_out)
    expected.backward()
    parts = []
    for rank in range(world_size):
        loss, figures = loss_of_step(config, experience, packed, OneOf(rank, world_size))
        loss.backward()
        parts.append(float(loss.detach()))
    assert 0.0 not in parts
    assert sum(parts) == pytest.approx(float(expected.detach()), rel=1e-10)
    torch.testing.assert_close(gradients_of(packed), gradients_of(written_out), rtol=1e-10, atol=1e-12)
    return dict(figures)


@pytest.mark.parametrize(
    ("name", "max_tokens", "chunk_tokens"),
    [
        *((name, 14, 3) for name in VARIANTS),
        *((name, 10_000, 5) for name in ("the paper's", "GMPO", "IcePop", "forks")),
    ],
)
def test_the_loss_and_its_gradient_are_those_of_the_objective_written_out(
    monkeypatch: pytest.MonkeyPatch, name: str, max_tokens: int, chunk_tokens: int
) -> None:
    """In float64, off-policy, to ten digits, for any split; what an environment wrote is read and counts nowhere."""
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", chunk_tokens)
    config = _config(name, engine__micro_batch_tokens=max_tokens)
    experience = exact_experience(name, FORKED if name.startswith("forks") else TRAJECTORIES)
    figures = _assert_written_out(config, experience)
    is_clipped = name != "SAPO"
    assert (figures["clip_high_fraction"] > 0, figures["clip_low_fraction"] > 0) == (is_clipped, is_clipped)


@pytest.mark.parametrize(("world_size", "max_tokens"), [(2, 14), (3, 1)])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_processes_together_have_the_loss_and_the_gradient_written_out(
    aggregation: str, max_tokens: int, world_size: int
) -> None:
    """In float64, of trajectories: their sums over any number of processes and micro-batches agree to ten digits."""
    config = _config(loss__aggregation=aggregation, engine__micro_batch_tokens=max_tokens)
    _assert_written_out(config, exact_experience("the paper's", TRAJECTORIES), world_size)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize(
    ("level", "low", "nats", "in_loss"),
    [
        ("geometric", math.exp(-0.1), 0.1, [True, False, True, False, True, True]),
        ("sequence", math.exp(-0.3), 0.3, [True, True, False, True, True, False]),
        ("sequence", 0.0, 0.3, [True, True, False, True, True, True]),
    ],
)
def test_completions_outside_the_mask_have_no_part_in_the_loss(
    aggregation: str, level: str, low: float, nats: float, in_loss: list[bool]
) -> None:
    """Their mean difference counts, or its sum, not single tokens; the loss is that of the others, to ten digits."""
    config = _config(
        loss__aggregation=aggregation,
        engine__micro_batch_tokens=14,
        sampler__vllm={},
        sampler__correction__weight={"level": "token", "max": 2.0},
        sampler__correction__mask={"level": level, "low": low, "high": math.exp(nats)},
    )
    experience = exact_experience("the paper's")
    # Four tokens, one, seven, two, three, five: large differences that cancel out, and small ones that do not.
    mismatches = [0.3, -0.3] * 2 + [0.11] + [0.09] * 7 + [-0.12, -0.1] + [0.5, -0.1, -0.3] + [0.0, 0.0, -0.49, 0, 0]
    experience.sampler_logprobs_M = experience.old_logprobs_M - torch.tensor(mismatches, dtype=torch.float64)
    mask_completions(config, experience)
    assert experience.in_loss_B.tolist() == in_loss
    _assert_written_out(config, experience)


def test_a_sampler_whose_every_completion_is_masked_stops_the_run() -> None:
    """Stale weights are not hidden by the mask; a completion that is masked already stays so."""
    mask = {"level": "geometric", "low": math.exp(-0.1), "high": math.exp(0.1)}
    config = _config(sampler__vllm={}, sampler__max_mismatch=0.3, sampler__correction__mask=mask)
    experience = exact_experience("masked")
    experience.sampler_logprobs_M = experience.old_logprobs_M - 0.2
    mask_completions(config, experience)
    assert not bool(experience.in_loss_B.any())
    assert split_minibatches(config, experience, ranks=SINGLE_PROCESS) == []
    experience.sampler_logprobs_M = experience.old_logprobs_M - 0.4
    with pytest.raises(PipelineError, match=r"0\.4 nats per token"):
        mask_completions(config, experience)
    masked = exact_experience("masked")
    masked.sampler_logprobs_M = masked.old_logprobs_M
    mask_completions(config, masked)
    assert masked.in_loss_B.tolist() == [True, False, True, True, True, True]


class _Run:
    """One update of the exact model; records the gradient of each step, and the tokens of each forward pass."""

    def __init__(self, config: TrainGRPOConfig, **changes: Any) -> None:
        self.config, self.experience = config, dataclasses.replace(exact_experience("the paper's"), **changes)
        """Its `old_logprobs_M` are known here, for the expected values; `update` computes them anew."""
        self.model = copy.deepcopy(exact_model())
        to_sampler_M = self.experience.sampler_logprobs_M - self.experience.old_logprobs_M
        self.experience.old_logprobs_M = self.scores()
        self.experience.sampler_logprobs_M = self.experience.old_logprobs_M + to_sampler_M
        self.policy = Policy(LogprobModel(self.model, temperature=1.0), config.engine)
        self.gradients: list[dict[str, Tensor]] = []
        self.tokens_seen: list[int] = []
        self.model.get_input_embeddings().register_forward_hook(
            lambda _, arguments, __: self.tokens_seen.append(arguments[0].numel())
        )
        step = self.policy.step

        def recorded(learning_rate: float) -> dict[str, float]:
            named = self.model.named_parameters()
            self.gradients.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
            return step(learning_rate)

        self.policy.step = recorded  # type: ignore[method-assign]

    def scores(self) -> Tensor:
        """Return the log-probability of each token under the model as it is now."""
        with torch.no_grad():
            model = copy.deepcopy(self.model)
            model.set_attn_implementation("sdpa")
            return torch.cat([plain_scores(model, sequence)[0] for sequence in EXACT_SEQUENCES])

    @property
    def minibatches(self) -> list[Minibatch]:
        return split_minibatches(self.config, self.experience, ranks=SINGLE_PROCESS)

    def __call__(
        self, minibatches: Sequence[Minibatch] | None = None, *, old_is_known: bool = False
    ) -> dict[str, float]:
        experience, parts = dataclasses.replace(self.experience), minibatches or self.minibatches
        if not old_is_known:
            experience.old_logprobs_M = torch.full_like(self.experience.old_logprobs_M, NAN)
        if self.config.loss.kl.coefficient == 0:
            experience.reference_logprobs_M = None
        return update(self.config, self.policy, parts, experience, self.config.learning_rate)

    def require_unchanged(self) -> None:
        """Fail if a step was taken."""
        assert not self.gradients
        torch.testing.assert_close(self.model.state_dict(), exact_model().state_dict(), rtol=0, atol=0)


def test_only_later_minibatches_are_scored_beforehand() -> None:
    """The second one before anything changes, and only in the first pass; neither if that is known already."""
    run = _Run(_config(minibatches_per_rollout=2, updates_per_rollout=2))
    run()
    first, second = ([batch.input_ids_T.numel() for batch in each.shard.batches] for each in run.minibatches)
    assert run.tokens_seen == second + (first + second) * 2
    assert len(run.gradients) == 4
    known, unknown = (_Run(_config(minibatches_per_rollout=2)) for _ in range(2))
    ratio_max = known(old_is_known=True)["ratio_max"]
    assert known.tokens_seen == first + second
    assert ratio_max == pytest.approx(unknown()["ratio_max"], rel=1e-9)


def test_a_second_minibatch_is_compared_with_the_policy_that_sampled() -> None:
    """Its ratios have moved by the step on the first minibatch; those of the first are one."""
    config = _config(minibatches_per_rollout=2, learning_rate=3e-2)
    figures = _Run(config)()
    run = _Run(config)
    run(run.minibatches[:1])
    ratio_M = (run.scores() - run.experience.old_logprobs_M).exp()[sum(run.experience.num_tokens_B[:3]) :]
    assert figures["ratio_min"] == pytest.approx(min(1.0, float(ratio_M.min())), rel=1e-9)
    assert figures["ratio_max"] == pytest.approx(max(1.0, float(ratio_M.max())), rel=1e-9)
    assert figures["ratio_max"] > 1.01


@pytest.mark.parametrize(("shift", "stops"), [(0.9, True), (NAN, True), (0.1, False)])
def test_a_sampler_of_another_policy_stops_before_the_step(shift: float, stops: bool) -> None:
    """A mean mismatch above the bound, or one that is not a number, and no weight has changed."""
    run = _Run(_config(sampler__max_mismatch=0.5))
    run.experience.sampler_logprobs_M[:] += shift
    if not stops:
        run()
        return
    with pytest.raises(PipelineError, match=r"sampler\.max_mismatch = 0\.5"):
        run()
    run.require_unchanged()


@pytest.mark.parametrize(("changes", "computed"), [(NO_KL, (1, 2, 3, 5)), ({}, range(6))])
def test_completions_of_zero_advantage_are_left_out_and_still_divided_by(
    changes: dict[str, Any], computed: Sequence[int]
) -> None:
    """Without a KL term a zero advantage is no work; loss and gradient are those of computing it."""
    config = _config(**changes, loss__aggregation="token_mean", engine__micro_batch_tokens=1)
    advantages_B = torch.tensor([0.0, 0.58, -1.73, 1.0, 0.0, 0.3], dtype=torch.float64)
    lengths = torch.tensor([each.num_sampled for each in EXACT_SEQUENCES])
    run = _Run(config, advantages_M=advantages_B.repeat_interleave(lengths))
    figures = run()
    assert sorted(run.tokens_seen) == sorted(len(run.experience.sequences_B[number]) for number in computed)
    expected = copy.deepcopy(exact_model())
    loss = plain_loss(config, run.experience, expected)
    loss.backward()
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    torch.testing.assert_close(run.gradients[0], gradients_of(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("masked", "changes"), [(False, NO_KL), (True, {})])
def test_a_rollout_without_a_signal_changes_nothing(masked: bool, changes: dict[str, Any]) -> None:
    """No advantage and no KL in the loss, or everything masked: no forward pass, no step, and metrics that say so."""
    run = _Run(_config(**changes))
    if masked:
        run.experience.in_loss_B[:] = False
    else:
        run.experience.advantages_M[:] = 0.0
    figures = run()
    run.require_unchanged()
    assert not run.tokens_seen
    assert figures == pytest.approx(metrics_without_update(run.config.learning_rate), nan_ok=True)
