"""Examination of a model on the test problems: greedy answers, drawn answers, and what they add up to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.evaluate.config import EvaluateConfig
from components.evaluate.scores import scores
from components.grading.verifier import Grade, Verifier, has_reasoning
from components.policy.checkpoint import load
from components.policy.determinism import make_deterministic
from components.rollout.sampler import Completion, Generate, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import Progress, progress
from components.shared.stage import Stage
from components.shared.system_errors import explain_out_of_memory

_STAGE = "evaluate"


@dataclass(frozen=True)
class _Examination:
    """What answers questions, and what judges the answers."""

    config: EvaluateConfig
    generate: Generate
    verify: Verifier
    policy: AnswerPolicy


def evaluate(config: EvaluateConfig, *, model: Path, problems: Path, evaluation: Path) -> dict[str, float]:
    """Let a model answer every test problem, greedily and by drawing, and score the answers."""
    make_deterministic(config.seed)
    # Half the digits of bfloat16 training are no reason to examine in bfloat16.
    with explain_out_of_memory("loading the model in float32", "use a smaller model"):
        checkpoint = load(model, dtype=torch.float32)
    examined = read_problems(problems, Split.TEST)
    with Verifier() as verify:
        engine = TransformersSampler(checkpoint, config.max_batch_size)
        records = _answers(_Examination(config, engine.generate, verify, checkpoint.config.answer), examined)
    summary = scores(records, num_samples=config.num_samples, temperature=config.temperature)
    jsonl.write_rows(evaluation / "records.jsonl", records)
    jsonl.write_json(evaluation / "scores.json", summary)
    by_source = summary["greedy"]["by_source"]
    return {f"{source}_accuracy": score["accuracy"] for source, score in by_source.items()} | {
        "worked_fraction": summary["worked_fraction"],
        "mean_length_tokens": summary["mean_length_tokens"],
    }


STAGE = Stage(
    name="evaluate",
    function=evaluate,
    config=EvaluateConfig,
    inputs=("model", "problems"),
    outputs=("evaluation",),
)


def _answers(examination: _Examination, problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """The records of all problems: for each its greedy answer, then the drawn ones."""
    num_samples, temperature = examination.config.num_samples, examination.config.temperature
    with progress(_STAGE, len(problems) * (1 + num_samples)) as shown:
        greedy = _sweep(examination, problems, shown, num_samples=1, temperature=0.0)
        drawn: list[list[dict[str, Any]]] = [[] for _ in problems]
        if num_samples:
            drawn = _sweep(examination, problems, shown, num_samples=num_samples, temperature=temperature)
    return [record for first, others in zip(greedy, drawn, strict=True) for record in (*first, *others)]


def _sweep(
    examination: _Examination, problems: Sequence[Problem], shown: Progress, *, num_samples: int, temperature: float
) -> list[list[dict[str, Any]]]:
    """Answer all problems in one manner, a batch at a time so that progress can be seen.

    Short questions go first: a batch is as slow as its longest one.
    """
    config = examination.config
    keys = {"max_batch_size": config.max_batch_size, "max_new_tokens": config.max_new_tokens}
    remedies = [f"lower {_STAGE}.{key} (it is {value})" for key, value in keys.items()]
    order = sorted(range(len(problems)), key=lambda index: (len(problems[index].question), index))
    found: list[list[dict[str, Any]]] = []
    right = 0
    for batch in _batches([problems[index] for index in order], max(1, config.max_batch_size // num_samples)):
        with explain_out_of_memory(f"answers to {len(batch)} problems at once", *remedies):
            groups = examination.generate(
                [problem.question for problem in batch],
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=config.seed + len(found),
            )
        found += _graded(examination, batch, groups, first=0 if temperature == 0 else 1)
        right += sum(record["verdict"] == "right" for records in found[-len(batch) :] for record in records)
        num_tokens = sum(len(completion.tokens.completion_ids) for group in groups for completion in group)
        shown.advance(
            len(batch) * num_samples,
            decoding="greedy" if temperature == 0 else f"T={temperature:g}",
            accuracy=right / (len(found) * num_samples),
            length=num_tokens / (len(batch) * num_samples),
            tokens_per_s=shown.rate(num_tokens),
        )
    return [records for _, records in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _batches(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    for start in range(0, len(problems), size):
        yield problems[start : start + size]


def _graded(
    examination: _Examination, problems: Sequence[Problem], groups: Sequence[Sequence[Completion]], *, first: int
) -> list[list[dict[str, Any]]]:
    """The records of the completions of some problems, whose samples are counted from `first`."""
    policy = examination.policy
    golds = [problem.answer for problem, group in zip(problems, groups, strict=True) for _ in group]
    completions = [completion for group in groups for completion in group]
    grades = iter(grade_completions(examination.verify, golds, completions, policy))
    return [
        [_record(problem, first + index, each, next(grades), policy) for index, each in enumerate(group)]
        for problem, group in zip(problems, groups, strict=True)
    ]


def _record(
    problem: Problem, sample: int, completion: Completion, grade: Grade, policy: AnswerPolicy
) -> dict[str, Any]:
    return {
        "id": problem.id,
        "source": problem.source,
        "subject": problem.subject,
        "level": problem.level,
        "question": problem.question,
        "answer": problem.answer,
        "sample": sample,
        "response": completion.text,
        "extracted": grade.extracted,
        "verdict": grade.verdict,
        "reason": grade.reason,
        "num_tokens": len(completion.tokens.completion_ids),
        "finished": completion.finished,
        "worked": has_reasoning(completion.text, policy),
    }
