"""`grpo-pipeline limits`: proposes limits in tokens that fit the data and the model, before anything runs.

It prepares the problems as the first stage does, and measures them with the model's tokenizer; it reads no weights. The
last lines that it prints can be pasted into a params file.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from textwrap import indent
from typing import Any

from components.preflight.config import Params, load_params
from components.preflight.inputs import BASE_MODEL
from components.prepare_data.prepare import prepare
from components.shared.chat import prompt_format
from components.shared.config import with_place
from components.shared.errors import PipelineError
from components.shared.model import context_tokens
from components.shared.problem import Problem, Split, read_problems, splits_in
from components.shared.tokenizer import token_lengths
from components.validate_data.gradable import ungradable
from pipelines.base_models import with_advice
from pipelines.run.screen import printable
from pipelines.tables import aligned

_QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
_MULTIPLE = 16  # limits are rounded up to multiples of this many tokens
_DEFAULT_COMPLETION, _REASONING_COMPLETION = 1024, 4096
"""Default completion limits in tokens, without and with reasoning."""
_COMPLETION_KEY = "train_grpo.sampling.max_new_tokens"
_SPACE_FACTOR = 2
"""Completions may be this many times as long as 99 % of the solutions: few models are as terse as a textbook."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the problems of a source in tokens, unordered."""

    prompts: list[int]
    solutions: list[int]
    """Lengths of the solutions of train problems that have one."""
    examples: list[int]
    """Lengths of these solutions with their prompt and the end token."""


def limits(params: Path) -> None:
    """Print a prompt, the lengths of all problems of a params file, and limits that fit them and the model."""
    config = load_params(params)
    model = config.train_sft.model
    try:
        context = context_tokens(model.base)
    except PipelineError as error:
        raise PipelineError(with_place(params, f"{BASE_MODEL}: {with_advice(str(error))}")) from None
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-limits-") as scratch:
        folder = Path(scratch)
        prepare(config.prepare_data, problems=folder)
        problems = [problem for split in splits_in(folder) for problem in read_problems(folder, split)]
    print(f"\n{first_prompt(config, problems)}")
    lengths = lengths_by_source(config, problems)
    about_context = "" if context is None else f", whose context is {context:,}"
    print(f"\nLengths in tokens of {model.base}{about_context}:\n\n{table(lengths)}\n")
    if defect := ungradable(problems, model.answer, imitated=config.train_sft.num_steps > 0):
        print(f"warning: {defect}\n")
    values = proposals(config, lengths, context)
    print(overlay(config, values, params), end="")
    wanted = wanted_completion(config, lengths)
    if values[_COMPLETION_KEY] < wanted:
        print(f"# Completions get what the model's context leaves; {wanted:,} tokens would be better.")


def first_prompt(params: Params, problems: Sequence[Problem]) -> str:
    """Return the prompt of the first train problem as the model reads it, and the expected answer."""
    first = next((problem for problem in problems if problem.split == Split.TRAIN), problems[0])
    prompt = prompt_format(params.train_sft.model).prompt(first.question, first.source, first.earlier)
    text = indent(printable(prompt).rstrip("\n"), "    ", lambda _: True)
    return f"the prompt of {first.id}, as the model reads it:\n\n{text}\n\nand the expected answer: {first.answer}"


def lengths_by_source(params: Params, problems: Sequence[Problem]) -> dict[str, Lengths]:
    """Return the lengths of problems in tokens, by source."""
    lengths: dict[str, Lengths] = {}
    tokens = token_lengths(params.train_sft.model, problems)
    for problem, prompt_tokens, solution_tokens in zip(problems, *tokens, strict=True):
        source = lengths.setdefault(problem.source, Lengths([], [], []))
        source.prompts.append(prompt_tokens)
        if problem.split == Split.TRAIN and problem.solution:
            source.solutions.append(solution_tokens)
            source.examples.append(prompt_tokens + solution_tokens + 1)  # 1 for the end token
    return lengths


def proposals(params: Params, lengths: Mapping[str, Lengths], context: int | None) -> dict[str, int]:
    """Return limits that no problem exceeds, by key; completions get what they need, at most what `context` leaves.

    PipelineError if the longest prompt fills the model's context, whose length is None if it has no limit.
    """
    prompt = _round_up(max(max(each.prompts) for each in lengths.values()))
    solutions = [tokens for each in lengths.values() for tokens in each.solutions]
    examples = [tokens for each in lengths.values() for tokens in each.examples]
    observations = params.train_sft.model.max_environment_tokens
    space = math.inf if context is None else context - prompt - observations
    if space < _MULTIPLE:
        answers = f", and the environment's answers {observations:,} (train_sft.model.tools)" if observations else ""
        raise PipelineError(
            f"{params.train_sft.model.base}: reads {context:,} tokens, and the longest prompt with its answer does "
            f"not fit: it has {prompt:,}{answers}; leave out the longest problems, or name a model that reads more"
        )
    completion = int(min(wanted_completion(params, lengths), space))
    values = {"validate_data.max_prompt_tokens": prompt}
    if solutions:
        values["validate_data.max_solution_tokens"] = _round_up(max(solutions))
    if examples and params.train_sft.num_steps:
        values["train_sft.max_tokens"] = int(min(_round_up(max(examples)), context or math.inf))
    values |= {_COMPLETION_KEY: completion, "evaluate.max_new_tokens": completion}
    for engine in ("vllm", "servers"):
        if getattr(params.train_grpo.sampler, engine):
            values[f"train_grpo.sampler.{engine}.max_tokens"] = prompt + completion + observations
    return values


def wanted_completion(params: Params, lengths: Mapping[str, Lengths]) -> int:
    """Return the tokens that a completion may need, regardless of the model's context."""
    model = params.train_sft.model
    if any(model.asks_for_thoughts(source) for source in lengths):
        return _REASONING_COMPLETION
    solutions = [tokens for each in lengths.values() for tokens in each.solutions]
    if not solutions:
        return _DEFAULT_COMPLETION
    like_solutions = _SPACE_FACTOR * _round_up(_quantile(solutions, 0.99))
    # Chat models explain more than solutions do.
    return max(like_solutions, _DEFAULT_COMPLETION) if model.chat else like_solutions


def table(lengths: Mapping[str, Lengths]) -> str:
    """Return a table with quantiles of the lengths of prompts, of solutions and of both together, by source."""
    quantiles = ("longest" if fraction == 1 else f"p{100 * fraction:g}" for fraction in _QUANTILES)
    lines = [["source", "text", "count", *quantiles]]
    for source, each in sorted(lengths.items()):
        for name, tokens in {"prompt": each.prompts, "solution": each.solutions, "both + EOS": each.examples}.items():
            if tokens:
                quantiles = (f"{_quantile(tokens, fraction):,}" for fraction in _QUANTILES)
                lines.append([source, name, f"{len(tokens):,}", *quantiles])
    return aligned(lines, left=2)


def overlay(params: Params, values: Mapping[str, int], path: Path) -> str:
    """Return limits, by key, as the text of a params file that names each present value in a comment."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        present_value: Any = reduce(getattr, key.split("."), params)
        remark = "as now" if present_value == value else f"instead of {present_value}"
        section[name] = f"{value}  # {remark}"
    heading = f"# Put these limits into {path}: every problem fits; most solutions are shorter than completions may be."
    return "\n".join([heading, *_yaml_lines(sections)]) + "\n"


def _yaml_lines(sections: Mapping[str, Any], indentation: str = "") -> Iterator[str]:
    for key, value in sections.items():
        if isinstance(value, dict):
            yield f"{indentation}{key}:"
            yield from _yaml_lines(value, f"{indentation}  ")
        else:
            yield f"{indentation}{key}: {value}"


def _quantile(tokens: Sequence[int], fraction: float) -> int:
    return sorted(tokens)[math.ceil(fraction * len(tokens)) - 1]


def _round_up(tokens: int) -> int:
    return math.ceil(tokens / _MULTIPLE) * _MULTIPLE
