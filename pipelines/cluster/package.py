"""The compiled graph that a run is submitted with, and the parameters it takes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.shared import lineage
from components.shared.errors import PipelineError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C where it was built: a pipeline is a long document."""


@dataclass(frozen=True)
class Package:
    """A compiled pipeline in a file."""

    path: Path
    name: str
    types: dict[str, str]
    """Of each parameter, in Kubeflow's words: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    defaults: dict[str, Any]
    images: tuple[str, ...]
    """That its tasks run in."""
    digest: str
    """Of all that the file says."""


@contextmanager
def package(path: Path | None, params: Path) -> Iterator[Package]:
    """Yield the pipeline in a file, or else the one that this code compiles to with a params file."""
    if path is not None:
        yield read(path)
        return
    from components.preflight.config import load_params
    from pipelines.graph import write

    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as folder:
        compiled = Path(folder) / "pipeline.yaml"
        write(compiled, load_params(params))
        yield read(compiled)


def read(path: Path) -> Package:
    """Return the pipeline in a file; PipelineError for a file that holds none."""
    try:
        documents = [each for each in yaml.load_all(path.read_text(encoding="utf-8"), _LOADER) if each]
        parameters = documents[0]["root"].get("inputDefinitions", {}).get("parameters", {})
        name = documents[0]["pipelineInfo"]["name"]
        containers = [each["container"] for each in documents[0]["deploymentSpec"]["executors"].values()]
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
        raise PipelineError(f"{path}: is no compiled pipeline; `grpo-pipeline compile` writes one") from None
    return Package(
        path=path,
        name=name,
        types={each: definition["parameterType"] for each, definition in parameters.items()},
        defaults={each: one["defaultValue"] for each, one in parameters.items() if "defaultValue" in one},
        images=tuple(sorted({container["image"] for container in containers})),
        digest=lineage.value_digest(documents),
    )
