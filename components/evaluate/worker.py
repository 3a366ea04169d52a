"""Evaluation of models on the test problems: greedy and sampled answers, their grades and their scores."""

import filecmp
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch

from components.environments.pool import Environments
from components.evaluate.config import EvaluateConfig
from components.evaluate.protocols import PROTOCOLS
from components.evaluate.questions import (
    Questions,
    dtype_of,
    load_for_protocol,
    own_tools,
    protocol_facts,
    read_questions,
    sampler_of,
)
from components.evaluate.scores import Record, scores
from components.grading.flexible import grade_flexibly
from components.grading.verifier import Submission, Verifier
from components.policy.training import prepare_process
from components.rollout.sampler import Generate, Sampling, grade_completions
from components.shared import durable, jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.environment import available_cores
from components.shared.errors import explain_out_of_memory
from components.shared.page import percent
from components.shared.problem import Problem
from components.shared.progress import Progress, progress, say
from components.shared.tools import environment_materials

_STAGE = "evaluate"
_NUM_PROBES = 8
_MAX_PROBE_TOKENS = 128
"""Limit of an answer: enough to tell models apart, and cheap compared with the evaluation."""


@dataclass(frozen=True)
class Evaluator:
    """Answers problems with a sampler, and grades the answers."""

    name: str
    """Name of the model for the progress bar."""
    config: EvaluateConfig
    generate: Generate
    verify: Verifier
    answer_policy: AnswerPolicy
    environments: Environments | None = None
    """Where the model acts while it answers; None without tools."""

    def __call__(self, problems: Sequence[Problem], work: Path) -> list[dict[str, Any]]:
        """Return the records of all problems: for each its greedy answer, then the sampled ones.

        The records of each batch are stored in the folder `work`, from which an interrupted evaluation continues.
        """
        records: list[dict[str, Any]] = []
        with progress(_STAGE, len(problems) * (1 + self.config.num_samples), "answers") as bar:
            batches = list(self._batches(problems))
            paths = [work / f"{number:05d}.jsonl" for number in range(len(batches))]
            num_stored = sum(path.is_file() for path in paths)
            if num_stored:
                records = [row for path in paths[:num_stored] for _, row in jsonl.read_rows(path)]
                say(_STAGE, f"{self.name}: goes on after {len(records):,} answers of an evaluation that ended early")
                bar.skip(len(records))
            for path, (batch, sampling) in zip(paths[num_stored:], batches[num_stored:], strict=True):
                new = self._records(batch, sampling)
                partial = path.with_name(f".{path.name}.partial")  # renamed below: a file in `paths` is always complete
                jsonl.write_rows(partial, new)
                durable.sync(partial)
                partial.rename(path)
                records += new
                self._show(bar, new, records)
        order = {problem.id: index for index, problem in enumerate(problems)}
        return sorted(records, key=lambda record: (order[record["id"]], record["sample"]))

    def _batches(self, problems: Sequence[Problem]) -> Iterator[tuple[Sequence[Problem], Sampling]]:
        """Yield problems to answer at once, with the settings: first all greedy, then all sampled."""
        config = self.config
        # Questions of similar length: the longest sequence of a batch determines its memory and time.
        ordered = sorted(problems, key=lambda problem: len(problem.question))
        decodings = [(1, 0.0)]
        if config.num_samples:
            decodings.append((config.num_samples, config.temperature))
        for num_samples, temperature in decodings:
            size = max(1, config.max_batch_size // num_samples)
            for start in range(0, len(ordered), size):
                sampling = Sampling(
                    num_samples=num_samples,
                    temperature=temperature,
                    max_new_tokens=config.max_new_tokens,
                    seed=config.seed + start,
                    stop=PROTOCOLS[config.protocol].stop,
                    environments=self.environments,
                )
                yield ordered[start : start + size], sampling

    def _show(self, bar: Progress, new: Sequence[Record], records: Sequence[Record]) -> None:
        """Advance the bar by the new records; show fractions of right answers, and the mean length of greedy ones."""
        num_tokens = sum(record["num_tokens"] for record in new)
        is_right: defaultdict[str, list[bool]] = defaultdict(list)
        for record in records:
            is_right["sampled" if record["sample"] else "greedy"].append(record["verdict"] == "right")
        bar.advance(
            len(new),
            model=self.name,
            **{f"{decoding}_accuracy": percent(fmean(each)) for decoding, each in is_right.items()},
            length=fmean(record["num_tokens"] for record in records if record["sample"] == 0),
            tokens_per_s=bar.rate(num_tokens),
        )

    def _records(self, problems: Sequence[Problem], sampling: Sampling) -> list[dict[str, Any]]:
        """Return the records of the completions of a batch; sample 0 is the greedy one."""
        keys = ("max_batch_size", "max_new_tokens")
        remedies = [f"lower {_STAGE}.{key} (it is {getattr(self.config, key)})" for key in keys]
        with explain_out_of_memory(f"answers to {len(problems)} problems at once", *remedies):
            groups = self.generate(problems, sampling)
        is_greedy = sampling.temperature == 0
        answered_problems = [problem for problem, group in zip(problems, groups, strict=True) for _ in group]
        first_sample = 0 if is_greedy else 1
        samples = [sample for group in groups for sample, _ in enumerate(group, start=first_sample)]
        completions = [completion for group in groups for completion in group]
        grades = grade_completions(self.verify, answered_problems, completions, self.answer_policy)
        # After a failure of the environment, the response has no answer.
        responses = ["" if completion.failure else completion.response for completion in completions]
        submissions = [
            Submission(problem.answer, response, self.answer_policy, problem.question)
            for problem, response in zip(answered_problems, responses, strict=True)
        ]
        flexible_grades = grade_flexibly(self.verify, submissions, grades)
        records = []
        rows = zip(answered_problems, samples, completions, grades, flexible_grades, strict=True)
        for problem, sample, completion, grade, flexible in rows:
            record: dict[str, Any] = {
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
                "flexible": {"extracted": flexible.extracted, "verdict": flexible.verdict},
                "num_steps": problem.num_steps,
                "num_prompt_tokens": len(completion.tokens.prompt_ids),
                "num_tokens": completion.num_tokens,
                "seed": None if is_greedy else sampling.seed,
                "finished": completion.finished,
                "worked": completion.is_worked(self.answer_policy),
            }
            if self.environments is not None:
                record["turns"] = completion.turn_records()
                record["num_environment_tokens"] = completion.num_environment_tokens
                record["failure"] = completion.failure
            records.append(record)
        return records


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
    """Let the base, SFT and GRPO models, one after the other, answer all problems, and score the answers."""
    metrics: dict[str, float] = {}
    questions = read_questions(config, problems)
    with Verifier() as verify:
        for name, model in (("base", base_model), ("sft", reference), ("grpo", policy)):
            # Without fine-tuning, the reference is the base model: its answers are copied from the same work folder.
            reuses_base = name == "sft" and _have_same_files(base_model, reference)
            model_work = work / ("base" if reuses_base else name)
            summary = _measure(name, model, config, verify, questions, evaluation / name, model_work)
            metrics |= {f"{name}_{key}": value for key, value in _metrics(summary).items()}
    return metrics


def _have_same_files(model: Path, other: Path) -> bool:
    """Return whether two folders have equal files, except for their lineage."""
    names = {path.name for path in model.iterdir()} - {lineage.FILE_NAME}
    if names != {path.name for path in other.iterdir()} - {lineage.FILE_NAME}:
        return False
    return all(filecmp.cmp(model / name, other / name, shallow=False) for name in names)


def evaluate_model(
    config: EvaluateConfig, *, model: Path, problems: Path, evaluation: Path, work: Path
) -> dict[str, float]:
    """Let one model answer problems by a protocol, and score the answers."""
    questions = read_questions(config, problems)
    with Verifier() as verify:
        return _metrics(_measure(model.name, model, config, verify, questions, evaluation, work / "model"))


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a model from its scores, all of its greedy answers."""
    accuracies = {f"accuracy_{source}": each["accuracy"] for source, each in summary["greedy"]["by_source"].items()}
    return {**accuracies, **{key: summary[key] for key in ("worked_fraction", "mean_length_tokens")}}


def _measure(
    name: str, model: Path, config: EvaluateConfig, verify: Verifier, questions: Questions, folder: Path, work: Path
) -> dict[str, Any]:
    """Write the records and the scores of a model into a folder, and return the scores.

    A model that an earlier attempt has finished is not loaded again, unless the files of its environment have changed.
    """
    environment_files = environment_materials(own_tools(model, config))
    if environment_files:
        digests = {name: each.sha256 for name, each in environment_files.items()}
        work = work / lineage.value_digest(digests)[:16]
    finished = work / "evaluation"
    if not finished.is_dir():
        with durable.new_folder(finished) as partial:
            partial.mkdir()
            _answer(name, model, config, verify, questions, partial, work)
            durable.sync_tree(partial)
    shutil.copytree(finished, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return cast(dict[str, Any], jsonl.read_json(folder / "scores.json"))


def _answer(
    name: str, model: Path, config: EvaluateConfig, verify: Verifier, questions: Questions, folder: Path, work: Path
) -> None:
    """Let a model answer the questions; write its records, scores and probes into `folder`."""
    batches = work / "batches"
    batches.mkdir(exist_ok=True)
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    prepare_process(config.seed)
    checkpoint = load_for_protocol(model, config, questions)
    dtype, tools = dtype_of(checkpoint, config), checkpoint.format.tools
    with (
        closing(Environments(tools)) if tools else nullcontext() as environments,
        sampler_of(checkpoint, model, config, questions, dtype, logs=work) as generate,
    ):
        evaluator = Evaluator(name, config, generate, verify, checkpoint.config.answer, environments)
        records = evaluator(questions.problems, batches)
        probe_answers = probes(
            generate, questions.problems, seed=config.seed, max_new_tokens=config.max_new_tokens, dtype=dtype
        )
    jsonl.write_rows(folder / "records.jsonl", records)
    protocol = protocol_facts(config, checkpoint, questions, dtype)
    protocol["records_digest"] = lineage.file_digest(folder / "records.jsonl")
    summary = scores(records, num_samples=config.num_samples, temperature=config.temperature)
    jsonl.write_json(folder / "scores.json", {**summary, "protocol": protocol})
    jsonl.write_json(folder / "probes.json", probe_answers)


def probes(
    generate: Generate, problems: Sequence[Problem], *, seed: int, max_new_tokens: int, dtype: str
) -> dict[str, Any]:
    """Return the content of probes.json: greedy answers to a few problems, with natural log-probabilities of tokens."""
    subset = random.Random(seed).sample(list(problems), min(_NUM_PROBES, len(problems)))
    max_new_tokens = min(max_new_tokens, _MAX_PROBE_TOKENS)
    sampling = Sampling(num_samples=1, temperature=0.0, max_new_tokens=max_new_tokens, seed=seed)
    answers = [answer for (answer,) in generate(subset, sampling)]
    rows = [
        {
            "id": problem.id,
            "prompt_ids": list(answer.tokens.prompt_ids),
            "completion_ids": list(answer.tokens.completion_ids),
            "logprobs": list(answer.logprobs),
        }
        for problem, answer in zip(subset, answers, strict=True)
    ]
    return {"dtype": dtype, "probes": rows}
