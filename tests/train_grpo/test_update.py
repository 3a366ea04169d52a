import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from components.policy import logprobs
from components.policy.checkpoint import Checkpoint
from components.policy.engine import NonFiniteError, Policy
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import Shard, TokenSequence
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.train_grpo.config import Aggregation, TrainGRPOConfig
from components.train_grpo.metrics import UpdateMetrics, figures_without_update
from components.train_grpo.scoring import Group
from components.train_grpo.update import (
    Experience,
    Minibatch,
    SamplerMismatchError,
    _loss,
    loss_is_sum,
    make_experience,
    mask_completions,
    rollout_advantages,
    split_minibatches,
    update,
)
from tests import tiny
from tests.train_grpo.groups import CHECKED, completion, group, rewarded, scored
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.written_out import is_sampled, plain_loss, plain_scores

CPU = torch.device("cpu")
NAN = math.nan
THIRD = 1 / math.sqrt(3)

# From rewards to advantages -------------------------------------------------------------------------------------------

PROCESS: dict[str, Any] = {"reward__weights": {CHECKED: 1.0}, "reward__supervision": "process"}


def _of_code(result: Group) -> Group:
    return Group(result.problem.model_copy(update={"source": "code"}), result.scored_G)


def test_rewards_of_a_source_are_normalised_among_its_own_problems() -> None:
    """By hand: what the other source has not counts nowhere; a completion that lacks a reward is left out alone."""
    sums = group(*(scored({"accuracy": [x]}, num_tokens=1) for x in (1, 0, 1, 0)))
    code = _of_code(group(*(scored({"format": [x]}, num_tokens=1) for x in (1, 1, math.nan, 0))))
    settings = {"reward__weights": {"accuracy": 1.0}, "reward__by_source": {"code": {"format": 2.0}}}
    together = rollout_advantages(grpo_config(**settings), [sums, code])
    of_three = [1 / math.sqrt(2)] * 2 + [0, -math.sqrt(2)]
    assert together.tolist() == pytest.approx([1, -1, 1, -1, *of_three])


def test_outcome_supervision_gives_every_token_its_completions_advantage() -> None:
    """The worked example over completions of different lengths; a second group is normalised on its own."""
    groups = [rewarded(1, 1, 1, 0, lengths=[1, 2, 1, 3]), rewarded(0, 1, 0, 1, lengths=[1, 1, 2, 1])]
    result = rollout_advantages(grpo_config(), groups)
    assert result.tolist() == pytest.approx([THIRD] * 4 + [-3 * THIRD] * 3 + [-1, 1, -1, -1, 1], rel=1e-12)
    assert result.dtype == torch.float64


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
    groups = [
        rewarded(1, 0, lengths=[1, 2]),
        group(scored({"accuracy": [0]}), scored({"accuracy": [1]}, finished=False)),
    ]
    result = make_experience(config, groups, CPU)
    assert result.sequences_B == [completion(length).tokens for length in (1, 2, 3, 3)]
    assert result.num_tokens_B == [1, 2, 3, 3]
    assert result.advantages_M.tolist() == pytest.approx([1, -1, -1, -1, -1, -1, 1, 1, 1])
    assert result.sampler_logprobs_M.tolist() == [-1.0] * 9
    assert result.sampler_logprobs_M.dtype == torch.float64
    assert result.in_loss_B.tolist() == [True, True, True, in_loss]
    assert bool(result.old_logprobs_M.isnan().all())


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


# The loss, against the objective written out --------------------------------------------------------------------------

ADVANTAGES_B = [0.58, 0.58, -1.73, 1.0, -1.0, 0.3]
GSPO: dict[str, Any] = {"loss__ratio": "sequence", "loss__clip": {"low": 0.03, "high": 0.04}}
VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "no KL": {"loss__kl__coefficient": 0.0},
    "token mean": {"loss__aggregation": "token_mean"},
    "prompt mean": {"loss__aggregation": "prompt_mean"},
    "constant": {"loss__aggregation": "constant"},
    "other clips": {"loss__clip": {"low": 0.1, "high": 0.3}},
    "sequence ratio": GSPO,
    "CISPO": {"loss__policy_loss": "cispo"},
    "CISPO, sequence ratio": {"loss__policy_loss": "cispo", **GSPO},
    "SAPO": {"loss__policy_loss": "sapo"},
    "GMPO": {"loss__policy_loss": "gmpo"},
    "DPPO": {"loss__policy_loss": "dppo", "loss__clip": {"low": 0.003, "high": 0.02}},
    "corrected k3": {"loss__kl__estimator": "k3_corrected"},
    "corrected k3, sequence ratio": {"loss__kl__estimator": "k3_corrected", **GSPO},
    "importance weights": {"sampler__correction__weight": {"level": "token", "max": 1.2}},
    "importance weights of completions": {"sampler__correction__weight": {"level": "sequence", "max": 1.2}},
    "weights of completions, token mean": {
        "sampler__correction__weight": {"level": "sequence", "max": 2.0},
        "loss__aggregation": "token_mean",
    },
    "IcePop": {
        "sampler__max_staleness": 1,
        "sampler__correction": {
            "weight": {"level": "token", "max": None},
            "mask": {"level": "token", "low": 0.8, "high": 1.3},
        },
    },
    "a mask of tokens, weights of completions, CISPO": {
        "sampler__max_staleness": 1,
        "sampler__correction": {
            "weight": {"level": "sequence", "max": 1.5},
            "mask": {"level": "token", "low": 0.8, "high": 1.3},
        },
        "loss__policy_loss": "cispo",
    },
    "a teacher behind a server": {"teacher": {"base": "t", "server": "http://t/v1", "coefficient": 0.5}},
    "steps": {},
    "steps, sequence ratio": GSPO,
    "masked": {},
    "masked, token mean": {"loss__aggregation": "token_mean"},
    "masked, prompt mean": {"loss__aggregation": "prompt_mean"},
    "masked, constant": {"loss__aggregation": "constant"},
}
NO_KL: dict[str, Any] = {"loss__kl__coefficient": 0.0}


def _config(name: str = "the paper's", **changes: Any) -> TrainGRPOConfig:
    """Return settings for two groups of three, with a large KL coefficient, so that it shows in the gradient."""
    fixed = {"prompts_per_step": 2, "group_size": 3, "loss__kl__coefficient": 0.5, "sampler__max_mismatch": 1.0}
    return grpo_config(**{**fixed, "engine__zero_stage": 0, **VARIANTS[name], **changes})


def _experience(sequences: list[TokenSequence], name: str = "the paper's", **logprobs_M: Tensor) -> Experience:
    """Return two groups of three completions with an advantage each, or one per token, or one completion masked."""
    lengths = torch.tensor([sum(is_sampled(sequence)) for sequence in sequences])
    advantages_M = torch.tensor(ADVANTAGES_B, dtype=torch.float64).repeat_interleave(lengths)
    if name.startswith("steps"):
        advantages_M *= torch.linspace(1.5, -0.5, len(advantages_M))
    in_loss_B = torch.tensor([not (name.startswith("masked") and number == 1) for number in range(6)])
    return Experience(sequences, in_loss_B, advantages_M, **logprobs_M)


def gradients_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each weight that has one, and remove them."""
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    return gradients


@functools.cache
def exact_model() -> PreTrainedModel:
    """Return a transformer that computes everything in float64."""
    torch.manual_seed(4)
    size = {"vocab_size": 19, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**size, **ids, initializer_range=0.3)).double().eval()
    model.set_attn_implementation("sdpa")
    return model


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


def exact_experience(
    name: str, sequences: list[TokenSequence] = EXACT_SEQUENCES, model: PreTrainedModel | None = None
) -> Experience:
    """Return log-probabilities at some distance from the model's own: ratios are on either side of the clips."""
    with torch.no_grad():
        own_M = torch.cat([plain_scores(model or exact_model(), sequence)[0] for sequence in sequences])
    generator = torch.manual_seed(9)
    old, sampler, reference = (
        spread * torch.randn(len(own_M), dtype=torch.float64, generator=generator) for spread in (0.4, 0.3, 0.7)
    )
    return _experience(
        sequences,
        name,
        old_logprobs_M=own_M + old,
        sampler_logprobs_M=own_M + old + sampler,
        reference_logprobs_M=own_M + reference,
        **({"teacher_logprobs_M": own_M - reference} if "teacher" in name else {}),
    )


class _OneOf(Ranks):
    """One of several processes, by itself; the others have as many micro-batches."""

    def all_gather(self, value: Any, what: str) -> list[Any]:
        del what
        return [value] * self.world_size


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
    losses = [
        scorer(
            batch,
            functools.partial(_loss, config, batch, weights_B, experience, metrics, is_first=False),
            is_sum=is_sum,
        )
        for batch in batches
    ]
    return torch.stack(losses).sum(), metrics.figures([{}])


@pytest.mark.parametrize(("max_tokens", "chunk_tokens"), [(1, 64), (14, 3), (10_000, 5)])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_and_its_gradient_are_those_of_the_objective_written_out(
    monkeypatch: pytest.MonkeyPatch, name: str, max_tokens: int, chunk_tokens: int
) -> None:
    """In float64 and off-policy both agree to ten digits, for any split into micro-batches and chunks.

    What an environment wrote is read, and counts in no sum, mean, ratio or length.
    """
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "_MIN_CHUNK_TOKENS", chunk_tokens)
    config = _config(name, engine__micro_batch_tokens=max_tokens)
    experience = exact_experience(name, TRAJECTORIES)
    plain, packed = exact_model(), copy.deepcopy(exact_model())
    expected = plain_loss(config, experience, plain)
    expected.backward()
    loss, figures = loss_of_step(config, experience, packed)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    result, wanted = gradients_of(packed), gradients_of(plain)
    assert result.keys() == wanted.keys()
    for weight, gradient in wanted.items():
        torch.testing.assert_close(result[weight], gradient, rtol=1e-10, atol=1e-12)
    is_clipped = name != "SAPO"
    assert (figures["clip_high_fraction"] > 0, figures["clip_low_fraction"] > 0) == (is_clipped, is_clipped)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("max_tokens", [1, 14, 10_000])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_processes_together_have_the_loss_and_the_gradient_written_out(
    aggregation: str, max_tokens: int, world_size: int
) -> None:
    """In float64, of trajectories: their sums over any number of processes and micro-batches agree to ten digits."""
    config = _config(loss__aggregation=aggregation, engine__micro_batch_tokens=max_tokens)
    experience = exact_experience("the paper's", TRAJECTORIES)
    plain, packed = exact_model(), copy.deepcopy(exact_model())
    expected = plain_loss(config, experience, plain)
    expected.backward()
    losses = [loss_of_step(config, experience, packed, _OneOf(rank, world_size))[0] for rank in range(world_size)]
    for loss in losses:
        loss.backward()
    parts = [float(loss.detach()) for loss in losses]
    assert sum(parts) == pytest.approx(float(expected.detach()), rel=1e-10)
    assert 0.0 not in parts
    result, wanted = gradients_of(packed), gradients_of(plain)
    assert result.keys() == wanted.keys()
    for weight, gradient in wanted.items():
        torch.testing.assert_close(result[weight], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("max_tokens", [1, 14, 10_000])
@pytest.mark.parametrize(
    ("level", "nats", "in_loss"),
    [
        ("geometric", 0.1, [True, False, True, False, True, True]),
        ("sequence", 0.3, [True, True, False, True, True, False]),
    ],
)
def test_completions_outside_the_mask_have_no_part_in_the_loss(
    aggregation: str, max_tokens: int, level: str, nats: float, in_loss: list[bool]
) -> None:
    """Their mean difference counts, or its sum, not single tokens; the loss is that of the others, to ten digits."""
    config = _config(
        loss__aggregation=aggregation,
        engine__micro_batch_tokens=max_tokens,
        sampler__vllm={"max_tokens": 64, "cache_gib": 0.1},
        sampler__correction={
            "weight": {"level": "token", "max": 2.0},
            "mask": {"level": level, "low": math.exp(-nats), "high": math.exp(nats)},
        },
    )
    experience, plain = exact_experience("the paper's"), exact_model()
    # Four tokens, one, seven, two, three, five: large differences that cancel out, and small ones that do not.
    mismatches = [[0.3, -0.3] * 2, [0.11], [0.09] * 7, [-0.12, -0.1], [0.5, -0.1, -0.3], [0.0, 0.0, -0.49, 0, 0]]
    off_M = torch.tensor([each for row in mismatches for each in row], dtype=torch.float64)
    experience.sampler_logprobs_M = experience.old_logprobs_M - off_M
    mask_completions(config, experience)
    assert experience.in_loss_B.tolist() == in_loss
    expected = plain_loss(config, experience, plain)
    expected.backward()
    wanted, packed = gradients_of(plain), copy.deepcopy(exact_model())
    loss, _ = loss_of_step(config, experience, packed)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    result = gradients_of(packed)
    for weight, gradient in wanted.items():
        torch.testing.assert_close(result[weight], gradient, rtol=1e-10, atol=1e-12)


def test_a_sampler_whose_every_completion_is_masked_stops_the_run() -> None:
    """Stale weights are not hidden by the mask; a completion that is masked already stays so."""
    config = _config(
        sampler__vllm={"max_tokens": 64, "cache_gib": 0.1},
        sampler__correction__mask={"level": "geometric", "low": math.exp(-0.1), "high": math.exp(0.1)},
        sampler__max_mismatch=0.3,
    )
    experience = exact_experience("masked")
    experience.sampler_logprobs_M = experience.old_logprobs_M - 0.2
    mask_completions(config, experience)
    assert not bool(experience.in_loss_B.any())
    assert split_minibatches(config, experience, ranks=SINGLE_PROCESS) == []
    experience.sampler_logprobs_M = experience.old_logprobs_M - 0.4
    with pytest.raises(SamplerMismatchError, match=r"0\.4 nats per token"):
        mask_completions(config, experience)
    masked = exact_experience("masked")
    masked.sampler_logprobs_M = masked.old_logprobs_M
    mask_completions(config, masked)
    assert masked.in_loss_B.tolist() == [True, False, True, True, True, True]


# The optimizer steps --------------------------------------------------------------------------------------------------


class _RecordingPolicy(Policy):
    """Records the gradient of each step, and the tokens that went through the model each time."""

    def __init__(self, checkpoint: Checkpoint, config: TrainGRPOConfig) -> None:
        scorer = LogprobModel(checkpoint.model, temperature=config.sampling.temperature)
        super().__init__(scorer, config.engine)
        self.model = checkpoint.model
        self.gradients: list[dict[str, Tensor]] = []
        self.tokens_seen: list[int] = []
        self.model.get_input_embeddings().register_forward_hook(
            lambda _, arguments, __: self.tokens_seen.append(arguments[0].numel())
        )

    def step(self, learning_rate: float) -> dict[str, float]:
        self.gradients.append(
            {name: weight.grad.clone() for name, weight in self.model.named_parameters() if weight.grad is not None}
        )
        return super().step(learning_rate)


def _sequences(checkpoint: Checkpoint) -> list[TokenSequence]:
    """Return completions of very different lengths of two prompts."""
    prompts = [checkpoint.prompt_ids(tiny.PROBLEMS[number].question) for number in (3, 9)]
    solutions = [checkpoint.examples([tiny.PROBLEMS[number]])[0].completion_ids for number in (0, 4, 9, 1, 3, 12)]
    return [TokenSequence(prompts[number // 3], solution) for number, solution in enumerate(solutions)]


def _drifted(checkpoint: Checkpoint, amount: float) -> LogprobModel:
    """Return a frozen copy with other weights: a reference that the policy has moved away from."""
    moved = copy.deepcopy(checkpoint.model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(amount * torch.randn(weight.shape, generator=generator))
    return LogprobModel(moved, temperature=1.0).requires_grad_(False)


def _scores(scorer: LogprobModel, sequences: list[TokenSequence]) -> Tensor:
    num_tokens = sum(len(sequence.completion_ids) for sequence in sequences)
    return completion_logprobs(scorer, tiny.batches(sequences, 10_000), num_tokens)


@dataclasses.dataclass
class _Run:
    """One update of the tiny model."""

    config: TrainGRPOConfig
    experience: Experience
    """Its `old_logprobs_M` are known here, for the expected values; `update` computes them anew."""
    policy: _RecordingPolicy
    before: dict[str, Tensor]

    @property
    def minibatches(self) -> list[Minibatch]:
        return split_minibatches(self.config, self.experience, ranks=SINGLE_PROCESS)

    def __call__(
        self, minibatches: Sequence[Minibatch] | None = None, *, old_is_known: bool = False
    ) -> dict[str, float]:
        experience = dataclasses.replace(self.experience)
        if not old_is_known:
            experience.old_logprobs_M = torch.full_like(self.experience.old_logprobs_M, NAN)
        if self.config.loss.kl.coefficient == 0:
            experience.reference_logprobs_M = None
        parts = self.minibatches if minibatches is None else minibatches
        return update(self.config, self.policy, parts, experience, self.config.learning_rate)

    @property
    def changed(self) -> bool:
        """Whether any weight is not what it was."""
        weights = self.policy.model.named_parameters()
        return any(not torch.equal(weight, self.before[name]) for name, weight in weights)

    def num_tokens(self) -> list[list[int]]:
        """Return the tokens of each micro-batch of each minibatch."""
        return [[batch.input_ids_T.numel() for batch in minibatch.shard.batches] for minibatch in self.minibatches]


def _run(config: TrainGRPOConfig, *, name: str = "the paper's", drift: float = 0.02, **changes: Any) -> _Run:
    """Return a run whose sampler is off by a little noise and whose reference has drifted."""
    checkpoint = tiny.checkpoint()
    sequences = _sequences(checkpoint)
    old_M = _scores(LogprobModel(copy.deepcopy(checkpoint.model), temperature=1.0), sequences)
    noise_M = 0.3 * torch.randn(len(old_M), dtype=torch.float64, generator=torch.manual_seed(2))
    experience = _experience(
        sequences,
        name,
        old_logprobs_M=old_M,
        sampler_logprobs_M=old_M + noise_M,
        reference_logprobs_M=_scores(_drifted(checkpoint, drift), sequences),
    )
    before = {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}
    return _Run(config, dataclasses.replace(experience, **changes), _RecordingPolicy(checkpoint, config), before)


def _expected(run: _Run) -> tuple[float, dict[str, Tensor]]:
    """Return the written out loss of the tiny model before any update, and its gradient."""
    model = tiny.checkpoint().model
    loss = plain_loss(run.config, run.experience, model)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def _assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("passes", [1, 3])
def test_old_log_probabilities_cost_no_forward_pass_of_their_own(passes: int) -> None:
    """With one optimizer step per pass every micro-batch goes through the model once per pass, and no more."""
    run = _run(_config(updates_per_rollout=passes, engine__micro_batch_tokens=70))
    run()
    (batches,) = run.num_tokens()
    assert len(batches) > 1
    assert run.policy.tokens_seen == batches * passes


def test_only_later_minibatches_are_scored_beforehand() -> None:
    """The second one before anything changes, and only in the first pass; neither if that is known already."""
    run = _run(_config(minibatches_per_rollout=2, updates_per_rollout=2))
    run()
    first, second = run.num_tokens()
    assert run.policy.tokens_seen == second + (first + second) * 2
    assert len(run.policy.gradients) == 4
    known, unknown = (_run(_config(minibatches_per_rollout=2)) for _ in range(2))
    ratio_max = known(old_is_known=True)["ratio_max"]
    assert known.policy.tokens_seen == first + second
    assert ratio_max == pytest.approx(unknown()["ratio_max"], rel=1e-5)


def _ratios(config: TrainGRPOConfig, minibatches: slice, *, drift: float) -> Tensor:
    """Return the ratios of all tokens after one optimizer step on some of the minibatches, from fresh scores."""
    run = _run(config, drift=drift)
    run(run.minibatches[minibatches])
    after_M = _scores(LogprobModel(copy.deepcopy(run.policy.model), temperature=1.0), run.experience.sequences_B)
    return (after_M - run.experience.old_logprobs_M).exp()


def test_a_second_pass_is_compared_with_the_policy_that_sampled() -> None:
    """After one large step the ratios have moved and some are clipped; the old log-probabilities stay."""
    figures = _run(_config(updates_per_rollout=2, learning_rate=3e-2), drift=0.0)()
    ratio_M = _ratios(_config(learning_rate=3e-2), slice(None), drift=0.0)
    assert figures["ratio_min"] == pytest.approx(float(ratio_M.min()), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(float(ratio_M.max()), rel=1e-4)
    assert 0 < figures["clip_high_fraction"] < 1
    assert 0 < figures["clip_low_fraction"] < 1
    # The policy that sampled is the reference here, and the figures are those of the second pass alone.
    assert figures["kl"] == pytest.approx(float((1 / ratio_M + ratio_M.log() - 1).mean()), rel=1e-3)


def test_a_second_minibatch_is_compared_with_the_policy_that_sampled() -> None:
    """Its ratios have moved by the step on the first minibatch; those of the first are one."""
    config = _config(minibatches_per_rollout=2, learning_rate=3e-2)
    run = _run(config)
    figures = run()
    ratio_M = _ratios(config, slice(1), drift=0.02)[sum(run.experience.num_tokens_B[:3]) :]
    assert figures["ratio_min"] == pytest.approx(min(1.0, float(ratio_M.min())), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(max(1.0, float(ratio_M.max())), rel=1e-4)
    assert figures["ratio_max"] > 1.01


def test_each_minibatch_is_averaged_over_itself() -> None:
    """The gradient of the first step is that of an objective over the first group alone."""
    run = _run(_config(minibatches_per_rollout=2))
    run()
    of_first = sum(run.experience.num_tokens_B[:3])
    fields = {field.name: getattr(run.experience, field.name) for field in dataclasses.fields(Experience)}
    first: dict[str, Any] = {
        name: value if value is None else value[: 3 if name.endswith("_B") else of_first]
        for name, value in fields.items()
    }
    _assert_same(run.policy.gradients[0], _expected(dataclasses.replace(run, experience=Experience(**first)))[1])


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    """One bad advantage among good ones raises, and no weight has changed."""
    run = _run(_config())
    run.experience.advantages_M[3] = bad
    with pytest.raises(NonFiniteError, match="stopped before the optimizer step"):
        run()
    assert not run.changed


@pytest.mark.parametrize(("shift", "stops"), [(0.9, True), (NAN, True), (0.1, False)])
def test_a_sampler_of_another_policy_stops_before_the_step(shift: float, stops: bool) -> None:
    """A mean mismatch above the bound, or one that is not a number, and no weight has changed."""
    run = _run(_config(sampler__max_mismatch=0.5))
    run.experience.sampler_logprobs_M[:] += shift
    if not stops:
        run()
        return
    with pytest.raises(SamplerMismatchError, match=r"sampler\.max_mismatch = 0\.5"):
        run()
    assert not run.changed
    assert run.policy.gradients == []


def _some_zero(checkpoint: Checkpoint) -> Tensor:
    """Return advantages of which those of two completions are zero."""
    advantages_B = torch.tensor([0.0, 0.58, -1.73, 1.0, 0.0, 0.3], dtype=torch.float64)
    lengths = [len(sequence.completion_ids) for sequence in _sequences(checkpoint)]
    return advantages_B.repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_completions_of_zero_advantage_are_left_out_and_still_divided_by(aggregation: str) -> None:
    """Without a KL term a zero advantage is no work; loss and gradient are those of computing it."""
    config = _config(**NO_KL, loss__aggregation=aggregation, engine__micro_batch_tokens=1)
    run, full = (_run(config, advantages_M=_some_zero(tiny.checkpoint())) for _ in range(2))
    figures = run()
    lengths = [len(run.experience.sequences_B[number]) for number in (1, 2, 3, 5)]
    assert sorted(run.policy.tokens_seen) == sorted(lengths)
    (minibatch,) = full.minibatches
    everything = full([Minibatch(Shard(tiny.batches(full.experience.sequences_B, 1), []), minibatch.weights_B)])
    assert len(full.policy.tokens_seen) == 6
    assert figures["loss"] == pytest.approx(everything["loss"], rel=1e-6)
    loss, gradients = _expected(run)
    assert figures["loss"] == pytest.approx(loss, rel=1e-4)
    for each in (run, full):
        _assert_same(each.policy.gradients[0], gradients)


def test_completions_of_zero_advantage_are_computed_where_they_count() -> None:
    """The KL term acts on every token, whatever its advantage."""
    config = _config(engine__micro_batch_tokens=1)
    run = _run(config, advantages_M=_some_zero(tiny.checkpoint()))
    run()
    assert len(run.policy.tokens_seen) == 6
    _assert_same(run.policy.gradients[0], _expected(run)[1])


def test_one_token_with_an_advantage_keeps_its_completion() -> None:
    """Under process supervision most tokens' advantages may be zero, and the completion still teaches."""
    advantages_M = torch.zeros_like(_some_zero(tiny.checkpoint()))
    advantages_M[-1] = 1.0
    run = _run(_config(**NO_KL), advantages_M=advantages_M)
    run()
    assert run.policy.tokens_seen == [len(run.experience.sequences_B[-1])]
    _assert_same(run.policy.gradients[0], _expected(run)[1])


@pytest.mark.parametrize(("masked", "changes"), [(False, NO_KL), (True, {})])
def test_a_rollout_without_a_signal_changes_nothing(masked: bool, changes: dict[str, Any]) -> None:
    """No advantage and no KL in the loss, or everything masked: no forward pass, no step, and metrics that say so."""
    run = _run(_config(**changes))
    if masked:
        run.experience.in_loss_B[:] = False
    else:
        run.experience.advantages_M[:] = 0.0
    figures = run()
    assert not run.changed
    assert not run.policy.tokens_seen
    assert not run.policy.gradients
    assert figures == pytest.approx(figures_without_update(run.config.learning_rate), nan_ok=True)


def test_a_minibatch_without_a_signal_is_skipped() -> None:
    """The others are updated on as if they were alone: one step, and no forward pass beforehand."""
    run = _run(_config(**NO_KL, minibatches_per_rollout=2), advantages_M=_some_zero(tiny.checkpoint()))
    run.experience.advantages_M[: sum(run.experience.num_tokens_B[:3])] = 0.0
    figures = run()
    assert len(run.policy.gradients) == 1
    assert run.policy.tokens_seen == run.num_tokens()[0]
    assert (figures["ratio_min"], figures["ratio_max"]) == (1.0, 1.0)
