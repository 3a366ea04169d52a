"""The checks of `make gpu-check` where there is no GPU: that each can be tried, and what is written of its result."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import gpu_check
from tests.gpu.gpu_check import Check, main, run


def test_without_a_gpu_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2; no page that looks like a result."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "there is no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("code", "minutes", "result", "evidence"),
    [
        ("print('first'); print('12 of 12')", 1, "passed", "12 of 12"),
        ("raise ValueError('the head differs')", 1, "missed", "exit code 1: ValueError: the head differs"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1, "missed", "exit code -9: it printed nothing"),
        ("import time; time.sleep(600)", 0.005, "missed", "not done within 0.005 minutes: it printed nothing"),
    ],
)
def test_a_check_that_fails_or_hangs_is_recorded(
    tmp_path: Path, code: str, minutes: float, result: str, evidence: str
) -> None:
    """With the last line that it printed; what it printed is in its log."""
    row = run(Check("one", "one check", minutes, [sys.executable, "-c", code]), tmp_path / "one")
    assert (row.result, row.evidence) == (result, evidence)
    assert (tmp_path / "one/log").exists()


@pytest.mark.parametrize(("reason", "is_missed"), [("needs a GPU: its kernels", True), ("needs chromium", False)])
def test_a_skipped_test_of_the_gpu_is_a_miss(tmp_path: Path, reason: str, is_missed: bool) -> None:
    """Tests that skip themselves would pass for tests that passed."""
    skipped = f'<testcase name="a"/><testcase name="b"><skipped message="{reason}"/></testcase>'
    (tmp_path / "junit.xml").write_text(f'<testsuites><testsuite tests="2">{skipped}</testsuite></testsuites>')
    if is_missed:
        with pytest.raises(ValueError, match="1 tests that need a GPU were skipped"):
            gpu_check._junit(tmp_path, "")
    else:
        assert gpu_check._junit(tmp_path, "") == "1 tests passed, 1 skipped"


@pytest.mark.slow
def test_a_check_passes_on_a_cpu(tmp_path: Path) -> None:
    """A check that was not run has a reason."""
    names = ["families", "step-1.5b", "gsm8k"]
    assert main(["--device", "cpu", "--out", str(tmp_path), "--only", *names]) == 0
    rows = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    results = [row["result"] for row in rows]
    assert results == ["passed", *["not run"] * (len(rows) - 1)], rows
    assert all(row["evidence"] for row in rows)
