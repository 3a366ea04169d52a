"""Limits that fit data and model, before anything runs: `grpo-pipeline limits`.

The problems are prepared as the first stage prepares them, and measured by the tokenizer of the model; no weights are
read. What is printed last can be pasted into a params file.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from components.preflight.config import Params, load_params
from components.prepare_data.prepare import prepare
from components.shared.chat import prompt_format
from components.shared.errors import PipelineError
from components.shared.model import context_tokens
from components.shared.problem import Problem, Split, read_problems, splits_in
from components.shared.tokenizer import token_lengths
from components.validate_data.gradable import ungradable
from pipelines.run.screen import printable
from pipelines.tables import aligned

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
_STEP = 16
"""Limits are rounded up to multiples of this many tokens."""
_DEFAULT_ANSWER, _THOUGHT = 1024, 4096
"""Default completion limits in tokens, without and with reasoning."""
_COMPLETION = "train_grpo.sampling.max_new_tokens"
_SPARE = 2
"""Completions may be this many times as long as 99 % of the solutions: few models are as terse as a textbook."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of problems in tokens, unordered."""

    prompts: list[int]
    solutions: list[int]
    """Solutions of the train problems that have one."""
    examples: list[int]
    """Prompt, solution and end token together."""


def limits(params: Path) -> None:
    """Print how long the problems of a params file are, and limits that fit them and the model."""
    config = load_params(params)
    model = config.train_sft.model
    context = context_tokens(model.base)
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-limits-") as scratch:
        folder = Path(scratch)
        prepare(config.prepare_data, problems=folder)
        problems = [problem for split in splits_in(folder) for problem in read_problems(folder, split)]
    print(f"\n{first_prompt(config, problems)}")
    lengths = lengths_by_source(config, problems)
    reads = "" if context is None else f" (context: {context:,} tokens)"
    print(f"\nCounted with the tokenizer of {model.base}{reads}:\n\n{table(lengths)}\n")
    if defect := ungradable(problems, model.answer):
        print(f"warning: {defect}\n")
    values = proposals(config, lengths, context)
    print(overlay(config, values, params), end="")
    wanted = wanted_completion(config, lengths)
    if values[_COMPLETION] < wanted:
        print(f"# Completions get what the model's context leaves; {wanted:,} tokens would be better.")


def first_prompt(params: Params, problems: Sequence[Problem]) -> str:
    """Return the prompt of the first training problem as the model reads it, template and all, and the answer to it."""
    first = next((problem for problem in problems if problem.split == Split.TRAIN), problems[0])
    prompt = prompt_format(params.train_sft.model).prompt(first.question, first.source, first.earlier)
    text = indent(printable(prompt).rstrip("\n"), "    ", lambda _: True)
    return f"the prompt of {first.id}, as the model reads it:\n\n{text}\n\nand the expected answer: {first.answer}"


def lengths_by_source(params: Params, problems: Sequence[Problem]) -> dict[str, Lengths]:
    """Return the lengths of problems in tokens, by source."""
    lengths: dict[str, Lengths] = {}
    tokens = token_lengths(params.train_sft.model, problems)
    for problem, prompt_tokens, solution_tokens in zip(problems, *tokens, strict=True):
        of_source = lengths.setdefault(problem.source, Lengths([], [], []))
        of_source.prompts.append(prompt_tokens)
        if problem.split == Split.TRAIN and problem.solution:
            of_source.solutions.append(solution_tokens)
            of_source.examples.append(prompt_tokens + solution_tokens + 1)  # and the end token
    return lengths


def proposals(params: Params, lengths: Mapping[str, Lengths], context: int | None) -> dict[str, int]:
    """Return limits that no problem exceeds, by key; a completion gets what it needs, or what the context leaves.

    PipelineError if the longest prompt fills the model's context.
    """
    prompt = _up(max(max(each.prompts) for each in lengths.values()))
    solutions = [tokens for each in lengths.values() for tokens in each.solutions]
    examples = [tokens for each in lengths.values() for tokens in each.examples]
    observed = params.train_sft.model.max_environment_tokens
    room = math.inf if context is None else context - prompt - observed
    if room < _STEP:
        answers = f", and the environment's answers {observed:,} (train_sft.model.tools)" if observed else ""
        raise PipelineError(
            f"{params.train_sft.model.base}: reads {context:,} tokens, and the longest prompt with its answer does "
            f"not fit: it has {prompt:,}{answers}; leave out the longest problems, or name a model that reads more"
        )
    completion = int(min(wanted_completion(params, lengths), room))
    values = {"validate_data.max_prompt_tokens": prompt}
    if solutions:
        values["validate_data.max_solution_tokens"] = _up(max(solutions))
    if examples and params.train_sft.num_steps:
        values["train_sft.max_tokens"] = int(min(_up(max(examples)), context or math.inf))
    values |= dict.fromkeys((_COMPLETION, "evaluate.max_new_tokens"), completion)
    engine = next((name for name in ("vllm", "servers") if getattr(params.train_grpo.sampler, name)), None)
    if engine:
        values[f"train_grpo.sampler.{engine}.max_tokens"] = prompt + completion + observed
    return values


def wanted_completion(params: Params, lengths: Mapping[str, Lengths]) -> int:
    """Return the tokens that a completion may need, regardless of the model's context."""
    model = params.train_sft.model
    if any(model.asks_for_thoughts(source) for source in lengths):
        return _THOUGHT
    solutions = [tokens for each in lengths.values() for tokens in each.solutions]
    terse = _SPARE * _up(_quantile(solutions, 0.99)) if solutions else _DEFAULT_ANSWER
    return max(terse, _DEFAULT_ANSWER) if model.chat else terse  # who was trained to chat explains


def table(lengths: Mapping[str, Lengths]) -> str:
    """Return the quantiles of prompts, of solutions and of both together, by source."""
    lines = [["source", "tokens of", "texts", *(f"{100 * each:g} %" for each in _QUANTILES)]]
    for source, of_source in sorted(lengths.items()):
        rows = {"prompts": of_source.prompts, "solutions": of_source.solutions, "both": of_source.examples}
        for name, tokens in rows.items():
            if tokens:
                shown = (f"{_quantile(tokens, each):,}" for each in _QUANTILES)
                lines.append([source, name, f"{len(tokens):,}", *shown])
    return aligned(lines, left=2)


def overlay(params: Params, values: Mapping[str, int], path: Path) -> str:
    """Return limits as a part of a params file, each with its present value as a comment."""
    nested: dict[str, Any] = {}
    remarks: dict[str, list[str]] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
        now: Any = reduce(getattr, key.split("."), params)
        remarks.setdefault(f"{name}: {value}", []).append("  # as now" if now == value else f"  # instead of {now}")
    text = yaml.safe_dump(nested, sort_keys=False)
    lines = [line + (remarks[line.strip()].pop(0) if line.strip() in remarks else "") for line in text.splitlines()]
    heading = f"# Limits that no problem exceeds, and room for completions; put them into {path}:"
    return "\n".join([heading, *lines]) + "\n"


def _quantile(tokens: Sequence[int], fraction: float) -> int:
    return sorted(tokens)[math.ceil(fraction * len(tokens)) - 1]


def _up(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP
