import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from components.cluster import collector, kube
from components.cluster.collector import Limits, collect, in_use
from components.shared import durable
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, require_unchanged, write_reference
from tests.cluster.launched import KilledError, Launched
from tests.cluster.processes import ROOT
from tests.fake_cluster import Fault

DAYS_S = timedelta(days=1).total_seconds()
LIMITS = Limits(finished_s=30 * DAYS_S, unfinished_s=90 * DAYS_S)


def run_id(number: int) -> str:
    """The id of a run, as Kubeflow Pipelines makes them."""
    return f"{number:08x}-1111-4222-8333-444455556666"


def key(number: int) -> str:
    """The name of a folder of unfinished work."""
    return f"{number:016x}"


class Volume:
    """A shared volume, and who uses what is on it."""

    def __init__(self, mount: Path) -> None:
        self.mount, self.root = mount, mount / "grpo-pipeline"
        self.root.mkdir(parents=True)
        self.used = ""

    def run(self, number: int, *, age_days: float, **files: str) -> Path:
        """Make the folder of a run with a model and these texts in files of the model."""
        model = {"model.safetensors": "weights", PIPELINE_FILE: "{}", **files}
        paths = {f"train_sft/reference/{name.replace('_json', '.json')}": text for name, text in model.items()}
        return self.make(self.root / run_id(number), age_days, paths)

    def work(self, number: int, *, age_days: float, call: str = "") -> Path:
        """Make a folder of unfinished work, with the call of its ranks."""
        files = {"checkpoints/step-000040/weights": "", "launch/job.json": call, "run.lock": ""}
        return self.make(self.root / "work/train_grpo" / key(number), age_days, files)

    def record(self, number: int, *, age_days: float) -> Path:
        """Make the record of finished work."""
        return self.make(self.root / "work/train_grpo" / f"{key(number)}.json", age_days, {"": "{}"})

    def make(self, path: Path, age_days: float, files: Mapping[str, str]) -> Path:
        """Make files below a path, or at it, and return it."""
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        return self.age(path, age_days)

    def age(self, path: Path, days: float) -> Path:
        """Set the times of everything below a path back by so many days."""
        then = time.time() - days * DAYS_S
        for each in (*path.rglob("*"), path):
            os.utime(each, (then, then))
        return path

    def collect(self, limits: Limits = LIMITS, *, dry_run: bool = False) -> str:
        """Collect once."""
        return collect(self.mount, limits, lambda: self.used, dry_run=dry_run)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """An empty volume."""
    return Volume(tmp_path / "volume")


def test_old_folders_are_removed_and_young_ones_kept(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind has its own limit; one line per folder tells what was removed, and the summary what that freed.

    Unfinished work outlives the folder of its run, and every new run that lists it locks it for a moment.
    """
    old = [volume.run(1, age_days=31), volume.work(1, age_days=91), volume.record(1, age_days=31)]
    call = f"/grpo-pipeline/{run_id(1)}/m"
    young = [volume.run(2, age_days=29), volume.work(2, age_days=89, call=call), volume.record(2, age_days=29)]
    assert not durable.is_locked(old[1] / "run.lock")
    assert volume.collect(dry_run=True) == "would free 0.00 GiB; 2 folders of runs and of unfinished work are kept"
    assert all(path.exists() for path in (*old, *young))
    capsys.readouterr()
    assert volume.collect() == "freed 0.00 GiB; 2 folders of runs and of unfinished work are kept"
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in printed] == [f"collector: removes {path}" for path in old[:2]]
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in young)
    volume.collect(Limits(20 * DAYS_S, 999 * DAYS_S))
    assert [path.exists() for path in young] == [False, True, False]


@pytest.mark.parametrize("changed", ["train_sft/reference/model.safetensors", "train_sft", ""])
def test_a_change_anywhere_makes_a_run_young(volume: Volume, changed: str) -> None:
    """Of a file or of a folder, however deep; so does a stage of any run that reads its model."""
    run, reference = volume.run(1, age_days=0, lineage_json="{}"), volume.mount / "reference"
    write_reference(reference, run / "train_sft/reference")
    volume.age(run, 99)
    if changed:
        os.utime(run / changed)
    else:
        require_unchanged(reference, json.loads((reference / PIPELINE_FILE).read_text())["digest"])
    volume.collect()
    assert run.exists()


FOREIGN = (
    "registry/.git/HEAD",
    "registry-storage/files/md5/00/11",
    "models/qwen/model.safetensors",
    "grpo-pipeline/registry/.git/HEAD",
    f"grpo-pipeline/{run_id(7)}/.git/HEAD",  # a registry that is named like a run
    f"grpo-pipeline/{run_id(8)}/keep",
    "grpo-pipeline/work/train_grpo/notes/a.txt",
    "grpo-pipeline/work/train_grpo/notes.json",
    "grpo-pipeline/.mine.removed/a.txt",
)


def test_nothing_else_is_touched(volume: Volume) -> None:
    """However old it is."""
    for path in FOREIGN:
        volume.make(volume.mount / path, 999, {"": ""})
    volume.age(volume.mount, 999)
    run = volume.run(1, age_days=999)
    volume.collect()
    assert not run.exists()
    assert all((volume.mount / path).is_file() for path in FOREIGN)


def test_stages_with_folders_of_a_run_are_known() -> None:
    """Those whose task takes the run's id, beside the one that registers from what they have made."""
    names = {path.parent.name for path in (ROOT / "components").glob("*/component.py")}
    tasks = {name: getattr(import_module(f"components.{name}.component"), name) for name in names}
    takes_id = {name for name, task in tasks.items() if "run_id" in task.component_spec.inputs}
    assert takes_id | {"inputs"} == collector._MADE_BY_STAGES


def test_links_are_not_followed(volume: Volume, tmp_path: Path) -> None:
    """Neither as a run's folder nor in one."""
    (tmp_path / "elsewhere/train_sft").mkdir(parents=True)
    run = volume.run(1, age_days=0)
    (run / "train_sft/link").symlink_to(tmp_path / "elsewhere")
    (volume.root / run_id(2)).symlink_to(tmp_path / "elsewhere")
    volume.age(tmp_path, 99)
    volume.collect(Limits(-DAYS_S, -DAYS_S))  # links are as young as they are
    assert not run.exists()
    assert (volume.root / run_id(2) / "train_sft").exists()


@pytest.mark.parametrize("use", ["workflow", "young run", "young run over another", "work with a job"])
def test_run_that_is_referred_to_is_kept(volume: Volume, use: str) -> None:
    """By what is active or young itself; once that is gone, it is removed."""
    run = volume.run(1, age_days=99)
    place = f"/work/grpo-pipeline/{run_id(1)}/train_sft/reference"
    if use == "workflow":
        volume.used = json.dumps({"train_sft.model.base": place})
    elif use == "young run":
        volume.run(2, age_days=0, pipeline_json=place)
    elif use == "young run over another":
        volume.run(2, age_days=0, lineage_json=place.replace(run_id(1), run_id(3)))
        volume.run(3, age_days=99, lineage_json=place)
    else:
        volume.work(1, age_days=99, call=place)
        volume.used = json.dumps({"command": ["agent", f"/work/grpo-pipeline/work/train_grpo/{key(1)}/launch"]})
    volume.collect()
    assert run.exists()
    volume.used = ""
    volume.age(volume.root, 99)
    volume.collect()
    assert not run.exists()


@pytest.mark.parametrize("name", ["run.lock", "checkpoints/writer.lock"])
def test_locked_work_is_kept_with_the_runs_it_refers_to(volume: Volume, name: str) -> None:
    """Its run is in another namespace, so the cluster does not tell; the lock is that of a launcher or a rank."""
    run = volume.run(1, age_days=99)
    folder = volume.work(1, age_days=0, call=f"/work/grpo-pipeline/{run_id(1)}/m")
    lock = durable.lock_folder(folder / name)
    for is_kept in (True, False):
        volume.age(folder, 99)
        volume.collect()
        assert [run.exists(), folder.exists()] == [is_kept] * 2
        lock.release()


@pytest.mark.parametrize("operation", range(24))
def test_interrupted_collection_leaves_whole_folders(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, operation: int
) -> None:
    """A folder is complete or absent at any moment, and the next call removes the rest."""
    made = [volume.run(1, age_days=99), volume.work(1, age_days=99), volume.run(2, age_days=99)]
    kept = volume.run(3, age_days=0)
    contents = {path: {*path.rglob("*")} for path in (*made, kept)}
    left = itertools.count(operation, -1)

    def until_killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left) <= 0:
                raise KilledError
            return real(*arguments, **options)

        return call

    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, until_killed(getattr(os, name)))
    with suppress(KilledError):
        volume.collect()
    monkeypatch.undo()
    for path, content in contents.items():
        assert not path.exists() or {*path.rglob("*")} == content
    volume.collect()
    assert [path.exists() for path in (*made, kept)] == [False, False, False, True]
    assert [path.name for path in volume.root.iterdir() if "removed" in path.name] == []


def test_what_cannot_be_removed_is_named(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything else was removed."""
    made = [volume.run(1, age_days=99), volume.run(2, age_days=99)]
    rmtree = shutil.rmtree
    refused = volume.root / f".{run_id(1)}.removed"

    def remove(path: Path, **options: Any) -> None:
        if path != refused:
            rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(PipelineError, match=rf"^{refused}: could not be removed; .* writable for group 0"):
        volume.collect()
    assert not any(path.exists() for path in made)
    monkeypatch.undo()
    volume.collect()
    assert not refused.exists()


def test_only_one_collector_works_at_a_time(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one ends at once, and what a run locks meanwhile is kept; without a volume there is nothing to do."""
    run, folder = volume.run(1, age_days=99), volume.work(1, age_days=99)
    set_aside, locks = durable.set_aside, []

    def remove(path: Path) -> Path:
        locks.append(durable.lock_folder(folder / "run.lock"))
        return set_aside(path)

    def ask() -> str:
        with pytest.raises(durable.InUseError):
            volume.collect()
        monkeypatch.setattr(durable, "set_aside", remove)
        return ""

    collect(volume.mount, LIMITS, ask)
    assert not run.exists()
    assert folder.exists()
    locks[0].release()
    with pytest.raises(PipelineError, match=r"nowhere: no such folder; does this pod mount the shared volume\?"):
        collect(volume.mount / "nowhere", LIMITS, str)


def test_the_cluster_is_asked_for_workflows_and_jobs(job: Launched) -> None:
    """What they name is in the text: ids, parameters, and the folder of a job; not that of an ended workflow."""
    job.play()
    job.submit_and_die()
    job.cluster.add_workflow("runs", **{kube.KFP_RUN_ID: run_id(1)})
    job.cluster.add_workflow("ended", **{kube.KFP_RUN_ID: run_id(2), kube.COMPLETED: "true"})
    text = in_use(job.server.namespace)
    assert run_id(1) in text
    assert run_id(2) not in text
    assert job.run_id in text
    assert str(job.job.folder) in text


def test_nothing_is_removed_while_the_cluster_does_not_answer(
    job: Launched, volume: Volume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and the exit code of what may pass; otherwise the program prints what it has done."""
    run = volume.run(1, age_days=31)
    monkeypatch.setattr(collector, "RetryPolicy", lambda limit_s: kube.RetryPolicy(limit_s=0))
    monkeypatch.setattr(sys, "argv", ["collector", "--volume", str(volume.mount), "--finished-days", "30"])
    fault = Fault("GET", "/workflows", status=503, times=100)
    job.server.faults.add(fault)
    with pytest.raises(SystemExit, match="75"):
        collector.main()
    assert re.fullmatch(r"error: collector: the API server did not list [^\n]*\n", capsys.readouterr().err)
    assert run.exists()
    job.server.faults.clear()
    collector.main()
    assert not run.exists()
    monkeypatch.setattr(sys, "argv", ["collector", "--finished-days", "0"])
    with pytest.raises(SystemExit, match="2"):
        collector.main()
