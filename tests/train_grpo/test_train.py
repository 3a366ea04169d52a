from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.policy.checkpoint import save
from components.policy.engine import PolicyEngine
from components.policy.logprobs import CompletionScorer
from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, write_problems
from components.train_grpo.train import train
from tests import tiny
from tests.train_grpo.settings import grpo_config


def _undecided() -> list[Problem]:
    """Problems with one question and different solutions: a model fitted to them answers now this, now that."""
    return [tiny.problem(3, id=f"sums/train/{n}", solution=f"#### {answer}") for n, answer in enumerate((6, 6, 8, 9))]


def _fitted(folder: Path, problems: list[Problem], *, steps: int) -> None:
    """Save a tiny model fitted to the solutions."""
    checkpoint = tiny.checkpoint()
    engine = PolicyEngine(CompletionScorer(checkpoint.model, temperature=1.0), tiny.engine_config())
    examples = [checkpoint.example(problem) for problem in problems]
    num_tokens = sum(len(example.completion_ids) for example in examples)
    for _ in range(steps):
        for batch in tiny.batches(examples, 1000):
            engine.accumulate(-engine(batch).logprobs_N.sum() / num_tokens)
        engine.step(1e-2)
    folder.mkdir(parents=True)
    save(checkpoint, folder)


def _run(folder: Path, problems: list[Problem], reference: Path, **changes: Any) -> list[dict[str, Any]]:
    """Run the step function, its outputs in `folder`; return the rows of its curves."""
    outputs = {name: folder / name for name in ("policy", "training", "timings")}
    for path in (folder / "problems", *outputs.values()):
        path.mkdir(parents=True)
    write_problems(folder / "problems", Split.TRAIN, problems)
    train(grpo_config(**changes), problems=folder / "problems", reference=reference, **outputs)
    return [row for _, row in jsonl.read_rows(folder / "training" / "steps.jsonl")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference that is right in half of its samples."""
    folder = tmp_path_factory.mktemp("models") / "reference"
    _fitted(folder, _undecided(), steps=30)
    return folder


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_it_learns_to_give_the_right_answer(tmp_path: Path, reference: Path, zero_stage: int) -> None:
    """From one right answer in two to nearly all, by reward alone, under any ZeRO stage."""
    rows = _run(
        tmp_path,
        [tiny.problem(3)],
        reference,
        num_steps=20,
        prompts_per_step=1,
        group_size=16,
        engine=tiny.engine_config(zero_stage=zero_stage, micro_batch_tokens=10_000).model_dump(),
        learning_rate=3e-3,
    )
    assert 0.2 < rows[0]["accuracy"] < 0.8
    assert sum(row["accuracy"] for row in rows[-3:]) / 3 > 0.9
    first = rows[0]
    assert (first["kl"], first["ratio_min"], first["ratio_max"]) == (0.0, 1.0, 1.0)
    assert rows[-1]["kl"] > 0


def test_equal_runs_are_equal_to_the_byte(tmp_path: Path, reference: Path) -> None:
    """Policy, curves and kept completions have the same digests; only the timings may differ."""
    for name in ("one", "two"):
        _run(tmp_path / name, tiny.PROBLEMS, reference, updates_per_rollout=2)
    for output in ("policy", "training"):
        assert lineage.digest(tmp_path / "one" / output) == lineage.digest(tmp_path / "two" / output)


def test_it_writes_a_policy_a_row_per_step_and_completions(tmp_path: Path, reference: Path) -> None:
    """The policy loads, differs from the reference, and every step left its figures and completions."""
    rows = _run(tmp_path, tiny.PROBLEMS, reference, learning_rate=1e-2)
    assert [row["step"] for row in rows] == [1, 2, 3]
    kept = [row for _, row in jsonl.read_rows(tmp_path / "training" / "completions.jsonl")]
    assert [row["step"] for row in kept] == [1, 1, 2, 2, 3, 3]
    timings = [row for _, row in jsonl.read_rows(tmp_path / "timings" / "timings.jsonl")]
    assert all(row["sampling_s"] > 0 and row["update_s"] > 0 for row in timings)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (reference, tmp_path / "policy"))
    assert any(not torch.equal(one, other) for one, other in zip(before.parameters(), after.parameters(), strict=True))


def test_too_few_problems_for_a_step_is_an_error(tmp_path: Path, reference: Path) -> None:
    """It says how many were asked for and how many there are."""
    with pytest.raises(PipelineError, match="prompts_per_step is 3, but there are only 2 problems"):
        _run(tmp_path, tiny.PROBLEMS[:2], reference)
