"""Podman on this machine, and what the tests of the images build and run with it."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANYBODY = "1000660000:0"
"""A user as on OpenShift: a number that no image knows, in root's group."""
_NEEDED = ("podman", "debootstrap")
_BASE_IMAGE = "localhost/grpo-pipeline/debian:bookworm"


def require() -> None:
    """Skip the test where images cannot be built; where `.ci/run` has seen a container run, that is a failure."""
    missing = ", ".join(name for name in _NEEDED if not shutil.which(name))
    if not missing and os.geteuid():
        missing = "root, for debootstrap"
    if not missing and not _runs_containers():
        missing = "a configuration with which podman runs containers here (.ci/containers.conf)"
    if not missing:
        return
    why = f"images are built and run with {' and '.join(_NEEDED)}; missing: {missing}"
    if os.environ.get("GRPO_PIPELINE_TEST_IMAGES") == "required":
        pytest.fail(why)
    pytest.skip(why)


@functools.cache
def _runs_containers() -> bool:
    command = ["podman", "run", "--rm", "--network", "none", "--rootfs", "/:O", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def podman(*arguments: str, timeout: float = 300) -> str:
    """Run podman and return what it prints."""
    ended = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert ended.returncode == 0, f"podman {' '.join(arguments)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def base_image() -> str:
    """The id of a base image made from Debian's packages; made once per machine."""
    known = subprocess.run(["podman", "image", "exists", _BASE_IMAGE], check=False).returncode == 0
    if known:
        return podman("image", "inspect", "--format", "{{.Id}}", _BASE_IMAGE).strip()
    return subprocess.run([ROOT / "images/base.sh"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build(*options: str) -> "dict[str, Image]":
    """Run `make images` for processors and return each image by its kind, `light` or `gpu`."""
    command = ["python3", "-m", "images.build", "--base", base_image(), "--variant", "cpu", *options]
    environment = {**os.environ, "CONTAINER_ENGINE": "podman"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    made = map(Image, ended.stdout.splitlines()[:-1])
    return {image.kind: image for image in made}


@dataclass(frozen=True)
class Image:
    """A built image."""

    name: str

    @property
    def kind(self) -> str:
        """`light` or `gpu`."""
        return self.name.rpartition(":")[0].rpartition("python-")[2]

    def run(self, *command: str, folder: Path | None = None, user: str = "") -> str:
        """Run a command as a cluster would that trusts nobody, and return what it prints.

        The root is read-only, /tmp, memory and `folder`, where the command works, are all there is to write to, there
        is no network, and the user is nobody's.
        """
        options = ["--rm", "--read-only", "--tmpfs", "/tmp", "--shm-size", "1g", "--network", "none"]
        options += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
        options += ["--user", user] if user else []
        options += ["--volume", f"{folder}:{folder}", "--workdir", str(folder)] if folder else []
        return podman("run", *options, self.name, *command)


def sizes(image: str) -> Sequence[tuple[int, str]]:
    """Bytes of each layer that is not empty, lowest first, with the beginning of what made it."""
    layers = json.loads(podman("history", "--format", "json", image))
    return [(layer["size"], layer["CreatedBy"]) for layer in reversed(layers) if layer["size"]]


def diffs(image: str) -> Sequence[str]:
    """Digests of the layers, lowest first."""
    digests: list[str] = json.loads(podman("image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    return digests
