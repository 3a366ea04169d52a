"""Findings of the doctor, on this machine and on simulated ones with other programs and packages."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from components.preflight.config import Params
from pipelines import doctor
from pipelines.cli import main
from pipelines.doctor import unused_gpu
from tests.presets import preset

_GPU = "NVIDIA GeForce RTX 4090, 24564, 20000, 550.54"


@pytest.mark.parametrize(
    ("cuda", "is_used", "bf16", "expected"),
    [
        (None, False, True, ("error", "computes on CPUs, though there is a GPU", "make setup TORCH_BACKEND=auto")),
        ("13.0", False, True, ("error", "does not find the GPU", "CUDA 13.0 needs a newer driver")),
        ("12.4", True, False, ("warning", "which has no bfloat16", "engine.precision: fp32")),
        ("12.4", True, True, ("ok", "computes on the GPU", "")),
    ],
)
def test_torch_is_judged_by_the_gpu_that_is_there(
    cuda: str | None, is_used: bool, bf16: bool, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for CPUs on a machine with a GPU would train for days and say nothing."""
    answer = {"version": "2.13.0", "cuda": cuda, "gpu": is_used, "bf16": bf16}
    monkeypatch.setattr(doctor, "_nvidia", lambda: [_GPU])
    monkeypatch.setattr(doctor, "_ask_python", lambda script: answer)
    gpu, found = doctor._gpu_and_torch()
    assert gpu.state == "warning"  # another process holds its memory
    assert gpu.text.startswith("NVIDIA GeForce RTX 4090, 24 GiB")
    state, text, remedy = expected
    assert (found.state, text in found.text, remedy in found.remedy) == (state, True, True)
    assert (text in unused_gpu()) == (state == "error")  # the warning of a run
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpu() == ""


def test_a_torch_that_cannot_be_imported_is_an_error_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last line of what it printed."""
    (tmp_path / "torch.py").write_text("raise OSError('libcublasLt.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, found = doctor._gpu_and_torch()
    assert found.state == "error"
    assert found.text == "OSError: libcublasLt.so.13: cannot open shared object file"
    assert "make setup" in found.remedy


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outputs and the cache of models go."""
    monkeypatch.chdir(tmp_path)
    usage = namedtuple("usage", "free")
    for free_gib, state in ((1, "error"), (10, "warning"), (100, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free_gib: usage(free << 30))
        assert [finding.state for finding in doctor._disk()] == [state] * 2


@pytest.mark.parametrize(("precision", "is_fast"), [("fp32", False), ("bf16", True), ("bf16", False)])
def test_bf16_on_a_processor_without_instructions_for_it_is_a_warning(
    precision: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no GPU, either."""
    monkeypatch.setattr(doctor, "_nvidia", list)
    monkeypatch.setattr(doctor, "_has_fast_bf16", lambda: is_fast)
    values = preset()
    values["train_grpo"]["engine"] |= {"precision": precision, "zero_stage": 2}
    warns = "fp32 is several times faster" in doctor.slow_here(Params.model_validate(values))
    assert warns == (precision == "bf16" and not is_fast)


def test_packages_of_other_versions_than_the_lock_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other versions compute other results."""
    assert [finding.state for finding in doctor._lock()] == ["ok"]
    lock = Path(doctor.__file__).parents[1] / "requirements.lock"
    changed = lock.read_text().replace("\npydantic==", "\npydantic==9")
    (tmp_path / lock.name).write_text(changed)
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    (found,) = doctor._lock()
    assert found.state == "warning"
    assert "(lock: 9" in found.text


def test_what_a_run_would_miss_is_part_of_the_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code says that something is wrong."""
    for name in ("_imports", "_hub"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "_nvidia", list)
    params = tmp_path / "params.yaml"
    root = Path(doctor.__file__).parents[1]
    params.write_text(f"extends: {root / 'params/smoke.yaml'}\nreport: {{gate: {{target: [gsm8k]}}}}\n")
    assert main(["doctor", "--params", str(params)]) == 2
    findings = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert [state for state, _, text in findings if "report.gate.target" in text] == ["error"]
    assert {"python", "cores", "memory", "disk", "gpu", "torch", "packages", "git"} <= {name for _, name, _ in findings}
