from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from components.grading.verifier import Reason, Verdict, Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.rollout import decoding
from components.rollout.cache import GroupCache
from components.rollout.decoding import inverse_cdf
from components.rollout.sampler import Completion, Sampling, Turn, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.answer_policy import AnswerPolicy
from components.shared.tools import NEXT_ANSWER
from tests import tiny
from tests.policy import plain

QUESTIONS = [*(problem.question for problem in tiny.PROBLEMS[:5]), "Tom has 3?"]


def _generate(checkpoint: Checkpoint, max_batch_size: int, **settings: Any) -> list[Completion]:
    """The completions of all questions, one group after the other."""
    sampling = Sampling(**{"num_samples": 4, "temperature": 1.0, "max_new_tokens": 80, "seed": 1, **settings})
    groups = TransformersSampler(checkpoint, max_batch_size).generate(tiny.asked(QUESTIONS), sampling)
    return [completion for group in groups for completion in group]


def _sharp(checkpoint: Checkpoint, factor: float = 2.0, *, end_every: int | None = None) -> Checkpoint:
    """Make an untrained model less uniform; with `end_every`, each so manieth token ends a completion."""
    with torch.no_grad():
        for weight in checkpoint.model.parameters():
            weight.mul_(factor)
    if end_every:
        checkpoint.model.generation_config.eos_token_id = list(range(1, checkpoint.model.config.vocab_size, end_every))
    return checkpoint


def test_a_completion_ends_where_the_context_does() -> None:
    """Prompt and completion together have as many tokens as the model can read."""
    checkpoint = tiny.checkpoint()
    checkpoint.model.generation_config.eos_token_id = []
    checkpoint.model.config.max_position_embeddings = 16
    sampling = Sampling(num_samples=2, temperature=1.0, max_new_tokens=40, seed=1)
    groups = TransformersSampler(checkpoint, 8).generate(tiny.PROBLEMS[:2], sampling)
    for each in (each for group in groups for each in group):
        assert len(each.tokens.prompt_ids) + each.num_tokens == 16


@pytest.mark.parametrize("max_batch_size", [2, 64])
def test_greedy_decoding_is_that_of_transformers(max_batch_size: int) -> None:
    """Token for token what `generate` returns for each prompt alone, past the first capacity of the cache; in order."""
    checkpoint, plain = _sharp(tiny.checkpoint(), end_every=50), _sharp(tiny.checkpoint(), end_every=50)
    completions = _generate(checkpoint, max_batch_size, num_samples=1, temperature=0.0)
    for question, completion in zip(QUESTIONS, completions, strict=True):
        ids = torch.tensor([plain.prompt_ids(question)])
        greedy = {"do_sample": False, "max_new_tokens": 80, "pad_token_id": 0}
        expected = plain.model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert [*completion.tokens.prompt_ids, *completion.tokens.completion_ids] == expected[0].tolist()
    lengths = [completion.num_tokens for completion in completions]
    assert min(lengths) < 64 < max(lengths), "a completion has to outgrow the first capacity"


def test_no_more_completions_are_decoded_at_once_than_allowed() -> None:
    """At most nine: groups of four are decoded by twos, and a group that alone is larger by itself."""
    checkpoint, rows = tiny.checkpoint(), []
    checkpoint.model.get_decoder().register_forward_pre_hook(
        lambda _layer, _args, inputs: rows.append(len(inputs["layout"].numbers)), with_kwargs=True
    )
    for num_samples, largest in ((4, 8), (10, 10)):
        rows.clear()
        _generate(checkpoint, 9, num_samples=num_samples, max_new_tokens=2)
        assert max(rows) == largest


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.3)])
def test_recorded_logprobs_are_those_of_the_trainer(dtype: torch.dtype, largest: float, temperature: float) -> None:
    """For the same tokens at the same temperature, while completions end in any order."""
    checkpoint = _sharp(tiny.checkpoint(dtype=dtype), 1.5, end_every=30)
    completions = _generate(checkpoint, 64, temperature=temperature)
    lengths = [len(completion.tokens.completion_ids) for completion in completions]
    assert lengths == [len(completion.logprobs) for completion in completions]
    assert len(set(lengths)) > 5
    scorer = LogprobModel(checkpoint.model, temperature=temperature)
    scored_M = plain.logprobs(scorer, [completion.tokens for completion in completions])
    recorded_M = torch.tensor([logprob for completion in completions for logprob in completion.logprobs]).double()
    assert float((scored_M - recorded_M).abs().max()) < largest


@pytest.mark.parametrize("end_every", [None, 10])
def test_a_completion_ends_with_its_first_end_token(end_every: int | None) -> None:
    """Any of the model's end tokens, also one that pads, is part of the completion but not of its text."""
    checkpoint = _sharp(tiny.checkpoint(), 1.0, end_every=end_every)
    checkpoint.tokenizer.pad_token = checkpoint.tokenizer.eos_token
    ends = set(checkpoint.end_ids)
    completions = _generate(checkpoint, 64, num_samples=16, temperature=3.0, max_new_tokens=60)
    assert {completion.finished for completion in completions} == ({True, False} if end_every is None else {True})
    assert len({each.tokens.completion_ids[-1] for each in completions if each.finished}) > (3 if end_every else 0)
    for completion in completions:
        ids = completion.tokens.completion_ids
        assert not ends & set(ids[:-1])
        assert completion.finished == (ids[-1] in ends)
        assert completion.finished or len(ids) == 60
        assert completion.text == checkpoint.decode(ids[:-1] if completion.finished else ids)


def test_prompts_are_dropped_once_half_of_them_are_needed() -> None:
    """The memory of prompts whose completions have all ended is freed."""
    cache = GroupCache([3, 1, 5, 2], 2, torch.device("cpu"))
    x_THD = torch.ones(11, 1, 4)
    cache.attend(0, x_THD, x_THD, x_THD, 1.0)
    cache.begin_call(range(8), [1] * 8)
    cache.attend(0, x_THD[:8], x_THD[:8], x_THD[:8], 1.0)
    for ended, num_prompts in (([2, 3], 4), ([0, 1], 2), ([4, 5, 6, 7], 0)):
        cache.drop(torch.isin(torch.tensor(cache.numbers), torch.tensor(ended)))
        assert {len(each) for each in (*cache._prompt_keys, *cache._prompt_values)} == {num_prompts}


@pytest.mark.parametrize("size", [1, 151, 5000])
def test_inverse_cdf_at_any_size(size: int) -> None:
    """It is the first index whose cumulative weight exceeds the number's share, and never one without weight."""
    generator = torch.Generator().manual_seed(1)
    weights_RV = torch.rand(300, size, generator=generator) * (torch.rand(300, size, generator=generator) < 0.7)
    weights_RV[:, size // 2] += 0.1
    stops_RV = weights_RV.double().cumsum(-1)
    uniform_R = torch.rand(300, dtype=torch.float64, generator=generator)
    expected_R = torch.searchsorted(stops_RV, uniform_R[:, None] * stops_RV[:, -1:], right=True).squeeze(1)
    assert torch.equal(inverse_cdf(weights_RV, uniform_R), expected_R)
    for number in (0.0, 1 - 1e-9, 1 - 2**-53):
        token_R = inverse_cdf(weights_RV, torch.full((300,), number, dtype=torch.float64))
        assert bool((weights_RV.gather(1, token_R[:, None]) > 0).all())


def test_sums_by_matrix_product_give_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As computed on GPUs, where torch's own cumsum is not deterministic."""
    generator = torch.Generator().manual_seed(2)
    weights_RV = torch.rand(300, 5000, generator=generator)
    uniform_R = torch.rand(300, dtype=torch.float64, generator=generator)
    expected_R = inverse_cdf(weights_RV, uniform_R)
    monkeypatch.setattr(decoding, "cumulative_sum", decoding.cumulative_sum_by_product)
    assert torch.equal(inverse_cdf(weights_RV, uniform_R), expected_R)


def test_the_ends_of_inverse_cdf_by_hand() -> None:
    """0 takes the first weight that is not zero, and the last number below 1 the last one, whatever is rounded."""
    weights_RV = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0], [1.5 * 2**-53, 0.0, 0.0, 0.75, 0.0]])
    assert inverse_cdf(weights_RV, torch.zeros(2, dtype=torch.float64)).tolist() == [4, 0]
    # In float64 the second row's 0.75 less the weight before it is the same number as the threshold less that weight.
    assert inverse_cdf(weights_RV, torch.full((2,), 1 - 2**-53, dtype=torch.float64)).tolist() == [4, 3]


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    """The grader."""
    with Verifier(num_workers=1) as verifier:
        yield verifier


def test_completions_are_graded_in_order_and_truncated_ones_are_wrong(verify: Verifier) -> None:
    """`#### 12` may have been cut from `#### 129`."""
    texts = ["5+7=12\n#### 12", "#### 12", "#### 9", "5+7=12\n#### 13"]
    completions = [Completion(TokenSequence((1,), (2,)), (-0.5,), text, finished=text != "#### 12") for text in texts]
    problems = [tiny.problem(0, answer=answer) for answer in ("12", "12", "9", "12")]
    grades = grade_completions(verify, problems, completions, AnswerPolicy.DECLARED)
    assert [grade.verdict for grade in grades] == [Verdict.RIGHT, Verdict.WRONG, Verdict.RIGHT, Verdict.WRONG]
    assert [grade.extracted for grade in grades] == ["12", None, "9", "13"]
    assert "truncated" in grades[1].reason
    with pytest.raises(ValueError, match="zip"):
        grade_completions(verify, problems[:1], completions, AnswerPolicy.DECLARED)


def test_what_an_environment_failed_in_is_unscorable_whatever_its_text(verify: Verifier) -> None:
    """With the failure as its detail, and not truncated; the last turn of another one is graded alone."""
    tokens, turns = TokenSequence((1,), (2,)), (Turn(1, "#### 9", f"no{NEXT_ANSWER}so"), Turn(2, "#### 12"))
    failed = Completion(tokens, (-0.5,), "#### 12", finished=True, turns=turns, failure="no answer within 10 s")
    again = Completion(tokens, (-0.5,), "#### 9 no #### 12", finished=True, turns=turns)
    cut = Completion(tokens, (-0.5,), "#### 9 no #### 12", finished=False, turns=turns)
    problems = [tiny.problem(0, answer="12")] * 3
    grades = grade_completions(verify, problems, [failed, again, cut], AnswerPolicy.DECLARED)
    assert [grade.verdict for grade in grades] == [Verdict.UNSCORABLE, Verdict.RIGHT, Verdict.WRONG]
    assert [each.truncated for each in (failed, again, cut)] == [False, False, True]
    assert (grades[0].reason, grades[0].detail) == (Reason.ENVIRONMENT, "no answer within 10 s")
    bare = replace(again, text="#### 12", turns=turns[1:])
    assert [each.is_worked(AnswerPolicy.DECLARED) for each in (again, bare)] == [True, False]
    unanswered = replace(again, turns=(*turns, Turn(3, "so")))
    assert not unanswered.is_worked(AnswerPolicy.DECLARED)
    assert again.turn_records() == [
        {"text": "#### 9", "observation": "no\nso", "rewards": {}},
        {"text": "#### 12", "observation": "", "rewards": {}},
    ]
