"""The params of a run: a params file, with single keys that the command line sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from components.preflight.config import Params, as_yaml, write_sections, wrong_params
from components.register.checks import list_storage
from components.shared.config import own_sections, read_params
from components.shared.errors import PipelineError, raise_all
from components.shared.lineage import flat

_SET_PREFIX = "# set: "  # beginning of the comment lines that name the keys which a params file or the command line set


def load(path: Path, settings: Sequence[str] = ()) -> Params:
    """Return the params in a file, changed by settings such as `train_grpo.num_steps=10`, whose values are YAML.

    `null` resets a key to its default; a number in a key is the index of a list item. PipelineError names all problems.
    """
    values = read_params(path)
    keys = [_set(values, setting) for setting in settings]
    raise_all(wrong_params(values, path, keys))
    return Params.model_validate(values)


def show(params: Path, settings: Sequence[str], sections: Path | None) -> None:
    """Print the params with all defaults, or write them to files in the folder `sections`.

    `dvc repro` begins with the latter: PipelineError if its last stage could not store the policy.
    """
    config = load(params, settings)
    if sections:
        raise_all(list_storage(config.register))
        write_sections(config, sections)
        print(f"{sections}: has the params, and a file for each stage")
    else:
        print(as_yaml(config), end="")


def heading(path: Path, settings: Sequence[str]) -> str:
    """Return the comment at the top of a run's params: the file, and the keys that the file and the user set."""
    lines = own_keys(path)  # empty unless `path` has the params of a run; then its file's own keys are those set
    if not lines:
        values = (each for name, section in own_sections(path).items() for each in flat(name, section))
        lines = [f"{key}: {value}" for key, value in values]
    for setting in settings:
        name = setting.partition("=")[0]
        # The setting replaces the key and all keys below it.
        lines = [line for line in lines if not f"{line.partition(': ')[0]}.".startswith(f"{name}.")]
        lines.append(" ".join(setting.replace("=", ": ", 1).split()))
    return f"# {path} with all defaults\n" + "".join(f"{_SET_PREFIX}{line}\n" for line in lines)


def own_keys(path: Path) -> list[str]:
    """Return the lines `key: value` in the heading of a run's params: what a params file and its user set."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line.removeprefix(_SET_PREFIX) for line in lines if line.startswith(_SET_PREFIX)]


def _set(values: Any, setting: str) -> str:
    """Set the key of a setting `KEY=VALUE` in the sections, and return the key."""
    name, equals, text = setting.partition("=")
    if not equals or not name:
        raise PipelineError(f"--set {setting}: write KEY=VALUE, such as train_grpo.num_steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise PipelineError(f"--set {setting}: the value is not valid YAML; put it into quotes") from None
    *parents, last = name.split(".")
    if not parents:
        raise PipelineError(
            f"--set {setting}: no stage is named; expected STAGE.KEY=VALUE, such as train_grpo.num_steps=100"
        )
    for parent in parents:
        values = _child(values, parent, name)
    if isinstance(values, list):
        _child(values, last, name)  # for its error if there is no such item
        values[int(last)] = value
    elif value is None:
        values.pop(last, None)
    else:
        values[last] = value
    return name


def _child(values: Any, part: str, name: str) -> Any:
    """Return the item of a list or mapping for one part of the key `name`; a missing mapping is created."""
    if isinstance(values, list):
        if not part.isdecimal() or int(part) >= len(values):
            raise PipelineError(f"--set {name}: the list has items 0 to {len(values) - 1}, no `{part}`")
        return values[int(part)]
    child = values.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise PipelineError(f"--set {name}: `{part}` is {child!r:.40} and has no keys")
    return child
