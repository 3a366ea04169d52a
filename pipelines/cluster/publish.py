"""Publish the graph as a new version of one pipeline, for people who start runs on Kubeflow's page."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.shared.errors import PipelineError
from pipelines.cluster.kubeflow import Kubeflow

if TYPE_CHECKING:
    from pipelines.cluster.submission import Package

_CHECKOUT = Path(__file__).parents[2]
_IS_SUBSTRING = 9
"""Number of this filter operation in Kubeflow's API."""
_DIGITS = 12  # of git revisions and digests
_LONGEST_STEM = 40


def build(base: str, variant: str, registry: str | None) -> dict[str, str]:
    """Build and push the images; return their names as keys of `deployment`: `image_light` and `image_gpu`."""
    if not registry:
        raise PipelineError("--build: name the registry to push to, with --registry or IMAGE_REGISTRY")
    command = [sys.executable, "-m", "images.build", "--push", "--registry", registry]
    command += ["--base", base, "--variant", variant]
    done = subprocess.run(command, cwd=_CHECKOUT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PipelineError("the images were not built and pushed; see above")
    names = done.stdout.split()
    return {f"image_{kind}": next(each for each in names if f"/python-{kind}:" in each) for kind in ("light", "gpu")}


def publish(kubeflow: Kubeflow, package: "Package", params: Path) -> Iterator[str]:
    """Upload a compiled pipeline as a new version, unless a version has the same content; yield lines about it.

    The version is named by the params file with the form's initial values, the git revision and a digest.
    """
    from pipelines.graph import DESCRIPTION, NAME

    client, digest = kubeflow.client, package.digest[:_DIGITS]
    known = kubeflow.pages(client.list_pipelines, "pipelines", page_size=100, namespace=kubeflow.user_namespace)
    pipeline = next((each for each in known if each.display_name == NAME), None)
    if pipeline is None:
        # It is created without a version, because its first version would get the name of the pipeline.
        body = {"name": NAME, "display_name": NAME, "description": DESCRIPTION, "namespace": kubeflow.user_namespace}
        pipeline = client._pipelines_api.pipeline_service_create_pipeline(body)
    predicate = {"operation": _IS_SUBSTRING, "key": "display_name", "stringValue": digest}
    options = {"page_size": 10, "filter": json.dumps({"predicates": [predicate]})}
    versions = partial(client.list_pipeline_versions, pipeline.pipeline_id)
    version = next(kubeflow.pages(versions, "pipeline_versions", **options), None)
    if version is None:
        stem = re.sub(r"[^a-z0-9]+", "-", params.stem.lower())[:_LONGEST_STEM].strip("-")
        name = "-".join(filter(None, [stem, revision(), digest]))
        about = f"{origin(params)}; {', '.join(package.images)}"
        with redirect_stdout(io.StringIO()):  # the client prints an address
            version = client.upload_pipeline_version(
                str(package.path), name, pipeline_id=pipeline.pipeline_id, description=about
            )
        yield f"{NAME}  version {name} published"
    else:
        yield f"{NAME}  unchanged: version {version.display_name} has the same content"
    yield f"{kubeflow.endpoint}/#/pipelines/details/{pipeline.pipeline_id}/version/{version.pipeline_version_id}"


def revision() -> str:
    """Return the git revision of the checkout, with `-dirty` if files differ from it; empty without git."""
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", f"--abbrev={_DIGITS}", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def origin(file: Path) -> str:
    """Return a file's path and revision for a description, such as `params/smoke.yaml at 0123456789ab`."""
    path, commit = file.resolve(), revision()
    name = path.relative_to(_CHECKOUT) if path.is_relative_to(_CHECKOUT) else path.name
    return f"{name} at {commit}" if commit else str(name)
