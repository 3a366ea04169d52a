"""`grpo-pipeline evaluate`: measures any model by named protocols, without a run of the pipeline."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from components.evaluate.config import EvaluateConfig
from components.evaluate.evaluate import MODEL_STAGE
from components.evaluate.protocols import EXAMPLES_FILE, PIPELINE, PROTOCOLS, Dataset, Protocol
from components.evaluate.questions import load_for_protocol, read_questions
from components.prepare_data.gsm8k import GSM8K
from components.prepare_data.math_dataset import MATH
from components.prepare_data.source import FileSource, MalformedRow
from components.shared import jsonl
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, problems_file, read_problems, write_problems
from components.shared.progress import say
from components.shared.stage import run
from pipelines.tables import aligned
from pipelines.use import errors_about, model_folder, problems_of

_RAW_FILES = Path("data/raw")
_SOURCES: dict[Dataset, FileSource] = {
    "gsm8k": GSM8K(kind="gsm8k", train=Path("gsm8k_train.jsonl"), test=Path("gsm8k_test.jsonl")),
    "math500": MATH(kind="math500", train=Path("MATH/train"), test=Path("math500.jsonl")),
    "math": MATH(kind="math", train=Path("MATH/train"), test=Path("MATH/test")),
}
"""Files of each dataset in a folder of raw files; MATH-500 is a selection of MATH's test split."""


def evaluate(
    model: str | None,
    protocols: Sequence[str],
    *,
    listed: bool,
    data: Path | None,
    output: Path | None,
    examples: Path | None,
    registry: str,
    **options: Any,
) -> None:
    """Measure a model by each protocol and print a table; all input is checked before the first evaluation.

    `data` is a folder of raw files, or of problems as prepare_data writes them. `options` are the arguments of
    `_settings`. `listed` only prints the protocols.
    """
    if listed:
        print(aligned([(name, protocol.summary) for name, protocol in PROTOCOLS.items()]))
        return
    if not model or not protocols:
        raise PipelineError("evaluate: name a MODEL and a --protocol; `grpo-pipeline evaluate --list` prints them")
    for name in protocols:
        if name not in PROTOCOLS:
            raise PipelineError(f"--protocol {name}: no such protocol; there are {', '.join(PROTOCOLS)}")
    settings = _settings(**options)
    if examples and not any(PROTOCOLS[name].num_shots for name in protocols):
        raise PipelineError(f"--examples: {' and '.join(protocols)} shows none; leave the option out")
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(model, registry))
        model_name = Path(model).resolve().name if Path(model).is_dir() else model.replace("/", "--")
        output = output or Path("outputs/evaluations") / model_name
        evaluations = []
        for name in dict.fromkeys(protocols):
            protocol = PROTOCOLS[name]
            values = {"max_new_tokens": protocol.max_new_tokens, **settings, "protocol": name}
            config = validate(EvaluateConfig, values, name=MODEL_STAGE.name)
            run_problems = problems_of(model) if protocol.dataset is None else None
            problems = stack.enter_context(_problems(protocol, data or run_problems or _RAW_FILES, examples))
            load_for_protocol(folder, config, read_questions(config, problems))  # raises if they do not fit one another
            evaluations.append((config, problems))
        for config, problems in evaluations:
            say(MODEL_STAGE.name, f"{model}, protocol {config.protocol}")
            run(MODEL_STAGE, config, {"model": folder, "problems": problems, "evaluation": output / config.protocol})
    results = {config.protocol: jsonl.read_json(output / config.protocol / "scores.json") for config, _ in evaluations}
    print(f"\n{_table(results)}\n\nrecords and scores: {output}")


def _settings(
    *, sampler: str, engines: int, gpus_per_engine: int, tools: str | None, max_turns: int | None, **keys: Any
) -> dict[str, Any]:
    """Return the section `evaluate` that options of the command line describe; those that are None are left out."""
    if max_turns is not None and not tools:
        raise PipelineError("--max-turns: is for --tools ENVIRONMENT; name one, or leave the option out")
    if tools:
        keys["tools"] = {"environment": tools} | ({} if max_turns is None else {"max_turns": max_turns})
    if sampler == "vllm":
        keys["vllm"] = {"num_engines": engines, "gpus_per_engine": gpus_per_engine}
    return {key: value for key, value in keys.items() if value is not None}


@contextmanager
def _problems(protocol: Protocol, data: Path, examples: Path | None) -> Iterator[Path]:
    """Yield a folder with a protocol's problems; equal data give equal files, so that a killed evaluation resumes."""
    is_prepared = problems_file(data, Split.TEST).is_file()
    read = _read_prepared if is_prepared else _read_raw
    splits = [Split.TEST]
    if protocol.num_shots and not examples:  # the examples are problems of the train split
        splits.append(Split.TRAIN)
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-problems-") as scratch:
        folder = Path(scratch)
        for split in splits:
            write_problems(folder, split, read(protocol, split, data))
        manifest = data / "manifest.json"
        if is_prepared and manifest.is_file():
            shutil.copyfile(manifest, folder / manifest.name)
        if examples and protocol.num_shots:
            shutil.copyfile(examples, folder / EXAMPLES_FILE)
        with errors_about(folder, str(data)), errors_about(folder / EXAMPLES_FILE, str(examples)):
            yield folder


def _read_prepared(protocol: Protocol, split: Split, data: Path) -> list[Problem]:
    """Return the problems of a split that prepare_data wrote: those of the protocol's dataset if it has one, or all."""
    problems = read_problems(data, split)
    if protocol.dataset:  # solved examples, from the train split, may be from other sources of the same kind
        sources = protocol.sources if split == Split.TRAIN else (protocol.dataset,)
        problems = [problem for problem in problems if problem.source in sources]
    if not problems:
        raise PipelineError(f"{problems_file(data, split)}: has no problems from {protocol.dataset}")
    return problems


def _read_raw(protocol: Protocol, split: Split, data: Path) -> list[Problem]:
    """Return the problems of a split in a folder of raw files, without test.jsonl; malformed rows are left out."""
    if protocol.dataset is None:
        raise PipelineError(
            f"{data}: holds no test.jsonl; the protocol {PIPELINE} asks the problems of a run: give --data the folder "
            "`problems` that prepare_data has written"
        )
    rows = list(_SOURCES[protocol.dataset].read(split, data))
    for row in rows:
        if isinstance(row, MalformedRow):
            say(MODEL_STAGE.name, f"{data / row.file}:{row.line}: is left out: {row.reason}")
    problems = [row for row in rows if isinstance(row, Problem)]
    if not problems:
        raise PipelineError(f"{data / str(_SOURCES[protocol.dataset].path(split))}: holds no problem")
    return problems


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the scores by protocol and source, with 95 % intervals."""
    columns = _sampled_columns(next(iter(results.values())))  # the same for all protocols
    header = ["protocol", "source", "problems", "tools", "strict", "flexible", "truncated", "unscorable"]
    lines = [[*header, *(f"{key.removesuffix('_at_k')}@{k}" for key, k in columns)]]
    for name, scores in results.items():
        tools = (scores["protocol"]["tools"] or {}).get("environment", "none")
        for source, strict in scores["greedy"]["by_source"].items():
            accuracies = [_with_interval(strict), _with_interval(scores["flexible"]["by_source"][source])]
            counts = [str(scores[key]["by_source"][source]["count"]) for key in ("truncated", "unscorable")]
            sampled = [_with_interval(scores[key]["by_source"][source][k]) for key, k in columns]
            lines.append([name, source, str(strict["total"]), tools, *accuracies, *counts, *sampled])
    return aligned(lines)


def _sampled_columns(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key of the scores, k) for pass@1, and for pass@k and maj@k with the largest k; [] without samples."""
    if scores["sampled"] is None:
        return []
    every_k = list(scores["pass_at_k"]["all"])  # "1", "2", "4" and so on
    columns = [("pass_at_k", every_k[0])]
    if len(every_k) > 1:
        columns += [("pass_at_k", every_k[-1]), ("maj_at_k", every_k[-1])]
    return columns


def _with_interval(score: Mapping[str, Any]) -> str:
    low, high = score["interval"]
    return f"{100 * score['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
