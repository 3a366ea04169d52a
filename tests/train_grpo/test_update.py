import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from components.policy.checkpoint import Checkpoint
from components.policy.engine import NonFiniteError, Policy
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import Shard, TokenSequence
from components.policy.parallel import SINGLE_PROCESS
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.experience import Experience
from components.train_grpo.sampler_correction import SamplerMismatchError
from components.train_grpo.tally import Tally
from components.train_grpo.update import Minibatch, TokenData, _loss, minibatches, token_data, update
from tests import tiny
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.written_out import plain_loss, plain_scores

CPU = torch.device("cpu")
ADVANTAGES_B = [0.58, 0.58, -1.73, 1.0, -1.0, 0.3]
GSPO: dict[str, Any] = {"loss__ratio": "sequence", "loss__clip": {"low": 0.03, "high": 0.04, "dual": None}}
VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "no tether": {"loss__kl__coefficient": 0.0},
    "token mean": {"loss__aggregation": "token_mean"},
    "constant": {"loss__aggregation": "constant"},
    "other clips": {"loss__clip": {"low": 0.1, "high": 0.3, "dual": 1.4}},
    "sequence ratio": GSPO,
    "k1": {"loss__kl__estimator": "k1"},
    "k2": {"loss__kl__estimator": "k2"},
    "corrected k3": {"loss__kl__estimator": "k3_corrected"},
    "corrected k3, sequence ratio": {"loss__kl__estimator": "k3_corrected", **GSPO},
    "tether in the reward": {"loss__kl__placement": "reward"},
    "entropy": {"loss__entropy_coefficient": 0.3},
    "importance weights": {"sampler__max_importance_weight": 1.2},
    "steps": {},
    "steps, sequence ratio": GSPO,
    "masked": {},
    "masked, token mean": {"loss__aggregation": "token_mean"},
    "masked, constant": {"loss__aggregation": "constant"},
}


def _config(name: str = "the paper's", **changes: Any) -> TrainGRPOConfig:
    """Two groups of three; a strong tether, so that it shows in the gradient."""
    return grpo_config(
        **{
            "prompts_per_step": 2,
            "group_size": 3,
            "loss__kl__coefficient": 0.5,
            "sampler__max_mismatch": 1.0,
            "engine__zero_stage": 0,
            **VARIANTS[name],
            **changes,
        }
    )


def _given(sequences: list[TokenSequence], name: str = "the paper's") -> Experience:
    """Two groups of three completions with an advantage each, or with one per token, or with one completion masked."""
    lengths = torch.tensor([len(sequence.completion_ids) for sequence in sequences])
    advantages_M = torch.tensor(ADVANTAGES_B, dtype=torch.float64).repeat_interleave(lengths)
    if name.startswith("steps"):
        advantages_M *= torch.linspace(1.5, -0.5, len(advantages_M))
    counted_B = torch.tensor([not (name.startswith("masked") and number == 1) for number in range(6)])
    return Experience(sequences, 3, counted_B, advantages_M, torch.zeros_like(advantages_M))


def _gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    return found


@functools.cache
def _exact_model() -> PreTrainedModel:
    """A transformer that computes everything in float64."""
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


def _exact_data(given: Experience) -> dict[str, Tensor]:
    """Log-probabilities at some distance from the model's own, so that ratios are on either side of the clips."""
    with torch.no_grad():
        own_M = torch.cat([plain_scores(_exact_model(), sequence)[0] for sequence in given.sequences_B])
    generator = torch.manual_seed(9)
    old, sampler, reference = (
        spread * torch.randn(len(own_M), dtype=torch.float64, generator=generator) for spread in (0.4, 0.3, 0.7)
    )
    return {
        "old": own_M + old,
        "sampler": own_M + old + sampler,
        "reference": own_M + reference,
        "advantages": given.advantages_M,
    }


def _of_all_parts(
    config: TrainGRPOConfig, given: Experience, scorer: LogprobModel, data: dict[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one optimizer step, micro-batch by micro-batch, and what is counted on the way."""
    tensors = TokenData(data["advantages"], data["old"], data["sampler"], data["reference"], given.num_tokens_B)
    if config.loss.kl.coefficient == 0:
        tensors = dataclasses.replace(tensors, reference_logprobs_M=None)
    tally = Tally()
    (part,) = minibatches(config, given, CPU, ranks=SINGLE_PROCESS)
    losses = [_loss(config, scorer(batch), batch, part.weights_B, tensors, tally) for batch in part.batches]
    tally.add_step({})
    return torch.stack(losses).sum(), tally.figures()


@pytest.mark.parametrize("max_tokens", [1, 14, 10_000])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_and_its_gradient_are_the_written_out_objectives(name: str, max_tokens: int) -> None:
    """In float64 and off-policy both agree to ten digits, for any split into micro-batches."""
    config, given = _config(name, engine__micro_batch_tokens=max_tokens), _given(EXACT_SEQUENCES, name)
    plain, packed = _exact_model(), copy.deepcopy(_exact_model())
    data = _exact_data(given)
    expected = plain_loss(config, given, plain, data)
    expected.backward()
    loss, figures = _of_all_parts(config, given, LogprobModel(packed, temperature=1.0), data)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    found, wanted = _gradients(packed), _gradients(plain)
    assert found.keys() == wanted.keys()
    for weight, gradient in wanted.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-10, atol=1e-12)
    assert figures["clip_high_fraction"] > 0
    assert figures["clip_low_fraction"] > 0


def test_every_variant_is_another_objective() -> None:
    """No two of them have the same loss here, so that none can be mistaken for another."""
    losses = {}
    for each in VARIANTS:
        given = _given(EXACT_SEQUENCES, each)
        loss, _ = _of_all_parts(
            _config(each), given, LogprobModel(copy.deepcopy(_exact_model()), temperature=1.0), _exact_data(given)
        )
        losses[each] = round(float(loss.detach()), 8)
    # Without a tether in the loss there is none, wherever else it is.
    assert losses["no tether"] == losses.pop("tether in the reward")
    assert len(set(losses.values())) == len(losses)


class _Engine(Policy):
    """The engine, with the gradient of each step kept, and the tokens that went through the model each time."""

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
    """Completions of very different lengths of two prompts."""
    prompts = [checkpoint.prompt_ids(tiny.PROBLEMS[number].question) for number in (3, 9)]
    solutions = [checkpoint.example(tiny.PROBLEMS[number]).completion_ids for number in (0, 4, 9, 1, 3, 12)]
    return [TokenSequence(prompts[number // 3], solution) for number, solution in enumerate(solutions)]


def _drifted(checkpoint: Checkpoint, amount: float) -> LogprobModel:
    """A frozen copy with other weights: a reference that the policy has moved away from."""
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
    given: Experience
    engine: _Engine
    before: dict[str, Tensor]
    data: dict[str, Tensor]
    parts: list[Minibatch]

    def __call__(self, parts: list[Minibatch] | None = None, *, old: Tensor | None = None) -> dict[str, float]:
        reference = self.data["reference"] if self.config.loss.kl.coefficient else None
        data = token_data(self.given, old_logprobs_M=old, reference_logprobs_M=reference, device=CPU)
        learning_rate = self.config.learning_rate
        return update(self.config, self.engine, self.parts if parts is None else parts, data, learning_rate)

    @property
    def changed(self) -> bool:
        """Whether any weight is not what it was."""
        weights = self.engine.model.named_parameters()
        return any(not torch.equal(weight, self.before[name]) for name, weight in weights)


def _run(config: TrainGRPOConfig, *, name: str = "the paper's", drift: float = 0.02, **changes: Any) -> _Run:
    """A run whose sampler is off by a little noise and whose reference has drifted; `changes` to what is given."""
    checkpoint = tiny.checkpoint()
    sequences = _sequences(checkpoint)
    own_M = _scores(LogprobModel(copy.deepcopy(checkpoint.model), temperature=1.0), sequences)
    noise_M = 0.3 * torch.randn(len(own_M), dtype=torch.float64, generator=torch.manual_seed(2))
    given = dataclasses.replace(_given(sequences, name), sampler_logprobs_M=own_M + noise_M, **changes)
    data = {
        "old": own_M,
        "sampler": given.sampler_logprobs_M,
        "reference": _scores(_drifted(checkpoint, drift), sequences),
        "advantages": given.advantages_M,
    }
    before = {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}
    return _Run(
        config, given, _Engine(checkpoint, config), before, data, minibatches(config, given, CPU, ranks=SINGLE_PROCESS)
    )


def _expected(run: _Run) -> tuple[float, dict[str, Tensor]]:
    """The written out loss of the tiny model before any update, and its gradient."""
    model = tiny.checkpoint().model
    loss = plain_loss(run.config, run.given, model, run.data)
    loss.backward()
    return float(loss.detach()), _gradients(model)


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("max_tokens", [1, 70, 100_000])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_of_a_step_is_that_of_the_written_out_objective(name: str, max_tokens: int) -> None:
    """For any split into micro-batches, at the first update; its ratios are exactly one and nothing is clipped."""
    run = _run(_config(name, engine__micro_batch_tokens=max_tokens), name=name)
    figures = run()
    loss, gradients = _expected(run)
    assert figures["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    (found,) = run.engine.gradients
    _assert_same(found, gradients)
    assert (figures["ratio_min"], figures["ratio_max"]) == (1.0, 1.0)
    assert (figures["clip_high_fraction"], figures["clip_low_fraction"]) == (0.0, 0.0)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert figures["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert run.changed


def test_the_figures_of_an_update_are_means_over_its_tokens() -> None:
    """Entropy, divergence and mismatch of the sampler equal those computed token by token."""
    run = _run(_config())
    figures = run()
    model = tiny.checkpoint().model
    with torch.no_grad():
        scores = [plain_scores(model, sequence) for sequence in run.given.sequences_B]
    logprobs_M, entropy_M = (torch.cat(each) for each in zip(*scores, strict=True))
    x_M = run.data["reference"] - logprobs_M
    mismatch_M = (logprobs_M - run.data["sampler"]).abs()
    assert figures["entropy"] == pytest.approx(float(entropy_M.mean()), rel=1e-4)
    assert figures["kl"] == pytest.approx(float((x_M.exp() - x_M - 1).mean()), rel=1e-3)
    assert figures["sampler_mismatch"] == pytest.approx(float(mismatch_M.mean()), rel=1e-3)
    assert figures["sampler_mismatch_max"] == pytest.approx(float(mismatch_M.max()), rel=1e-3)
    assert figures["learning_rate"] == run.config.learning_rate


def test_the_first_update_is_exactly_on_policy() -> None:
    """The ratio is 1 to the last bit and nothing is clipped; KL to an equal reference, scored apart, is rounding."""
    figures = _run(_config(), drift=0.0)()
    assert (figures["ratio_min"], figures["ratio_max"]) == (1.0, 1.0)
    assert figures["kl"] == pytest.approx(0.0, abs=1e-12)
    assert figures["clip_high_fraction"] == figures["clip_low_fraction"] == 0.0
    assert figures["gradient_norm"] > 0


def _num_tokens(part: Minibatch) -> list[int]:
    return [batch.input_ids_T.numel() for batch in part.batches]


@pytest.mark.parametrize("passes", [1, 3])
def test_old_log_probabilities_cost_no_forward_of_their_own(passes: int) -> None:
    """With one optimizer step per pass every micro-batch goes through the model once per pass, and no more."""
    run = _run(_config(updates_per_rollout=passes, engine__micro_batch_tokens=70))
    run()
    (part,) = run.parts
    assert len(part.batches) > 1
    assert run.engine.tokens_seen == _num_tokens(part) * passes


@pytest.mark.parametrize("passes", [1, 2])
def test_only_later_minibatches_are_scored_beforehand(passes: int) -> None:
    """The second one before anything changes, and only in the first pass; then both in turn."""
    run = _run(_config(minibatches_per_rollout=2, updates_per_rollout=passes))
    run()
    first, second = map(_num_tokens, run.parts)
    assert run.engine.tokens_seen == second + (first + second) * passes
    assert len(run.engine.gradients) == 2 * passes


def test_what_is_known_already_is_not_scored_again() -> None:
    """Log-probabilities that were needed before, as for a penalty in the reward, save the forward."""
    run = _run(_config(minibatches_per_rollout=2))
    figures = run(old=run.data["old"])
    first, second = map(_num_tokens, run.parts)
    assert run.engine.tokens_seen == first + second
    again = _run(_config(minibatches_per_rollout=2))()
    assert figures["ratio_max"] == pytest.approx(again["ratio_max"], rel=1e-5)


def _ratios(config: TrainGRPOConfig, parts: slice, *, drift: float) -> Tensor:
    """The ratios of all tokens after one optimizer step on some of the minibatches, from fresh scores on both sides."""
    run = _run(config, drift=drift)
    run(run.parts[parts])
    after_M = _scores(LogprobModel(copy.deepcopy(run.engine.model), temperature=1.0), run.given.sequences_B)
    return (after_M - run.data["old"]).exp()


def test_a_second_pass_is_measured_against_the_policy_that_sampled() -> None:
    """After one large step the ratios have moved and some are clipped; the sampled log-probabilities stay put."""
    figures = _run(_config(updates_per_rollout=2, learning_rate=3e-2), drift=0.0)()
    ratio_M = _ratios(_config(learning_rate=3e-2), slice(None), drift=0.0)
    assert figures["ratio_min"] == pytest.approx(float(ratio_M.min()), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(float(ratio_M.max()), rel=1e-4)
    assert 0 < figures["clip_high_fraction"] < 1
    assert 0 < figures["clip_low_fraction"] < 1
    # The policy that sampled is the reference here, and the figures are those of the second pass alone.
    assert figures["kl"] == pytest.approx(float((1 / ratio_M + ratio_M.log() - 1).mean()), rel=1e-3)


def test_a_second_minibatch_is_measured_against_the_policy_that_sampled() -> None:
    """Its ratios have moved by the step on the first minibatch; those of the first are one."""
    config = _config(minibatches_per_rollout=2, learning_rate=3e-2)
    run = _run(config)
    figures = run()
    of_first = int(run.given.num_tokens_B[:3].sum())
    ratio_M = _ratios(config, slice(1), drift=0.02)[of_first:]
    assert figures["ratio_min"] == pytest.approx(min(1.0, float(ratio_M.min())), rel=1e-4)
    assert figures["ratio_max"] == pytest.approx(max(1.0, float(ratio_M.max())), rel=1e-4)
    assert figures["ratio_max"] > 1.01


def test_each_minibatch_is_averaged_over_itself() -> None:
    """The gradient of the first step is that of an objective over the first group alone."""
    run = _run(_config(minibatches_per_rollout=2))
    run()
    of_first = int(run.given.num_tokens_B[:3].sum())
    alone = dataclasses.replace(
        run,
        given=dataclasses.replace(
            run.given,
            sequences_B=run.given.sequences_B[:3],
            counted_B=run.given.counted_B[:3],
            advantages_M=run.given.advantages_M[:of_first],
        ),
        data={name: values[:of_first] for name, values in run.data.items()},
    )
    _assert_same(run.engine.gradients[0], _expected(alone)[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    """One bad advantage among good ones raises, and no weight has changed."""
    run = _run(_config())
    run.given.advantages_M[3] = bad
    with pytest.raises(NonFiniteError, match="stopped before the optimizer step"):
        run()
    assert not run.changed


@pytest.mark.parametrize("shift", [0.9, math.nan])
def test_a_sampler_of_another_policy_stops_before_the_step(shift: float) -> None:
    """A mean mismatch above the bound, or one that is no number, and no weight has changed."""
    run = _run(_config(sampler__max_mismatch=0.5))
    run.given.sampler_logprobs_M[:] += shift
    with pytest.raises(SamplerMismatchError, match=r"sampler\.max_mismatch = 0\.5"):
        run()
    assert not run.changed
    assert run.engine.gradients == []


WITHOUT: dict[str, Any] = {"loss__kl__coefficient": 0.0, "loss__entropy_coefficient": 0.0}


def _some_zero(checkpoint: Checkpoint) -> Tensor:
    """Advantages of which those of two completions are zero."""
    advantages_B = torch.tensor([0.0, 0.58, -1.73, 1.0, 0.0, 0.3], dtype=torch.float64)
    return advantages_B.repeat_interleave(_given(_sequences(checkpoint)).num_tokens_B)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_completions_that_teach_nothing_are_left_out_and_still_divided_by(aggregation: str) -> None:
    """Without tether and entropy a zero advantage is no work; loss and gradient are those of computing it."""
    config = _config(**WITHOUT, loss__aggregation=aggregation, engine__micro_batch_tokens=1)
    run, whole = (_run(config, advantages_M=_some_zero(tiny.checkpoint())) for _ in range(2))
    figures = run()
    lengths = [len(run.given.sequences_B[number]) for number in (1, 2, 3, 5)]
    assert sorted(run.engine.tokens_seen) == sorted(lengths)
    (part,) = whole.parts
    everything = whole([Minibatch(Shard(tiny.batches(whole.given.sequences_B, 1), []), part.weights_B)])
    assert len(whole.engine.tokens_seen) == 6
    assert figures["loss"] == pytest.approx(everything["loss"], rel=1e-6)
    loss, gradients = _expected(run)
    assert figures["loss"] == pytest.approx(loss, rel=1e-4)
    for each in (run, whole):
        _assert_same(each.engine.gradients[0], gradients)


@pytest.mark.parametrize("changes", [{"loss__kl__coefficient": 0.04}, {**WITHOUT, "loss__entropy_coefficient": 0.1}])
def test_completions_of_zero_advantage_are_computed_where_they_still_count(changes: dict[str, Any]) -> None:
    """Tether and entropy act on every token, whatever its advantage."""
    config = _config(**changes, engine__micro_batch_tokens=1)
    run = _run(config, advantages_M=_some_zero(tiny.checkpoint()))
    run()
    assert len(run.engine.tokens_seen) == 6
    _assert_same(run.engine.gradients[0], _expected(run)[1])


def test_one_token_with_an_advantage_keeps_its_completion() -> None:
    """Under process supervision most tokens' advantages may be zero, and the completion still teaches."""
    checkpoint = tiny.checkpoint()
    advantages_M = torch.zeros_like(_some_zero(checkpoint))
    advantages_M[-1] = 1.0
    run = _run(_config(**WITHOUT), advantages_M=advantages_M)
    run()
    assert run.engine.tokens_seen == [len(run.given.sequences_B[-1])]
    _assert_same(run.engine.gradients[0], _expected(run)[1])


def _all_masked(given: Experience) -> Experience:
    return dataclasses.replace(given, counted_B=torch.zeros(6, dtype=torch.bool))


def _all_level(given: Experience) -> Experience:
    return dataclasses.replace(given, advantages_M=torch.zeros_like(given.advantages_M))


@pytest.mark.parametrize(
    ("emptied", "changes"),
    [(_all_level, WITHOUT), (_all_masked, {}), (_all_level, {"loss__kl__placement": "reward"})],
)
def test_what_teaches_nothing_changes_nothing(
    emptied: Callable[[Experience], Experience], changes: dict[str, Any]
) -> None:
    """No spread without a tether, or everything masked: no forward, no step, and figures that say so."""
    run = _run(_config(**changes))
    run.given = emptied(run.given)
    figures = run(minibatches(run.config, run.given, CPU, ranks=SINGLE_PROCESS))
    assert not run.changed
    assert run.engine.tokens_seen == []
    assert run.engine.gradients == []
    assert figures == Tally.of_nothing(run.config.learning_rate)


def test_a_minibatch_that_teaches_nothing_is_skipped() -> None:
    """The others are updated on as if they were alone: one step, and no forward beforehand."""
    advantages_M = _some_zero(tiny.checkpoint())
    lengths = _given(_sequences(tiny.checkpoint())).num_tokens_B
    advantages_M[: int(lengths[:3].sum())] = 0.0
    run = _run(_config(**WITHOUT, minibatches_per_rollout=2), advantages_M=advantages_M)
    figures = run()
    assert len(run.engine.gradients) == 1
    assert run.engine.tokens_seen == _num_tokens(run.parts[0])
    assert (figures["ratio_min"], figures["ratio_max"]) == (1.0, 1.0)


def test_groups_without_spread_move_the_policy_by_the_tether_alone() -> None:
    """With all advantages zero the gradient is that of the KL term."""
    run = _run(_config())
    run.given = _all_level(run.given)
    run.data["advantages"] = run.given.advantages_M
    figures = run(minibatches(run.config, run.given, CPU, ranks=SINGLE_PROCESS))
    assert figures["loss"] == pytest.approx(run.config.loss.kl.coefficient * _mean_kl(run), rel=1e-3)
    _assert_same(run.engine.gradients[0], _expected(run)[1])


def _mean_kl(run: _Run) -> float:
    """The mean over completions of the mean k3 of each."""
    x_M = run.data["reference"] - run.data["old"]
    each = (x_M.exp() - x_M - 1).split(run.given.num_tokens_B.tolist())
    return float(torch.stack([part.mean() for part in each]).mean())
