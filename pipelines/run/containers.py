"""A local run in containers: each stage in its image, as on a cluster, by podman or docker.

A container sees the folder in which the command is run, under the same path, and nothing else of this machine. Its
code is that of the image. It runs as the caller, or as the image's own user where that is root.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import Mount
from kfp import local
from kfp.local import docker_task_handler

from components.shared.environment import JOURNAL_VARIABLE
from components.shared.errors import PipelineError
from components.shared.images import GPU, LIGHT

_LABEL = "grpo-pipeline/run"
"""Of every container of a run: its folder."""
_PASSED_ON = ("OMP_NUM_THREADS",)
"""How much of the machine a stage may take is for the caller to say."""
_SHARED_MEMORY = "2g"
"""For ranks of a stage and their data, which go through /dev/shm."""
_GRACE_S = 3


def check() -> None:
    """Raise a PipelineError where no engine answers or an image is not there, before anything is run."""
    with closing(_client()) as client:
        for image in (LIGHT, GPU):
            try:
                client.images.get(image)
            except ImageNotFound:
                raise PipelineError(
                    f"image {image} is not here; build it with `make images`, and set IMAGE_REGISTRY and IMAGE_TAG "
                    "to what that prints"
                ) from None


def runner(folder: Path, journal: Path) -> local.DockerRunner:
    """Return KFP's runner for a run whose results go into `folder`."""
    # KFP's own takes a container that has gone before it could be asked for one that has succeeded.
    docker_task_handler.run_docker_container = run_container
    here = str(Path.cwd())
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return local.DockerRunner(
        mounts=[Mount(target=here, source=here, type="bind")],
        working_dir=here,
        user=f"{os.getuid()}:{os.getgid()}" if os.getuid() else None,
        environment={JOURNAL_VARIABLE: str(journal), **passed_on},
        labels={_LABEL: str(folder)},
        read_only=True,
        tmpfs={"/tmp": "mode=1777,exec"},
        shm_size=_SHARED_MEMORY,
    )


def run_container(client: DockerClient, image: str, command: list[str], volumes: object, **options: Any) -> int:
    """Run a container to its end, print what it says, and return its exit code."""
    # KFP would mount the folder of artifacts, which is in the folder that is mounted.
    container = client.containers.run(image, command, detach=True, **options)
    for line in _lines(container.logs(stream=True, follow=True)):
        print(line.decode(errors="replace"))
    status: int = container.wait()["StatusCode"]
    # Not where this is interrupted: `none_left` has the stage end first.
    _remove(container)
    return status


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *complete, rest = (rest + block).split(b"\n")
        yield from complete
    if rest:
        yield rest


@contextmanager
def none_left(folder: Path) -> Iterator[None]:
    """Have no container of a run outlive the block; a stage that still runs is asked to end first."""
    try:
        yield
    finally:
        with closing(_client()) as client:
            for container in client.containers.list(all=True, filters={"label": f"{_LABEL}={folder}"}):
                with suppress(APIError):
                    # Reaches all but the first process, a shell, which ends with the stage or is killed after a while.
                    container.exec_run(["sh", "-c", "kill -INT -1"])
                    container.stop(timeout=_GRACE_S)
                _remove(container)


def _remove(container: Container) -> None:
    with suppress(NotFound):
        container.remove(force=True)


def _client() -> DockerClient:
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        raise PipelineError(
            f"no container engine answers at {where} ({error}); start docker, or `podman system service` and set "
            "DOCKER_HOST to its socket"
        ) from None
    return client
