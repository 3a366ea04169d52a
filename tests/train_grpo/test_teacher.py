"""A teacher: what its student learns from it, and which models can be one."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint, save
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import PipelineError
from components.train_grpo.worker import build_trainer
from tests import chat_model, tiny
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
