"""The whole graph, every stage in a container of its image, against the same graph without containers."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from components.shared.jsonl import read_json
from components.shared.lineage import FILE_NAME, digest, read
from tests.images import engine
from tests.pipelines.project import FinishedRun, Project, bytes_in, copy_project, unmoved

pytestmark = [pytest.mark.long(minutes=2), pytest.mark.timeout(3600)]

_WITH_ENVIRONMENT = {"provenance.json", "report.html", "model_card.md", "version.json"}
"""Files that name the environment of the run, or are about one that does."""
RUN = ("run", "--params", "params/smoke.yaml")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Both images, and Docker's API: the variables by which a run finds them."""
    engine.require()
    variables = engine.build()
    with engine.docker_api(tmp_path_factory.mktemp("api")) as address:
        yield {**variables, **address}


@pytest.fixture(scope="module")
def runs(api: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """The smoke preset, in containers and without; there the hub's client may go online, as on users' machines."""
    contained, plain = (_open_to_all(copy_project(tmp_path_factory.mktemp(name))) for name in ("contained", "plain"))
    with ThreadPoolExecutor(2) as pool:
        started = {
            "contained": pool.submit(_run, contained, {**api}, "--containers"),
            "plain": pool.submit(_run, plain, {"HF_HUB_OFFLINE": "0"}),
        }
        return {name: run.result() for name, run in started.items()}


def _open_to_all(project: Project) -> Project:
    """Let the images' user, who is nobody here, write into a project that belongs to root."""
    subprocess.run(["chmod", "-R", "a+rwX", str(project.folder)], check=True)
    for parent in list(project.folder.parents)[:2]:
        parent.chmod(0o755)
    return project


def _run(project: Project, variables: Mapping[str, str], *options: str) -> FinishedRun:
    return FinishedRun.of(project, project.start(*RUN, *options, variables=variables, umask=0), timeout_s=1200)


@contextmanager
def _at_second_stage(folder: Path, api: Mapping[str, str]) -> Iterator[tuple[Project, "subprocess.Popen[str]"]]:
    """A run in containers whose second stage has started."""
    project = _open_to_all(copy_project(folder))
    with project.start(*RUN, "--containers", variables=api, umask=0) as run:
        deadline = time.monotonic() + 180
        while True:
            assert time.monotonic() < deadline, "validate_data has not started"
            journals = [path.read_text() for path in folder.glob("outputs/runs/*/journal.jsonl")]
            if journals and '"stage": "validate_data", "event": "started"' in journals[0] and _containers(project):
                break
            time.sleep(0.02)
        yield project, run


def test_every_stage_runs_in_a_container(runs: Mapping[str, FinishedRun]) -> None:
    """The run ends well, what it shows is what a run without containers shows, and the images' user made its files."""
    contained, plain = runs["contained"], runs["plain"]
    assert contained.exit_code == 0, contained.printed + contained.errors
    assert plain.exit_code == 0, plain.printed + plain.errors
    headers = [[line for line in run.printed.splitlines() if line.startswith("[")] for run in (contained, plain)]
    assert headers[0] == headers[1]
    assert contained.errors == ""
    owners = {path.stat().st_uid for folders in contained.outputs.values() for path in folders.values()}
    assert owners == {65532}


def test_artifacts_are_the_same_with_and_without_containers(runs: Mapping[str, FinishedRun]) -> None:
    """Every file of every stage has the same bytes, but for times, and for what names the environment.

    The registration has digests of what does.
    """
    contained, plain = (runs[name].outputs for name in ("contained", "plain"))
    assert list(contained) == list(plain)
    compared = 0
    for title, folders in contained.items():
        for name in set(folders) - {"timings", "registration"}:
            one, other = _content(folders[name]), _content(plain[title][name])
            assert one == other, f"{title}: {name}"
            compared += len(one)
    assert compared > 30
    assert unmoved(contained["train_grpo"]["policy"], contained["train_sft"]["reference"]) == []


def _content(folder: Path) -> dict[str, Any]:
    """Digests of an artifact's files, without those that name the environment, and its stages."""
    made_by = read(folder)
    assert made_by
    files = {name: digest for name, digest in bytes_in(folder).items() if name not in _WITH_ENVIRONMENT}
    return {**files, FILE_NAME: made_by.stages}


def test_the_registered_version_names_the_revision_of_the_image(
    runs: Mapping[str, FinishedRun], api: Mapping[str, str]
) -> None:
    """Whoever fetches a version can build its images again; its policy is the one made without containers."""
    registrations = {name: run.outputs["register"]["registration"] / "version.json" for name, run in runs.items()}
    digests = {name: read_json(path)["policy_digest"] for name, path in registrations.items()}
    assert digests["contained"] == digests["plain"] == digest(runs["plain"].outputs["train_grpo"]["policy"])
    registry = runs["contained"].project.folder / "registry"
    command = ["git", "-c", "safe.directory=*", "-C", str(registry), "log", "-1", "--format=%B"]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert api["IMAGE_TAG"].removesuffix("-cpu") in message


def test_a_stopped_run_leaves_no_container(api: Mapping[str, str], tmp_path: Path) -> None:
    """Ctrl-C ends the container of the stage, which takes away what it has half written."""
    with _at_second_stage(tmp_path, api) as (project, run):
        run.send_signal(signal.SIGINT)
        stopped = FinishedRun.of(project, run)
    assert stopped.exit_code == 128 + signal.SIGINT
    assert _containers(project) == ""
    assert not list(project.folder.rglob("*.partial"))


def test_missing_images_are_named_before_anything_runs(api: Mapping[str, str], tmp_path: Path) -> None:
    """One line with what to do, and exit code 2."""
    ended = _run(copy_project(tmp_path), {**api, "IMAGE_TAG": "none"}, "--containers")
    assert ended.exit_code == 2
    assert ended.errors.count("\n") == 1
    assert "image localhost/grpo-pipeline/python-light:none is missing" in ended.errors
    assert not (tmp_path / "outputs").exists()


def _containers(project: Project) -> str:
    """Ids of the running containers of a project's runs."""
    listed, folder = json.loads(engine.podman("ps", "--format", "json")), str(project.folder)
    labels = {each["Id"]: (each["Labels"] or {}).get("grpo-pipeline/run", "") for each in listed}
    return "\n".join(name for name, label in labels.items() if label.startswith(folder))
