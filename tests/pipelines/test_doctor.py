"""Findings of the doctor, on this machine and on simulated ones with other programs and packages."""

import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params
from components.shared.model_shape import ModelShape
from pipelines import doctor
from pipelines.doctor import unused_gpu
from tests.pipelines.conftest import Program
from tests.presets import preset


def _torch_with(cuda: str | None, available: bool, bf16: bool) -> str:
    return f"""
__version__ = "2.13.0"
class version: cuda = {cuda!r}
class cuda:
    is_available = staticmethod(lambda: {available})
    is_bf16_supported = staticmethod(lambda: {bf16})
class _Square:
    def reshape(self, *sizes): return self
    def __matmul__(self, other): return self
    def equal(self, other): return True
arange = eye = lambda *sizes, device: _Square()
"""


def _torch(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """Have another torch installed."""
    package = folder / "packages/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.parametrize(
    ("simulated", "expected"),
    [
        ((None, False, True), ("error", "computes on CPUs, though there is a GPU", "make setup TORCH_BACKEND=auto")),
        (("13.0", False, True), ("error", "does not find the GPU", "CUDA 13.0 needs a newer driver")),
        (("12.4", True, False), ("warning", "which has no bfloat16", "engine.precision: fp32")),
        (("12.4", True, True), ("ok", "computes on the GPU", "")),
    ],
)
def test_torch_is_judged_by_the_gpu(
    simulated: Any, expected: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for CPUs on a machine with a GPU would train for days and say nothing."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho NVIDIA GeForce RTX 4090, 24564, 20000, 550.54\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    _torch(tmp_path, monkeypatch, _torch_with(*simulated))
    gpu, found = doctor._gpu_and_torch()
    assert gpu.state == "warning"  # another process holds its memory
    assert gpu.text.startswith("NVIDIA GeForce RTX 4090, 24 GiB")
    state, text, remedy = expected
    assert (found.state, text in found.text, remedy in found.remedy) == (state, True, True)
    assert (text in unused_gpu()) == (state == "error")  # the warning of a run
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpu() == ""


def test_a_torch_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last line of what it printed."""
    _torch(tmp_path, monkeypatch, "raise OSError('libcublasLt.so.13: cannot open shared object file')")
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


@pytest.mark.parametrize(
    ("precision", "is_fast", "warning"),
    [
        ("fp32", True, "set engine.precision: bf16 and zero_stage: 2, which this processor has instructions for"),
        ("fp32", False, "slowly without a GPU"),
        ("bf16", True, "slowly without a GPU"),
        ("bf16", False, "no instructions for bf16; fp32 is several times faster"),
    ],
)
def test_fast_precision_is_named(precision: str, is_fast: bool, warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a large model would be trained without a GPU in the other one."""
    monkeypatch.setattr(doctor, "_nvidia", list)
    monkeypatch.setattr(doctor, "_has_bf16_instructions", lambda: is_fast)
    shape = ModelShape(576, 1536, 30, 9, 3, 64, 49152, tied=True)
    monkeypatch.setattr("components.preflight.resources.shape_of_base", lambda _: shape)
    values = preset()
    values["train_grpo"]["engine"] |= {"precision": precision, "zero_stage": 2}
    assert doctor.slow_here(Params.model_validate(values)).endswith(warning)


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


def test_what_a_run_would_miss_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    """And the exit code says that something is wrong."""
    for name in ("_imports", "_hub"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "_nvidia", list)
    _torch(tmp_path, monkeypatch, _torch_with(None, False, True))
    params = tmp_path / "params.yaml"
    root = Path(doctor.__file__).parents[1]
    params.write_text(f"extends: {root / 'params/smoke.yaml'}\nreport: {{gate: {{target: [gsm8k]}}}}\n")
    lines = program("doctor", "--params", str(params), code=2).lines
    findings = [line.split(maxsplit=2) for line in lines if line[0] != " "]
    assert [state for state, _, text in findings if "report.gate.target" in text] == ["error"]
    named = {name for _, name, _ in findings}
    assert {"python", "cores", "memory", "disk", "gpu", "torch", "packages", "git"} <= named
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in findings[0][2]
