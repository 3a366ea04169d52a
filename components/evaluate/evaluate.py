"""Evaluation of a model on the test problems: greedy and sampled answers, their grades and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.evaluate.config import EvaluateConfig
from components.evaluate.scores import scores
from components.grading.verifier import Grade, Verifier, has_reasoning
from components.policy.checkpoint import load
from components.policy.determinism import make_deterministic
from components.rollout.sampler import Completion, Generate, Sampling, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import Progress, progress
from components.shared.stage import Stage


@dataclass(frozen=True)
class Evaluator:
    """Answers problems with a sampler, and grades the answers."""

    config: EvaluateConfig
    generate: Generate
    verify: Verifier
    policy: AnswerPolicy

    def __call__(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """Return the records of all problems: for each its greedy answer, then the sampled ones."""
        num_samples = self.config.num_samples
        with progress(STAGE.name, len(problems) * (1 + num_samples)) as bar:
            greedy = self._decode(problems, bar, num_samples=1, temperature=0.0)
            sampled: list[list[dict[str, Any]]] = [[] for _ in problems]
            if num_samples:
                sampled = self._decode(problems, bar, num_samples=num_samples, temperature=self.config.temperature)
        return [record for first, others in zip(greedy, sampled, strict=True) for record in (*first, *others)]

    def _decode(
        self, problems: Sequence[Problem], bar: Progress, *, num_samples: int, temperature: float
    ) -> list[list[dict[str, Any]]]:
        """Answer all problems in one way of decoding, a batch at a time so that the progress bar moves.

        Short questions go first: a batch takes as long as its longest one.
        """
        config = self.config
        keys = {"max_batch_size": config.max_batch_size, "max_new_tokens": config.max_new_tokens}
        remedies = [f"lower {STAGE.name}.{key} (it is {value})" for key, value in keys.items()]
        order = sorted(range(len(problems)), key=lambda index: (len(problems[index].question), index))
        size = max(1, config.max_batch_size // num_samples)
        records: dict[int, list[dict[str, Any]]] = {}
        num_right = 0
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            sampling = Sampling(
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=config.seed + len(records),
            )
            with explain_out_of_memory(f"answers to {len(batch)} problems at once", *remedies):
                groups = self.generate([problems[index].question for index in batch], sampling)
            graded = self._records([problems[index] for index in batch], groups, first=0 if temperature == 0 else 1)
            records |= zip(batch, graded, strict=True)
            num_right += sum(record["verdict"] == "right" for group in graded for record in group)
            num_tokens = sum(record["num_tokens"] for group in graded for record in group)
            bar.advance(
                len(batch) * num_samples,
                decoding="greedy" if temperature == 0 else f"T={temperature:g}",
                accuracy=num_right / (len(records) * num_samples),
                length=num_tokens / (len(batch) * num_samples),
                tokens_per_s=bar.rate(num_tokens),
            )
        return [records[index] for index in range(len(problems))]

    def _records(
        self, problems: Sequence[Problem], groups: Sequence[Sequence[Completion]], *, first: int
    ) -> list[list[dict[str, Any]]]:
        """The records of the completions of some problems, whose samples are numbered from `first`."""
        golds = [problem.answer for problem, group in zip(problems, groups, strict=True) for _ in group]
        completions = [completion for group in groups for completion in group]
        grades = iter(grade_completions(self.verify, golds, completions, self.policy))
        return [
            [self._record(problem, sample, each, next(grades)) for sample, each in enumerate(group, first)]
            for problem, group in zip(problems, groups, strict=True)
        ]

    def _record(self, problem: Problem, sample: int, completion: Completion, grade: Grade) -> dict[str, Any]:
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
            "worked": has_reasoning(completion.text, self.policy),
        }


def evaluate(config: EvaluateConfig, *, model: Path, problems: Path, evaluation: Path) -> dict[str, float]:
    """Let a model answer every test problem, greedily and by sampling, and score the answers."""
    make_deterministic(config.seed)
    # In float32 even if the model was trained in bfloat16: rounding must not cost accuracy.
    with explain_out_of_memory("loading the model in float32", "use a smaller model"):
        checkpoint = load(model, dtype=torch.float32)
    test_problems = read_problems(problems, Split.TEST)
    with Verifier() as verify:
        sampler = TransformersSampler(checkpoint, config.max_batch_size)
        records = Evaluator(config, sampler.generate, verify, checkpoint.config.answer)(test_problems)
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
