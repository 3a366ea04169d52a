"""The whole graph, every stage in a container of its image, against a run on this machine."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import STAGES
from components.shared.images import GPU
from components.shared.jsonl import read_json
from components.shared.lineage import FILE_NAME, digest, read
from pipelines.run.stages import arguments, load_stage
from tests.images import engine
from tests.images.engine import ANYBODY, Image
from tests.pipelines.project import FinishedRun, bytes_in, copy_project, unmoved
from tests.presets import preset, write_params

pytestmark = [pytest.mark.long(minutes=2), pytest.mark.timeout(3600)]

_WITH_ENVIRONMENT = {"provenance.json", "report.html", "model_card.md", "version.json"}
"""Files that name the environment of the run, or are about one that does."""


def _run_in_containers(folder: Path, images: dict[str, Image]) -> None:
    """Run each stage of the smoke preset in its image, as a user that no image knows."""
    copy_project(folder)
    write_params(folder / "params.yaml", preset())
    subprocess.run(["chmod", "-R", "a+rwX", str(folder)], check=True)
    for parent in list(folder.parents)[:2]:
        parent.chmod(0o755)
    for stage in map(load_stage, STAGES):
        image = images["gpu" if stage.image == GPU else "light"]
        command = ["python3", "-m", f"components.{stage.name}", *arguments(stage, folder, fresh=False)]
        image.run("env", "OMP_NUM_THREADS=1", *command, folder=folder, user=ANYBODY)


def test_artifacts_are_the_same_with_and_without_containers(tmp_path: Path) -> None:
    """Every file of every stage has the same bytes, but for times, and for what names the environment.

    Here the hub's client may go online, as on users' machines. The version that is registered in a container names the
    revision of its image, so that whoever fetches it can build the images again.
    """
    engine.require()
    images, contained = engine.build(), tmp_path / "contained"
    _run_in_containers(contained, images)
    project = copy_project(tmp_path / "plain")
    started = project.start("run", "--params", "params/smoke.yaml", variables={"HF_HUB_OFFLINE": "0"})
    plain = FinishedRun.of(project, started, timeout_s=1200)
    assert plain.exit_code == 0, plain.printed + plain.errors
    compared = 0
    for stage, folders in plain.outputs.items():
        for name in folders.keys() - {"timings", "registration"}:
            one, other = _content(contained / "artifacts" / stage / name), _content(folders[name])
            assert one == other, f"{stage}: {name}"
            compared += len(one)
    assert compared > 30
    trained = plain.outputs
    registrations = (contained / "artifacts/register/registration", trained["register"]["registration"])
    registered = [read_json(folder / "version.json")["policy_digest"] for folder in registrations]
    assert registered == [digest(trained["train_grpo"]["policy"])] * 2
    assert unmoved(trained["train_grpo"]["policy"], trained["train_sft"]["reference"]) == []
    command = ["git", "-c", "safe.directory=*", "-C", str(contained / "registry"), "log", "-1", "--format=%B"]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert images["gpu"].name.rpartition(":")[2].removesuffix("-cpu") in message


def _content(folder: Path) -> dict[str, Any]:
    """Digests of an artifact's files, without those that name the environment, and its stages."""
    made_by = read(folder)
    assert made_by
    files = {name: digest for name, digest in bytes_in(folder).items() if name not in _WITH_ENVIRONMENT}
    return {**files, FILE_NAME: made_by.stages}
