import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_outside_a_checkout_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    """An installed copy has neither params files nor a lock: it says what to do, whatever the command."""
    for package in ("components", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from pipelines.cli import main; raise SystemExit(main())", "run"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path} is not a checkout of grpo-pipeline")
