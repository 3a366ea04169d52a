"""Evaluation of models on the test problems: greedy and sampled answers, their grades and their scores."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from components.evaluate.config import EvaluateConfig
from components.evaluate.probes import probes
from components.evaluate.scores import scores
from components.grading.flexible import grade_flexibly
from components.grading.verifier import Verifier, has_reasoning
from components.policy.checkpoint import load
from components.policy.training import make_deterministic
from components.rollout.sampler import Completion, Generate, Sampling, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.environment import available_cores
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import Progress, progress
from components.shared.stage import Stage


@dataclass(frozen=True)
class Evaluator:
    """Answers problems with a sampler, and grades the answers."""

    name: str
    """Of the model, beside its progress."""
    config: EvaluateConfig
    generate: Generate
    verify: Verifier
    policy: AnswerPolicy

    def __call__(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """Return the records of all problems: for each its greedy answer, then the sampled ones."""
        num_samples = self.config.num_samples
        with progress(STAGE.name, len(problems) * (1 + num_samples)) as bar:
            records = self._decode(problems, bar, num_samples=1, temperature=0.0)
            if num_samples:
                records += self._decode(problems, bar, num_samples=num_samples, temperature=self.config.temperature)
        order = {problem.id: index for index, problem in enumerate(problems)}
        return sorted(records, key=lambda record: (order[record["id"]], record["sample"]))

    def _decode(
        self, problems: Sequence[Problem], bar: Progress, *, num_samples: int, temperature: float
    ) -> list[dict[str, Any]]:
        """Answer all problems in one way of decoding, a batch at a time so that the progress bar moves.

        Short questions go first: a batch takes as long as its longest one.
        """
        config = self.config
        remedies = [
            f"lower {STAGE.name}.{key} (it is {getattr(config, key)})" for key in ("max_batch_size", "max_new_tokens")
        ]
        ordered = sorted(problems, key=lambda problem: len(problem.question))
        size = max(1, config.max_batch_size // num_samples)
        records: list[dict[str, Any]] = []
        for start in range(0, len(ordered), size):
            batch = ordered[start : start + size]
            sampling = Sampling(
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=config.seed + start,
            )
            with explain_out_of_memory(f"answers to {len(batch)} problems at once", *remedies):
                groups = self.generate([problem.question for problem in batch], sampling)
            graded = self._records(batch, groups, first=0 if temperature == 0 else 1)
            records += graded
            num_tokens = sum(record["num_tokens"] for record in graded)
            bar.advance(
                len(graded),
                model=self.name,
                decoding="greedy" if temperature == 0 else f"T={temperature:g}",
                accuracy=fmean(record["verdict"] == "right" for record in records),
                length=num_tokens / len(graded),
                tokens_per_s=bar.rate(num_tokens),
            )
        return records

    def _records(
        self, problems: Sequence[Problem], groups: Sequence[Sequence[Completion]], *, first: int
    ) -> list[dict[str, Any]]:
        """The records of the completions of some problems, whose samples are numbered from `first`."""
        answered = [
            (problem, sample, completion)
            for problem, group in zip(problems, groups, strict=True)
            for sample, completion in enumerate(group, first)
        ]
        golds, completions = [problem.answer for problem, _, _ in answered], [each for _, _, each in answered]
        grades = grade_completions(self.verify, golds, completions, self.policy)
        flexible = grade_flexibly(self.verify, golds, [each.text for each in completions], grades, self.policy)
        return [
            {
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
                "flexible": {"extracted": loose.extracted, "verdict": loose.verdict},
                "num_steps": problem.num_steps,
                "num_tokens": completion.num_tokens,
                "finished": completion.finished,
                "worked": has_reasoning(completion.text, self.policy),
            }
            for (problem, sample, completion), grade, loose in zip(answered, grades, flexible, strict=True)
        ]


def evaluate(
    config: EvaluateConfig, *, base_model: Path, reference: Path, policy: Path, problems: Path, evaluation: Path
) -> dict[str, float]:
    """Let the base, SFT and GRPO models answer every test problem, greedily and by sampling, and score the answers.

    One model is in memory at a time, and none has an influence on what the next one samples.
    """
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    test_problems = read_problems(problems, Split.TEST)
    metrics: dict[str, float] = {}
    with Verifier() as verify:
        for name, model in (("base", base_model), ("sft", reference), ("grpo", policy)):
            make_deterministic(config.seed)
            summary = _measure(name, model, config, verify, test_problems, evaluation / name)
            accuracies = {
                f"accuracy_{source}": each["accuracy"] for source, each in summary["greedy"]["by_source"].items()
            }
            figures = {**accuracies, **{key: summary[key] for key in ("worked_fraction", "mean_length_tokens")}}
            metrics |= {f"{name}_{key}": value for key, value in figures.items()}
    return metrics


def _measure(
    name: str, model: Path, config: EvaluateConfig, verify: Verifier, problems: Sequence[Problem], folder: Path
) -> dict[str, Any]:
    """Write the records and the scores of a model into a folder, and return the scores."""
    gc.collect()
    torch.cuda.empty_cache()  # what the model before held; nothing happens where there is no GPU
    # In float32 even if the model was trained in bfloat16: rounding must not cost accuracy.
    with explain_out_of_memory("loading the model in float32", "use a smaller model"):
        checkpoint = load(model, dtype=torch.float32)
    sampler = TransformersSampler(checkpoint, config.max_batch_size)
    records = Evaluator(name, config, sampler.generate, verify, checkpoint.config.answer)(problems)
    summary = scores(records, num_samples=config.num_samples, temperature=config.temperature)
    sampled = probes(
        sampler.generate, problems, seed=config.seed, max_new_tokens=config.max_new_tokens, dtype="float32"
    )
    folder.mkdir()
    jsonl.write_rows(folder / "records.jsonl", records)
    jsonl.write_json(folder / "scores.json", summary)
    jsonl.write_json(folder / "probes.json", sampled)
    return summary


STAGE = Stage(
    name="evaluate",
    function=evaluate,
    config=EvaluateConfig,
    inputs=("base_model", "reference", "policy", "problems"),
    outputs=("evaluation",),
)
