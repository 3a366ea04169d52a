"""Params files and typed sections: what is accepted, and the one line that says where something is wrong."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from components.preflight.config import Params, as_yaml, contradictions, load_params, stage_sections
from components.shared import config
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import Config, Operational, SameAs, load_section, read_params, without_operational
from components.shared.errors import PipelineError
from components.train_grpo.config import CorrectionConfig
from tests.presets import FILES, ROOT


class _Files(Config):
    kind: Literal["files"]
    train: Path
    limit: int | None = Field(default=None, ge=1)


class _Sums(Config):
    kind: Literal["sums"]
    num_train: int = Field(ge=0)


class _Engine(Config):
    precision: Literal["fp32", "bf16"]
    stages: list[int]


class _Section(Config):
    seed: int
    rate: float = Field(gt=0)
    engine: _Engine
    sources: list[Annotated[_Files | _Sums, Field(discriminator="kind")]] = Field(min_length=1)


_TEXT = """# the first line
other: {}
train:
  seed: 1
  rate: 2.0e-3
  engine:
    precision: fp32
    stages: [1, 2]
  sources:
    - kind: sums
      num_train: 4
    - {kind: files, train: data/train.jsonl}
"""


def _file(folder: Path, change: str = "") -> Path:
    """The params above, with `old -> new` applied."""
    old, _, new = change.partition(" -> ")
    path = folder / "params.yaml"
    path.write_text(_TEXT.replace(old, new, 1), encoding="utf-8")
    return path


_ALIASES = "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 31))


def _refusal(path: Path) -> str:
    with pytest.raises(PipelineError) as refused:
        load_section(path, "train", _Section)
    message = str(refused.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}:")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed: 1 -> sede: 1", "4: train.sede: unknown key; did you mean `seed`?"),
        ("seed: 1 -> zzz: 1", "4: train.zzz: unknown key; accepted: engine, rate, seed, sources"),
        ("num_train: 4 -> numtrain: 4", "11: train.sources.0.numtrain: unknown key; did you mean `num_train`?"),
        ("rate: 2.0e-3 -> rate: .inf", "5: train.rate: should be a finite number, got Infinity"),
        ("fp32 -> fp64", "7: train.engine.precision: should be 'fp32' or 'bf16', got \"fp64\""),
        ("kind: files -> kind: flies", "12: train.sources.1.kind: unknown kind `flies`; did you mean `files`?"),
        ("{kind: files, -> {", "12: train.sources.1.kind: required key is missing; accepted: files, sums"),
        ("stages: [1, 2] -> stages: [1, yes]", "8: train.engine.stages.1: should be a number, got true"),
        ("rate: 2.0e-3 -> seed: 2", "5: is not valid YAML (key `seed` is a duplicate)"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, change: str, message: str) -> None:
    """At any depth, also below a list and in one member of a union."""
    assert _refusal(_file(tmp_path, change)).startswith(message)


_VALUES = "[3, 1.5, -1, 1.0e+9, '', x, yes, [], [{x: y}], [[0], 0], {}, {3: {}}, {kind: x}, 2026-01-01]"


def test_no_error_has_the_words_of_pydantic() -> None:
    """Its messages begin with a capital letter. Wrong values in every key of every section get ours."""
    models: list[type[BaseModel]] = [Params]
    messages = set[str]()
    for model in models:  # grows
        for key, field in model.model_fields.items():
            models += [each for each in config.models_of(field) if each not in models]
            for value in yaml.safe_load(_VALUES):
                messages.update(config.problems(model, {key: value}, name="section"))
    assert len(messages) > 2_000
    assert not [line for line in messages if re.match(r"\S+: [A-Z]", line)]


def test_what_an_alias_or_a_merge_repeats_is_no_duplicate(tmp_path: Path) -> None:
    """A key that overrides a merged one is what merging is for."""
    path = tmp_path / "params.yaml"
    path.write_text("a: &a\n  x: 1\n  y: 2\nb: *a\nc: &c\n  <<: *a\n  x: 3\nd:\n  <<: *c\n  y: 4\n")
    params = read_params(path)
    assert (params["b"], params["c"]) == (params["a"], {"x": 3, "y": 2})
    assert params["d"] == {"x": 3, "y": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: [1\nc: 2\n", "3: is not valid YAML (expected ',' or ']', but got ':')"),
        ("a: !!python/object:os.system {}\n", "1: is not valid YAML (could not determine a constructor"),
        ("a: {}\n# \x01\n", " is not valid YAML (it holds a control character)"),
        (f"a0: &a0 {{p: 1}}\n{_ALIASES}", "3: is not valid YAML (it has more than 100,000 keys)"),
        (f"a: {'[' * 2_000}", " is not YAML of a sensible depth"),
        ("a:\n  b: [x, 'https://u:pw@host/a.git']\n", "2: a.b.1: contains a password or a token; revoke it, and set"),
        ("a: {b: 'https://hf_x@host/a'}\n", "1: a.b: contains a password or a token"),
        ("a: {b: 's3://bucket/x?X-Amz-Signature=1'}\n", "1: a.b: contains a password or a token"),
        ("{}", " expected one mapping per stage"),
        ("- a\n", " expected one mapping per stage"),
        ("a: {}\nb: 3\n", "2: b: expected one mapping per stage"),
        ("a: {}\n1: {}\n", "2: 1: expected one mapping per stage"),
    ],
)
def test_a_file_that_is_no_params_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    """Broken YAML says what is broken, and a section that is none is named."""
    path = tmp_path / "params.yaml"
    path.write_text(text)
    assert _refusal(path).startswith(message)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Neither a missing file nor a folder nor Latin-1 gets a traceback."""
    assert _refusal(tmp_path / "nope.yaml") == " no such params file"
    (tmp_path / "qwen-1.5b.yaml").touch()
    assert _refusal(tmp_path / "qwen-1.5.yaml") == f" no such params file; did you mean {tmp_path}/qwen-1.5b.yaml?"
    for name in ("smollm2", "params/smollm2", "smollm2.yml", "params/smolm2.yaml"):
        with pytest.raises(PipelineError, match=r"no such params file; did you mean params/smollm2\.yaml\?"):
            read_params(Path(name))
    assert _refusal(tmp_path) == " cannot be read (Is a directory)"
    path = tmp_path / "params.yaml"
    path.write_bytes(b"a:\n  b: caf\xe9\n")
    assert _refusal(path) == " is not UTF-8 text (byte 11)"


def test_a_misspelt_section_is_refused_and_a_missing_one_is_all_defaults(tmp_path: Path) -> None:
    """A typing error must not run a stage with its defaults."""
    path = _file(tmp_path, "train:\n -> trian:\n")
    assert _refusal(path) == "3: trian: unknown section; did you mean `train`?"
    with pytest.raises(PipelineError, match=r"evaluate\.seed: required key is missing"):
        load_section(path, "evaluate", _Section)


def _overlay(folder: Path, text: str) -> Path:
    _file(folder)
    path = folder / "presets/overlay.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("overlay", "place"),
    [
        ("train:\n  rate: 0\n", "presets/overlay.yaml:3: train.rate"),
        ("train:\n  engine: {precision: fp64}\n", "presets/overlay.yaml:3: train.engine.precision"),
        ("train:\n  seed: null\n", "presets/overlay.yaml:3: train.seed: required key is missing"),
        ("train:\n  sources:\n  - kind: sums\n", "presets/overlay.yaml:4: train.sources.0.num_train"),
        ("train:\n  rate: 1.0\n", "params.yaml:8: train.engine.stages.1"),
    ],
)
def test_an_error_names_the_file_that_sets_the_value(tmp_path: Path, overlay: str, place: str) -> None:
    """The last file that sets the key, whatever the others say of it; a list belongs to one file as a whole."""
    path = _overlay(tmp_path, f"extends: ../params.yaml\n{overlay}")
    if place.startswith("params"):
        _file(tmp_path, "[1, 2] -> [1, x]")
    with pytest.raises(PipelineError) as refused:
        load_section(path, "train", _Section)
    assert str(refused.value).startswith(f"{tmp_path}/{place}")


def test_of_several_extended_files_the_later_goes_before_the_earlier(tmp_path: Path) -> None:
    """And what extends them before both; what both extend is below both. Lists are not merged; null resets a key."""
    for name, text in (
        ("base", "train: {a: 0, b: 0, c: 0, d: {x: 0, y: [0, 0]}, e: 0}\nold: {a: 0}"),
        ("first", "extends: base.yaml\ntrain: {b: 1, c: 1, d: {x: 1}, e: 1}"),
        ("second", "extends: base.yaml\ntrain: {c: 2, e: null}\nold: null"),
        ("own", "extends: [first.yaml, second.yaml]\ntrain: {d: {y: [{z: 3, w: null}]}}\nnew: {a: 3}"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    train = {"a": 0, "b": 1, "c": 2, "d": {"x": 1, "y": [{"z": 3}]}}
    assert read_params(tmp_path / "own.yaml") == {"train": train, "new": {"a": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nope.yaml\n", "overlay.yaml:1: extends: {folder}/nope.yaml: no such params file"),
        ("train: {}\nextends: [a, 4]\n", "overlay.yaml:2: extends: expected the path of a params file, got 4"),
        ("extends: overlay.yaml\n", "overlay.yaml:1: extends: the files extend one another in a circle ({folder}/"),
        ("extends: broken.yaml\n", "broken.yaml:1: is not valid YAML (found undefined alias 'nope')"),
    ],
)
def test_a_file_that_cannot_be_extended_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A missing file, something else than a path, a file that would extend itself, and one that is broken."""
    path = _overlay(tmp_path, text)
    (path.parent / "broken.yaml").write_text("a: *nope\n")
    with pytest.raises(PipelineError) as refused:
        read_params(path)
    assert str(refused.value).startswith(f"{path.parent}/{message.format(folder=path.parent)}")


class _Checked(Config):
    seed: Annotated[int, SameAs("train", "seed")]


def test_a_key_that_is_the_same_as_another_section_has_need_not_be_repeated(tmp_path: Path) -> None:
    """It is taken from there, unless it is set."""
    assert load_section(_file(tmp_path), "other", _Checked).seed == 1
    assert load_section(_file(tmp_path, "other: {} -> other: {seed: 2}"), "other", _Checked).seed == 2


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ("validate_data: {model: {base: scratch:math}}\n", "2: validate_data.model and train_sft.model must be"),
        (
            "train_sft: {model: {base: scratch:nope}}\n",
            '2: train_sft.model.base: no such preset, got "scratch:nope"; acc',
        ),
        ("train_gpro: {}\n", "2: train_gpro: unknown key; did you mean `train_grpo`?"),
    ],
)
def test_what_is_wrong_with_the_whole_file_is_one_line(tmp_path: Path, overlay: str, message: str) -> None:
    """A rule over two sections names no key; a model that two sections share is named once, where it stands."""
    path = tmp_path / "params.yaml"
    path.write_text(f"extends: {ROOT / 'params/smoke.yaml'}\n{overlay}")
    with pytest.raises(PipelineError) as refused:
        load_params(path)
    assert str(refused.value).startswith(f"{path}:{message}")
    assert "\n" not in str(refused.value)


def test_the_overlay_for_cpus_makes_a_run_for_cpus_of_a_preset_for_gpus(tmp_path: Path) -> None:
    """The user names the model, and nothing else."""
    path, folder = tmp_path / "own.yaml", ROOT / "params"
    path.write_text(
        f"extends: [{folder}/qwen-1.5b.yaml, {folder}/overlays/cpu.yaml]\ntrain_sft: {{model: {{base: x}}}}\n"
    )
    params = load_params(path)
    grpo = params.train_grpo
    assert [grpo.sampler.vllm, params.evaluate.vllm, grpo.engine.lora, params.train_sft.engine.lora] == [None] * 4
    assert grpo.sampler.correction == CorrectionConfig()
    assert contradictions(params) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_params_file_reads_the_same_in_full(path: Path, tmp_path: Path) -> None:
    """What is kept of a run, and printed by `grpo-pipeline config`, is a params file that means the same."""
    params = load_params(path)
    (tmp_path / "params.yaml").write_text(as_yaml(params))
    assert load_params(tmp_path / "params.yaml") == params
    assert Params.model_validate(stage_sections(params)) == params


class _Machine(Config):
    answer: AnswerPolicy = AnswerPolicy.BOXED
    num_processes: Annotated[int, Operational] = 8


class _Machines(Config):
    by_name: dict[str, _Machine]
    pair: tuple[int, _Machine] = (2, _Machine())
    base: Path = Path("a/b")
    whole: Annotated[_Machine, Operational] = _Machine()


def test_operational_keys_are_left_out_at_any_depth() -> None:
    """In a section, a mapping and a tuple, and a section as a whole."""
    machine = {"answer": "boxed"}
    assert without_operational(_Machines(by_name={"x": _Machine()})) == {
        "by_name": {"x": machine},
        "pair": [2, machine],
        "base": "a/b",
    }
