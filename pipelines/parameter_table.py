"""The page that explains the run form: `python -m pipelines.parameter_table > docs/parameters.md`."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from components.cluster.config import ClusterConfig
from components.preflight.form import CLUSTER, PREFIX, is_rest

_FULL, _MINIMAL = "grpo_post_training_on_cluster", "grpo_post_training_minimal"
_GROUPS = {
    "base": "The model",
    "cluster": "The cluster",
    "data": "The data",
    "grpo": "GRPO",
    "image": "Images",
    "registry": "Where versions go",
    "run": "The run",
    "secret": "Secrets",
    "section": "Everything else",
}
_KINDS = {
    "STRING": "text",
    "NUMBER_INTEGER": "whole number",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "true or false",
    "STRUCT": "JSON object",
    "LIST": "JSON list",
}
_TABLE = "| parameter | kind | default | minimal | meaning |\n|---|---|---|---|---|\n"
_HEADER = """# Parameters of a run on a cluster

Written by `make compile` from the compiled pipelines; not to be edited. Kubeflow's form shows the parameters in this
order. `grpo-post-training-on-cluster` has all of them, `grpo-post-training-minimal` those that are marked; the others
are there as they were compiled. Before anything else `preflight` checks all of them, and names all that is wrong.
"""
_REST = """
What has no parameter of its own is a key of one of these, as in `params.yaml`; the keys are explained in
`components/<stage>/config.py`. A key that a parameter above stands for is refused here. By default each is what
`params.yaml` was when the pipeline was compiled.
"""
_CLUSTER_KEYS = f"""
## Keys of `{PREFIX}{CLUSTER}`

What a training job asks for beside the parameters above.

| key | default | meaning |
|---|---|---|
"""


def page(full: Mapping[str, Any], minimal: Iterable[str]) -> str:
    """Return the page for the parameters of the long form, as its compiled document has them."""
    groups = itertools.groupby(sorted(full.items()), key=lambda item: item[0].partition("_")[0])
    text = _HEADER + "".join(_group(name, dict(parameters), set(minimal)) for name, parameters in groups)
    return text + _CLUSTER_KEYS + "".join(_cluster_keys())


def _group(name: str, parameters: Mapping[str, Any], minimal: set[str]) -> str:
    intro = _REST if f"{name}_" == PREFIX else ""
    rows = [_row(parameter, each, parameter in minimal) for parameter, each in parameters.items()]
    return "".join([f"\n## {_GROUPS[name]}\n{intro}\n", _TABLE, *rows])


def _row(name: str, parameter: Mapping[str, Any], in_minimal: bool) -> str:
    default = "" if name.startswith(PREFIX) else _code(parameter["defaultValue"], parameter["parameterType"])
    kind, meaning = _KINDS[parameter["parameterType"]], " ".join(parameter["description"].split())
    return f"| `{name}` | {kind} | {default} | {'yes' if in_minimal else ''} | {meaning} |\n"


def _code(value: Any, kind: str) -> str:
    if value == "":
        return "empty"
    if kind == "NUMBER_INTEGER":
        value = int(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cluster_keys() -> Iterable[str]:
    for name, field in ClusterConfig.model_fields.items():
        if is_rest((CLUSTER, name)):
            meaning = " ".join((field.description or "").split())
            yield f"| `{name}` | {_code(field.get_default(), '')} | {meaning} |\n"


def main() -> None:
    """Print the page for the compiled pipelines in this folder."""
    forms = [_parameters(Path(__file__).with_name(f"{name}.yaml")) for name in (_FULL, _MINIMAL)]
    print(page(*forms), end="")


def _parameters(path: Path) -> dict[str, Any]:
    document = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    parameters: dict[str, Any] = document["root"]["inputDefinitions"]["parameters"]
    return parameters


if __name__ == "__main__":
    main()
