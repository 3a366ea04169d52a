"""The docs: the parser takes each command, params files are valid, paths exist, figures are computed or recorded."""

import doctest
import re
import shlex
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from components.preflight.config import STAGES, load_params
from components.report.config import GateConfig
from components.report.power import power
from components.shared.jsonl import read_json
from pipelines.cli import parser
from pipelines.limits import limits
from pipelines.plan.hardware import GIB, gpu
from pipelines.plan.memory import fits, memory_of, peak
from pipelines.plan.run import run_of
from pipelines.plan.step_time import step_time
from pipelines.run import settings
from tests import recorded_runs
from tests.pipelines.cluster.test_guides import GUIDES
from tests.presets import PAGES, ROOT

_PARSER = parser()
_PROGRAMS = ("grpo-pipeline", ".venv/bin/grpo-pipeline", "grpo")  # the last is a function that a guide defines
_SHELL = re.compile(r"^ *```(?:bash|sh)?\n(.*?)^ *```$|((?:^    \S.*\n)+)", re.DOTALL | re.MULTILINE)
_YAML = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MADE_BY_READERS = ("mine.yaml", "qwen-python.yaml", "FILE")
_OURS = ("benchmarks", "components", "docs", "images", "k8s", "params", "pipelines", "tests")
_DOCS = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""The changelog names commands and files of its day."""


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", _DOCS, ids=_named)
def test_the_parser_takes_every_command_on_a_page(page: Path) -> None:
    """With its options; params files exist, `--set` fits them, and make has each target, variable and preset."""
    text = page.read_text(encoding="utf-8")
    for words in _commands(text):
        if words[0] == "make":
            _check_make(words[1:])
            continue
        arguments = words[1 : words.index("--")] if "--" in words else words[1:]  # the rest is vLLM's
        options = vars(_PARSER.parse_args(arguments))
        named = str(options.get("params") or "params.yaml")
        there = named not in _MADE_BY_READERS
        assert not there or (ROOT / named).is_file(), words
        if options.get("settings") and words[1] in {"run", "preview"}:
            settings.load(ROOT / (named if there else "params.yaml"), options["settings"])
    # In sentences `models promote VERSION --reason TEXT` may leave something out, but names nothing that is not there.
    sentences = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", sentences):
        words = re.split(r"\s+", code.strip())
        if words[0] == "make":
            _check_make([word for word in words[1:] if word.islower() or "=" in word])
        elif words[0] in _PROGRAMS:
            assert _unknown_options(words[1:]) == [], code


@pytest.mark.parametrize("page", [page for page in _DOCS if page.stem not in GUIDES], ids=_named)
def test_params_on_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    """By themselves where they extend a file, else as an overlay of the default job."""
    for name in ("params", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for example in _YAML.findall(page.read_text(encoding="utf-8")):
        given = yaml.safe_load(example)
        assert given.keys() <= {*STAGES, "extends", "cluster", "deployment"}, example
        (tmp_path / "example.yaml").write_text(example if "extends" in given else f"extends: params.yaml\n{example}")
        load_params(tmp_path / "example.yaml")


@pytest.mark.parametrize("page", _DOCS, ids=_named)
def test_paths_and_keys_on_a_page_exist(page: Path) -> None:
    """Files of ours from the top folder, modules by their name, and keys of params files by any part of their path."""
    code = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    words = {word.strip("`,;:()\"'") for each in code for word in each.split()}
    paths = {word for word in words if re.fullmatch(rf"({'|'.join(_OURS)})/[\w./-]*", word)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    modules = {word for word in words if re.fullmatch(r"[a-z_]+\.py", word)} - {"my_rewards.py", "guessing.py"}
    assert sorted(modules - _modules()) == []
    keys = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.split(".")[0] in _sections()}
    files = {word for word in words if re.search(r"\.(py|md|html|json|jsonl|yaml|csv)$", word)}
    assert sorted(key for key in keys - files if not _is_key(key)) == []


_QUOTED = re.compile(
    r"(?:^    +|`)((?:step \d+: validation|\d+/\d+ steps +reward|on held-out|\w+ accuracy|step-by-step"
    r"|mean tokens|gate +passed:|test set|registered) [^`\n]*)",
    re.MULTILINE,
)
"""Lines that a page has of a run; `...` at their end stands for the rest."""


def test_quoted_results_of_runs_are_recorded() -> None:
    """Lines on pages, and the README's table; a new run has to print them too (tests/pipelines/test_end_to_end.py)."""
    recorded = {preset: read_json(recorded_runs.RECORD)[preset]["results"] for preset in recorded_runs.PRESETS}
    for page in ("README.md", "docs/how-to/gate.md", "docs/how-to/steer.md"):
        lines = [re.sub(r"\s+", " ", line.strip()) for line in _QUOTED.findall((ROOT / page).read_text("utf-8"))]
        assert lines
        for line in lines:
            assert any(each.startswith(line.removesuffix(" ...")) for each in recorded["laptop"]), line
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for printed in map("\n".join, recorded.values()):
        base, sft, grpo = re.findall(r"([\d.]+ %) \(", next(re.finditer(r"^\w+ accuracy .*", printed, re.M))[0])
        p_value = re.findall(r"p = (.*?) \(", printed)[0]
        assert f"| {base} → {sft} (SFT) → {grpo} (GRPO), p = {p_value} |" in readme


def test_measured_steps_on_pages_are_recorded() -> None:
    """As the benchmark wrote them: the first rows of the table, and the row of the README."""
    record = read_json(ROOT / "benchmarks/results/grpo_step/amd-epyc-2-threads.json")
    measured = [next(row for row in record["rows"] if row["row"] == name) for name in ("4x8:117/64", "4x8:117/16-256")]
    experiments = (ROOT / "docs/explanation/experiments.md").read_text(encoding="utf-8")
    titles = {"trl": "TRL 1.16.0, all completions in one pass", "trl_tuned": "TRL, tuned", "own": "this project"}
    for trainer, title in titles.items():
        steps = [row[trainer] for row in measured]
        cells = " | ".join(f"{step['seconds']:.2f} s, {step['peak_bytes'] / 1e9:.2f} GB" for step in steps)
        assert f"| {title} | {cells} |" in experiments
    ratios = [row["ratios"] for row in measured]
    faster = [f"{ratio['trl_tuned_to_own_seconds']:.1f} times faster" for ratio in ratios]
    memory = [f"{100 / ratio['trl_tuned_to_own_memory']:.0f} %" for ratio in ratios]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| (a) {faster[0]} with {memory[0]} of the memory, (b) {faster[1]} with {memory[1]} |" in readme


def test_limits_on_a_page_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The example is what the command above it prints."""
    page = (ROOT / "docs/how-to/models-and-data.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    limits(ROOT / "params/smoke.yaml")
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in example.splitlines() if line not in printed] == []


_POWER = re.compile(r"^\| lost \| (gain|margin) in points (.*?)\n\n", re.DOTALL | re.MULTILINE)


def test_tables_of_power_are_computed() -> None:
    """With one target, and with a source beside a target that passes for sure; larger test sets take too long here."""
    tables = _POWER.findall((ROOT / "docs/how-to/gate.md").read_text(encoding="utf-8"))
    assert [kind for kind, _ in tables] == ["gain", "margin"]
    for kind, table in tables:
        header, _, *rows = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table.splitlines()]
        lost = 0.0
        for row in rows:
            lost = int(row[0].rstrip(" %")) / 100 if row[0] else lost
            points = int(row[1]) / 100
            for size, shown in zip(header[:4], row[2:6], strict=True):
                tested, lossy = {"source": int(size.replace(",", ""))}, {"expected_lost_fraction": lost}
                if kind == "gain":
                    gate = GateConfig(target=("source",), margin=0.99, expected_gain=points, **lossy)
                else:
                    tested["target"] = 1000
                    gate = GateConfig(target=("target",), margin=points, expected_gain=0.4, **lossy)
                assert round(100 * power(gate, tested)) == int(shown), (kind, lost, points, size)


_PRESETS = re.compile(r"^\| (?:(\d) x )?\d+ GB \| `(.*?)` \| .*? \| (\d+) of ([\d to]+) GiB \| (.*?) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", ["one-gpu", "large-runs"])
def test_tables_of_presets_are_planned(page: str) -> None:
    """Memory in GiB, of which a twentieth is spare, and hours of GRPO on each GPU; vLLM has room for a completion."""
    text = (ROOT / f"docs/how-to/{page}.md").read_text(encoding="utf-8")
    rows = _PRESETS.findall(text)
    assert rows
    for num_gpus, preset, most, usable, hours in rows:
        params = load_params(ROOT / f"params/{preset}.yaml")
        grpo = params.train_grpo
        vllm = grpo.sampler.vllm
        assert vllm is None or vllm.max_tokens >= params.validate_data.max_prompt_tokens + grpo.sampling.max_new_tokens
        assert grpo.engine.num_processes == params.evaluate.num_gpus == int(num_gpus or 1)
        for name, shown in re.findall(r"([\w ]+) ([\d.]+)", hours):
            device = gpu(name.strip())
            run = run_of(params, int(num_gpus or 1), None, engine_sequences=device.engine_sequences)
            assert fits(run, device), (preset, name)
            assert peak(memory_of(run)) < 0.95 * device.usable_bytes, (preset, name)
            assert abs(peak(memory_of(run)) / GIB - int(most)) < 0.6, (preset, name)
            bounds = [int(each) for each in usable.split(" to ")]
            assert bounds[0] - 0.6 < device.usable_bytes / GIB < bounds[-1] + 0.6, (preset, name)
            planned = params.train_grpo.num_steps * step_time(run, device).total / 3600
            assert abs(planned - float(shown)) < 0.06, (preset, name)


_PUBLIC = ["components.environments.environment", "components.shared.tools", "components.train_grpo.rewards"]
"""Modules from which rewards and environments of users import."""


@pytest.mark.parametrize("module", _PUBLIC)
def test_examples_in_docstrings_work(module: str) -> None:
    """Python's doctest runs them."""
    failed, attempted = doctest.testmod(import_module(module))
    assert (failed, attempted > 0) == (0, True)


def test_docs_stay_short_enough_to_be_read() -> None:
    """All of docs/ on 4,500 lines, the README on 150."""
    assert sum(len(page.read_text(encoding="utf-8").splitlines()) for page in ROOT.glob("docs/**/*.md")) <= 4500
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def _commands(text: str) -> Iterator[list[str]]:
    """The calls of make and grpo-pipeline in the shell of a page."""
    for fenced, indented in _SHELL.findall(text):
        for line in (fenced or indented).replace("\\\n", " ").splitlines():
            if re.match(r" *(\.venv/bin/)?(grpo-pipeline|grpo|make) ", line):
                lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
                lexer.whitespace_split = True
                words = list(lexer)
                yield words[: next((at for at, word in enumerate(words) if word[0] in "|&;<>"), len(words))]


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            assert f"$({name}" in makefile or f"{name} ?=" in makefile, word
            if name == "PRESET" and value not in {"...", "NAME", "laptop"}:
                assert (ROOT / f"params/{value}.yaml").is_file(), word
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), word


def _unknown_options(words: list[str]) -> list[str]:
    """The options that the command at the beginning of the words does not have; the command itself if there is none."""
    command: ArgumentParser = _PARSER
    for word in words:
        choices = next((each.choices for each in command._actions if isinstance(each, _SubParsersAction)), None)
        if choices is not None and not word.startswith("-") and not word.isupper():
            if word not in choices:
                return [word]
            command = choices[word]
    end = words.index("--") if "--" in words else len(words)
    options = [word.partition("=")[0].rstrip(",.") for word in words[:end] if word.startswith("--")]
    return [option for option in options if option not in command._option_string_actions]


@lru_cache
def _modules() -> set[str]:
    return {path.name for folder in _OURS for path in ROOT.glob(f"{folder}/**/*.py")}


@lru_cache
def _keys() -> list[str]:
    """Every key of a params file, as the generated page of parameters has them."""
    page = (ROOT / "docs/parameters.md").read_text(encoding="utf-8")
    parts = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return [f".{stage}.{key}" for stage, text in parts for key in re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)]


@lru_cache
def _sections() -> set[str]:
    """Names that have keys below them."""
    return {part for key in _keys() for part in key.split(".")[1:-1]} - {"model", "data"}


def _is_key(key: str) -> bool:
    """Whether it is a part of a known key, or goes on behind one whose value has names that people choose."""
    parts = key.split(".")
    parents = [".".join(["", *parts[:number]]) for number in range(2, len(parts))]
    return any(f".{key}" in known or known.endswith(tuple(parents)) for known in _keys())
