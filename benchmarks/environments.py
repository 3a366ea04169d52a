"""Environments of other projects: made on first use beside this file, each from the pins of a requirements file."""

import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def python_of(name: str) -> Path:
    """Return the Python of `<name>-requirements.txt`, with its environment set up if it is not, or is of other pins."""
    requirements, venv = _HERE / f"{name}-requirements.txt", _HERE / f".{name}-venv"
    python, ready = venv / "bin" / "python", venv / ".ready"
    pins = requirements.read_text(encoding="utf-8")
    if not ready.is_file() or ready.read_text(encoding="utf-8") != pins:
        print(f"setting up {venv} (a few minutes the first time)", flush=True)
        _uv("venv", "--clear", "--python", sys.executable, str(venv))
        _uv("pip", "install", "--python", str(python), *_torch_source(), "-r", str(requirements))
        ready.write_text(pins, encoding="utf-8")
    return python


def _torch_source() -> list[str]:
    """As in the Makefile: torch's CPU build lies where wheels come from a local folder, else uv picks its index."""
    folder = os.environ.get("PIP_FIND_LINKS")
    return ["--find-links", folder] if folder else ["--torch-backend", "cpu"]


def _uv(*arguments: str) -> None:
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    environment = {**os.environ, **({"SSL_CERT_FILE": certificates} if certificates else {})}
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "--quiet", *arguments], check=True, env=environment)
