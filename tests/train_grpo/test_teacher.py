"""A teacher: what its student learns from it, and which models can be one."""

import copy
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import PreTrainedModel

from components.grading.verifier import Verifier
from components.policy import logprobs
from components.policy.checkpoint import Checkpoint, save
from components.policy.logprobs import LogprobModel, TeacherTerm
from components.policy.packing import TokenSequence
from components.policy.padded import use_padded_rows
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import PipelineError
from components.train_grpo.worker import build_trainer
from tests import chat_model, tiny
from tests.policy import plain
from tests.train_grpo.settings import grpo_config


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The folder of another model with the tokenizer of the student."""
    (tmp_path / "teacher").mkdir()
    save(tiny.checkpoint(seed=7), tmp_path / "teacher")
    return tmp_path / "teacher"


def _distilled(teacher: Path, student: Checkpoint, num_steps: int) -> list[float]:
    """Learn from the teacher alone; return the divergence from it at each step."""
    config = grpo_config(
        num_steps=num_steps,
        warmup_steps=0,
        prompts_per_step=8,
        group_size=16,
        sampling__max_batch_size=128,
        learning_rate=3e-3,
        reward__weights={"accuracy": 0.0},
        loss__kl__coefficient=0.0,
        teacher={"base": str(teacher), "coefficient": 1.0},
    )
    with Verifier() as verify:
        sampler = TransformersSampler(student, config.sampling.max_batch_size)
        trainer = build_trainer(config, student, tiny.PROBLEMS, verify, sampler)
        trainer.run(steps_done=0, after_step=lambda step: None)
    return [float(row["teacher_kl"] or 0.0) for row in trainer.history.curves]


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_the_divergence_and_its_gradient_are_those_of_whole_distributions(
    monkeypatch: pytest.MonkeyPatch, padded: bool, chunk_tokens: int
) -> None:
    """In float64, beside a loss of the tokens, at the temperature of sampling; the teacher has no gradient."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "_MIN_CHUNK_TOKENS", chunk_tokens)
    student, teacher = plain.gpt2(), plain.gpt2()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    given, written_out = plain.sequences(), copy.deepcopy(student)
    weights_M = torch.rand(sum(each.num_sampled for each in given), dtype=torch.float64)
    expected = _written_out(written_out, teacher, given, weights_M)
    expected.sum().backward()
    if padded:
        student, teacher = use_padded_rows(student, "tried"), use_padded_rows(teacher, "tried")
    model, frozen = LogprobModel(student, temperature=0.7), LogprobModel(teacher, temperature=0.7).requires_grad_(False)
    kl_M, total = torch.full_like(weights_M, torch.nan), torch.zeros((), dtype=torch.float64)
    for batch in tiny.batches(given, 40, padded=padded):
        term = TeacherTerm(frozen, weights_M[batch.token_N])
        loss = model(batch, lambda scores, _: 0.5 * scores.logprobs_N.sum(), term=term)
        loss.backward()
        assert term.kl_N is not None
        kl_M[batch.token_N] = term.kl_N
        total += loss.detach()
    torch.testing.assert_close(total, expected.sum().detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((weights_M * kl_M).sum(), expected[1].detach(), rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(student.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def _written_out(
    student: PreTrainedModel, teacher: PreTrainedModel, given: Sequence[TokenSequence], weights_M: torch.Tensor
) -> torch.Tensor:
    """Half the sum of the log-probabilities, and the weighted sum of the divergences."""
    parts, start = torch.zeros(2, dtype=torch.float64), 0
    for each in given:
        ids = torch.tensor([(*each.prompt_ids, *each.completion_ids)])
        places = slice(len(each.prompt_ids) - 1, -1)
        logits = [model(input_ids=ids, use_cache=False).logits[0, places] / 0.7 for model in (student, teacher)]
        own_SV, other_SV = (each.log_softmax(-1) for each in logits)
        chosen_S = own_SV.gather(1, torch.tensor(each.completion_ids)[:, None])
        kl_S = (own_SV.exp() * (own_SV - other_SV.detach())).sum(-1)
        stop = start + len(kl_S)
        parts = parts + torch.stack([0.5 * chosen_S.sum(), (weights_M[start:stop] * kl_S).sum()])
        start = stop
    return parts


def test_a_student_comes_closer_to_its_teacher_without_any_reward(teacher: Path) -> None:
    """Every token teaches, though all rewards of a group are equal; its own copy has nothing to teach it."""
    divergence = _distilled(teacher, tiny.checkpoint(), num_steps=16)
    assert divergence[0] > 0.05
    assert fmean(divergence[-4:]) < 0.7 * fmean(divergence[:2])
    save(student := tiny.checkpoint(), teacher)
    before = student.model.get_output_embeddings().weight.detach().clone()
    assert _distilled(teacher, student, num_steps=2) == pytest.approx([0.0, 0.0], abs=1e-6)
    torch.testing.assert_close(student.model.get_output_embeddings().weight.detach(), before, rtol=0, atol=1e-5)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its probabilities are of other tokens."""
    other = chat_model.write(tmp_path / "other")
    with pytest.raises(PipelineError, match=r"train_grpo\.teacher\.base: \S+ has another tokenizer than the policy"):
        _distilled(other, tiny.checkpoint(), num_steps=1)
