"""Evaluation of models on the test problems: greedy and sampled answers, their grades and their scores."""

import filecmp
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from components.environments.pool import Environments
from components.evaluate.config import EvaluateConfig
from components.evaluate.probes import probes
from components.evaluate.protocols import PROTOCOLS
from components.evaluate.questions import (
    Questions,
    asked_model,
    dtype_of,
    facts,
    own_tools,
    read_questions,
    sampler_of,
)
from components.evaluate.scores import Record, scores
from components.grading.flexible import grade_flexibly
from components.grading.verifier import Submission, Verifier
from components.policy.training import prepare_process
from components.rollout.sampler import Completion, Generate, Sampling, grade_completions
from components.shared import durable, jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.environment import available_cores
from components.shared.errors import explain_out_of_memory
from components.shared.problem import Problem
from components.shared.progress import Progress, progress, say
from components.shared.tools import environment_materials

_STAGE = "evaluate"


@dataclass(frozen=True)
class Evaluator:
    """Answers problems with a sampler, and grades the answers."""

    name: str
    """Name of the model in its progress."""
    config: EvaluateConfig
    generate: Generate
    verify: Verifier
    policy: AnswerPolicy
    environments: Environments | None = None
    """What the model acts in while it answers; None without tools."""

    def __call__(self, problems: Sequence[Problem], work: Path) -> list[dict[str, Any]]:
        """Return the records of all problems: for each its greedy answer, then the sampled ones.

        The records of each batch are kept in the folder `work`; batches that are there are not answered again.
        """
        records: list[dict[str, Any]] = []
        batches = list(_batches(self.config, problems, self.environments))
        paths = [work / f"{number:05d}.jsonl" for number in range(len(batches))]
        stored = [[row for _, row in jsonl.read_rows(path)] for path in paths if path.is_file()]
        with progress(_STAGE, len(problems) * (1 + self.config.num_samples)) as bar:
            if stored:
                records = [row for rows in stored for row in rows]
                say(_STAGE, f"{self.name}: goes on after {len(records):,} answers of an evaluation that ended early")
                bar.skip(len(records))
            for batch, path in list(zip(batches, paths, strict=True))[len(stored) :]:
                graded = self._records(*batch)
                _write_whole(path, graded)
                records += graded
                self._show(bar, graded, records)
        order = {problem.id: index for index, problem in enumerate(problems)}
        return sorted(records, key=lambda record: (order[record["id"]], record["sample"]))

    def _show(self, bar: Progress, graded: Sequence[Record], records: Sequence[Record]) -> None:
        """Advance the bar by the records of a batch, with the shares of right greedy and sampled answers."""
        num_tokens = sum(record["num_tokens"] for record in graded)
        right: dict[str, list[bool]] = {}
        for record in records:
            right.setdefault("sampled" if record["sample"] else "greedy", []).append(record["verdict"] == "right")
        bar.advance(
            len(graded),
            model=self.name,
            **{name: fmean(each) for name, each in right.items()},
            length=num_tokens / len(graded),
            tokens_per_s=bar.rate(num_tokens),
        )

    def _records(self, problems: Sequence[Problem], sampling: Sampling) -> list[dict[str, Any]]:
        """Return the records of the completions of a batch; sample 0 is the greedy one."""
        remedies = [
            f"lower {_STAGE}.{key} (it is {getattr(self.config, key)})" for key in ("max_batch_size", "max_new_tokens")
        ]
        with explain_out_of_memory(f"answers to {len(problems)} problems at once", *remedies):
            groups = self.generate(problems, sampling)
        is_greedy = sampling.temperature == 0
        answered = [
            (problem, sample, completion)
            for problem, group in zip(problems, groups, strict=True)
            for sample, completion in enumerate(group, 0 if is_greedy else 1)
        ]
        asked, completions = [problem for problem, _, _ in answered], [each for _, _, each in answered]
        grades = grade_completions(self.verify, asked, completions, self.policy)
        submissions = [  # where the environment failed, the response has no answer
            Submission(problem.answer, "" if completion.failure else completion.response, self.policy, problem.question)
            for problem, _, completion in answered
        ]
        flexible = grade_flexibly(self.verify, submissions, grades)
        return [
            {
                "id": problem.id,
                "source": problem.source,
                "subject": problem.subject,
                "level": problem.level,
                "question": problem.conversation,
                "answer": problem.answer,
                "sample": sample,
                "response": completion.response,
                "extracted": grade.extracted,
                "verdict": grade.verdict,
                "reason": grade.reason,
                "detail": grade.detail,
                "flexible": {"extracted": loose.extracted, "verdict": loose.verdict},
                "num_steps": problem.num_steps,
                "num_prompt_tokens": len(completion.tokens.prompt_ids),
                "num_tokens": completion.num_tokens,
                "seed": None if is_greedy else sampling.seed,
                "finished": completion.finished,
                "worked": completion.is_worked(self.policy),
                **(_trajectory(completion) if self.environments else {}),
            }
            for (problem, sample, completion), grade, loose in zip(answered, grades, flexible, strict=True)
        ]


def _trajectory(completion: Completion) -> dict[str, Any]:
    return {
        "turns": completion.turn_records(),
        "num_environment_tokens": completion.num_environment_tokens,
        "failure": completion.failure,
    }


def _batches(
    config: EvaluateConfig, problems: Sequence[Problem], environments: Environments | None
) -> Iterator[tuple[Sequence[Problem], Sampling]]:
    """Yield the problems that are answered at once, and how: short questions first, as the longest one decides."""
    ordered = sorted(problems, key=lambda problem: len(problem.question))
    decodings = [(1, 0.0), *([(config.num_samples, config.temperature)] if config.num_samples else [])]
    for num_samples, temperature in decodings:
        size = max(1, config.max_batch_size // num_samples)
        for start in range(0, len(ordered), size):
            sampling = Sampling(
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=config.seed + start,
                stop=PROTOCOLS[config.protocol].stop,
                environments=environments,
            )
            yield ordered[start : start + size], sampling


def _write_whole(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a file that at any interruption is complete or absent."""
    partial = path.with_name(f".{path.name}.partial")
    jsonl.write_rows(partial, rows)
    durable.sync(partial)
    partial.rename(path)


def evaluate(
    config: EvaluateConfig,
    *,
    base_model: Path,
    reference: Path,
    policy: Path,
    problems: Path,
    evaluation: Path,
    work: Path,
) -> dict[str, float]:
    """Let the base, SFT and GRPO models answer every test problem, greedily and by sampling, and score the answers.

    One model is in memory at a time, and the samples of each are independent of the others.
    """
    metrics: dict[str, float] = {}
    questions = read_questions(config, problems)
    with Verifier() as verify:
        for name, model in (("base", base_model), ("sft", reference), ("grpo", policy)):
            # Without fine-tuning the reference is the base model, whose answers are there already.
            done = work / ("base" if name == "sft" and _same_files(base_model, reference) else name)
            summary = _measure(name, model, config, verify, questions, evaluation / name, done)
            metrics |= {f"{name}_{key}": value for key, value in _figures(summary).items()}
    return metrics


def _same_files(one: Path, other: Path) -> bool:
    """Tell whether two models have the same files, whatever their lineages."""
    names, others = (
        {path.name for path in folder.iterdir() if path.name != lineage.FILE_NAME} for folder in (one, other)
    )
    return names == others and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def evaluate_model(
    config: EvaluateConfig, *, model: Path, problems: Path, evaluation: Path, work: Path
) -> dict[str, float]:
    """Let one model answer problems by a protocol, and score the answers."""
    questions = read_questions(config, problems)
    with Verifier() as verify:
        return _figures(_measure(model.name, model, config, verify, questions, evaluation, work / "model"))


def _figures(summary: Mapping[str, Any]) -> dict[str, float]:
    accuracies = {f"accuracy_{source}": each["accuracy"] for source, each in summary["greedy"]["by_source"].items()}
    return {**accuracies, **{key: summary[key] for key in ("worked_fraction", "mean_length_tokens")}}


def _measure(
    name: str,
    model: Path,
    config: EvaluateConfig,
    verify: Verifier,
    questions: Questions,
    folder: Path,
    work: Path,
) -> dict[str, Any]:
    """Write the records and the scores of a model into a folder, and return the scores.

    A model that an earlier attempt has finished is not loaded again, unless the files of its environment have changed.
    """
    files = environment_materials(own_tools(model, config))
    work = work / lineage.value_digest({name: each.sha256 for name, each in files.items()})[:16] if files else work
    finished, batches = work / "evaluation", work / "batches"
    if not finished.is_dir():
        batches.mkdir(parents=True, exist_ok=True)
        partial = work / ".evaluation.partial"
        durable.remove(partial)
        partial.mkdir()
        torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
        prepare_process(config.seed)
        checkpoint = asked_model(model, config, questions)
        dtype, tools = dtype_of(checkpoint, config), checkpoint.format.tools
        with (
            closing(Environments(tools)) if tools else nullcontext() as environments,
            sampler_of(checkpoint, model, config, questions, dtype, logs=work) as generate,
        ):
            evaluator = Evaluator(name, config, generate, verify, checkpoint.config.answer, environments)
            records = evaluator(questions.problems, batches)
            limits = {"seed": config.seed, "max_new_tokens": config.max_new_tokens}
            sampled = probes(generate, questions.problems, **limits, dtype=dtype)
        jsonl.write_rows(partial / "records.jsonl", records)
        protocol = facts(config, checkpoint, questions, dtype)
        protocol["records_digest"] = lineage.file_digest(partial / "records.jsonl")
        made = scores(records, num_samples=config.num_samples, temperature=config.temperature)
        jsonl.write_json(partial / "scores.json", {**made, "protocol": protocol})
        jsonl.write_json(partial / "probes.json", sampled)
        durable.sync_tree(partial)
        partial.rename(finished)
    shutil.copytree(finished, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    summary: dict[str, Any] = jsonl.read_json(folder / "scores.json")
    return summary
