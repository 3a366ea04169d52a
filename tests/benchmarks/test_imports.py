import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IN_TRL_ENVIRONMENT = {"trl_step"}


@pytest.mark.slow
def test_benchmarks_can_be_imported() -> None:
    """They run by hand only, so nothing else would notice that what they import has moved."""
    names = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - IN_TRL_ENVIRONMENT)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
