import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.cluster.watchdog import memory_folder

_ROOT = Path(__file__).parents[2]
_COMMAND = """
import sys, time
from pathlib import Path
from components.cluster.watchdog import memory_folder
with memory_folder(Path(sys.argv[1]), Path(sys.argv[1]) / "otherwise") as folder:
    (folder / "3").mkdir()
    (folder / "3" / "model.safetensors").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(600)
"""


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def command(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process with a folder that holds weights; its output begins with the path."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(tmp_path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def _folder(command: "subprocess.Popen[str]") -> Path:
    assert command.stdout is not None
    folder = Path(command.stdout.readline().strip())
    assert folder == Path(f"/dev/shm/grpo-pipeline-{command.pid}")
    assert list(folder.glob("*/*"))
    return folder


def _guards(folder: Path) -> list[int]:
    """The processes that were started to remove a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder) in words:
            found.append(int(path.name))
    return found


@pytest.mark.parametrize("whole_group", [False, True])
def test_the_weights_of_a_killed_run_leave_the_memory_by_themselves(
    command: "subprocess.Popen[str]", whole_group: bool
) -> None:
    """SIGKILL of the command, or of all processes of its group: nobody has to come to clean up, and nothing stays."""
    folder = _folder(command)
    (os.killpg if whole_group else os.kill)(command.pid, signal.SIGKILL)
    _wait_until(lambda: not folder.exists())
    _wait_until(lambda: not _guards(folder))


def test_what_is_left_without_a_guard_goes_with_the_next_run(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Should the guard have been killed as well, the next run removes the folder."""
    folder = _folder(command)
    for process in (*_guards(folder), command.pid):
        os.kill(process, signal.SIGKILL)
    command.wait()
    assert folder.exists()
    with memory_folder(tmp_path, tmp_path / "otherwise"):
        assert not folder.exists()


def test_the_folder_is_gone_after_its_block(tmp_path: Path) -> None:
    """So is its guard."""
    with memory_folder(tmp_path, tmp_path / "otherwise") as folder:
        _wait_until(lambda: len(_guards(folder)) == 1)
    assert not folder.exists()
    assert not _guards(folder)


def test_weights_too_large_for_the_memory_go_to_the_disk(tmp_path: Path) -> None:
    """The other folder is taken, and goes away as well."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(shutil.disk_usage("/dev/shm").total)
    with memory_folder(tmp_path, tmp_path / "otherwise") as folder:
        assert folder == tmp_path / "otherwise"
    assert not folder.exists()
