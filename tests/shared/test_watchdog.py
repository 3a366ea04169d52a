"""Folders in memory that no run leaves behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.shared.watchdog import memory_folder
from tests.cluster.processes import ROOT, wait_until

_COMMAND = """
import sys, time
from pathlib import Path
from components.shared.watchdog import memory_folder
with memory_folder(Path(sys.argv[1]), Path(sys.argv[1]) / "otherwise") as folder:
    (folder / "3").mkdir()
    (folder / "3" / "model.safetensors").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process with a folder that holds weights; its output begins with the path."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    arguments = [sys.executable, "-c", _COMMAND, str(tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        process.kill()


def _folder(command: "subprocess.Popen[str]") -> Path:
    assert command.stdout is not None
    folder = Path(command.stdout.readline().strip())
    assert folder.match(f"/dev/shm/grpo-pipeline-{command.pid}-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.glob("*/*"))
    return folder


def _watchdogs(folder: Path) -> list[int]:
    """The processes that are to remove a folder."""
    remaining = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder) in words:
            remaining.append(int(path.name))
    return remaining


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_folder_of_a_killed_run_is_removed(command: "subprocess.Popen[str]", whole_group: bool) -> None:
    """After SIGKILL of the process or of its group; nothing else has to run for that."""
    folder = _folder(command)
    (os.killpg if whole_group else os.kill)(command.pid, signal.SIGKILL)
    wait_until(lambda: not folder.exists() and not _watchdogs(folder))


@pytest.mark.slow
def test_next_run_removes_what_a_killed_watchdog_leaves(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Where run and watchdog are killed together."""
    folder = _folder(command)
    for process in (*_watchdogs(folder), command.pid):
        os.kill(process, signal.SIGKILL)
    command.wait()
    assert folder.exists()
    with memory_folder(tmp_path, tmp_path / "otherwise"):
        assert not folder.exists()


def test_folder_and_watchdog_end_with_the_block(tmp_path: Path) -> None:
    """In any case."""
    with memory_folder(tmp_path, tmp_path / "otherwise") as folder:
        wait_until(lambda: len(_watchdogs(folder)) == 1)
    assert not folder.exists()
    assert not _watchdogs(folder)


def test_weights_too_large_for_memory_go_to_the_disk(tmp_path: Path) -> None:
    """To the other folder, which is removed as well."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(shutil.disk_usage("/dev/shm").total)
    with memory_folder(tmp_path, tmp_path / "otherwise") as folder:
        assert folder == tmp_path / "otherwise"
    assert not folder.exists()
