"""The params of a run: those of a file, with single keys set on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from components.preflight.config import Params, as_yaml, write_sections, wrong_params
from components.shared.config import own_sections, read_params
from components.shared.errors import PipelineError, raise_all
from components.shared.lineage import flat

_OWN = "set: "


def load(path: Path, settings: Sequence[str] = ()) -> Params:
    """Return the params in a file with settings such as `train_grpo.num_steps=10`, whose values are YAML.

    `null` resets a key to its default; a number in a key is the index of a list item. PipelineError with all problems:
    those of the file with its line, those of a setting with its key.
    """
    values = read_params(path)
    keys = [_set(values, setting) for setting in settings]
    wrong = zip(wrong_params(values, path), wrong_params(values), strict=True)
    raise_all([f"--set {line}" if _is_about(line, keys) else placed for placed, line in wrong])
    return Params.model_validate(values)


def show(params: Path, settings: Sequence[str], sections: Path | None) -> None:
    """Print the params in a file, or write the section of each stage to a file in the folder `sections`."""
    config = load(params, settings)
    if sections:
        write_sections(config, sections)
    else:
        print(as_yaml(config), end="")


def heading(path: Path, settings: Sequence[str]) -> str:
    """Return the comment at the top of a run's params: the file, and the keys that the file and the user set."""
    own = own_keys(path)  # if `path` has the params of a run
    if not own:
        keys = (each for name, section in own_sections(path).items() for each in flat(name, section))
        own = [f"{key}: {value}" for key, value in keys]
    own += [" ".join(setting.replace("=", ": ", 1).split()) for setting in settings]
    return "".join(f"# {line}\n" for line in (f"{path} with all defaults", *(f"{_OWN}{each}" for each in own)))


def own_keys(path: Path) -> list[str]:
    """Return the keys with their values in the heading of a run's params."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line.removeprefix(f"# {_OWN}") for line in lines if line.startswith(f"# {_OWN}")]


def _is_about(line: str, keys: Sequence[str]) -> bool:
    name = f"{line.partition(':')[0]}."
    return any(f"{key}.".startswith(name) or name.startswith(f"{key}.") for key in keys)


def _set(values: Any, setting: str) -> str:
    """Set one key in the sections and return its name."""
    name, equals, text = setting.partition("=")
    if not equals or not name:
        raise PipelineError(f"--set {setting}: write KEY=VALUE, such as train_grpo.num_steps=10")
    try:
        new = yaml.safe_load(text)
    except yaml.YAMLError:
        raise PipelineError(f"--set {setting}: the value is not valid YAML; put it into quotes") from None
    *parents, last = name.split(".")
    if not parents:
        raise PipelineError(f"--set {setting}: name a key of a stage, such as train_grpo.num_steps")
    for part in parents:
        values = _inside(values, part, name)
    if isinstance(values, list):
        _inside(values, last, name)
        values[int(last)] = new
    elif new is None:
        values.pop(last, None)
    else:
        values[last] = new
    return name


def _inside(values: Any, part: str, name: str) -> Any:
    """Return the value below a part of a key; a missing mapping is made."""
    if isinstance(values, list):
        if not part.isdecimal() or int(part) >= len(values):
            raise PipelineError(f"--set {name}: the list has items 0 to {len(values) - 1}, no `{part}`")
        return values[int(part)]
    below = values.setdefault(part, {})
    if not isinstance(below, dict | list):
        raise PipelineError(f"--set {name}: `{part}` is {below!r:.40} and has no keys")
    return below
