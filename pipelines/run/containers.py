"""A local run in containers: each stage in its image, as on a cluster, by podman or docker.

A container mounts only the working folder, under the same path, and runs the code of the image, as the caller or, if
the caller is root, as the image's user.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import docker
from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import Mount

from components.shared.environment import JOURNAL_VARIABLE
from components.shared.errors import PipelineError
from components.shared.images import GPU, LIGHT

_LABEL = "grpo-pipeline/run"
"""Label of a run's containers; its value is the run's folder."""
_PASSED_ON = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that stages inherit from the caller."""
_GRACE_S = 3


def check() -> None:
    """Raise PipelineError if no container engine answers or an image is missing."""
    with closing(_client()) as client:
        for image in (LIGHT, GPU):
            try:
                client.images.get(image)
            except ImageNotFound:
                raise PipelineError(
                    f"image {image} is missing; build it with `make images`, and set IMAGE_REGISTRY and IMAGE_TAG to "
                    "what that prints"
                ) from None


def run(image: str, command: list[str], folder: Path, journal: Path) -> int:
    """Run a stage of the run in `folder` in a container, print its output, and return its exit code."""
    here = str(Path.cwd())
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    with closing(_client()) as client:
        container = client.containers.run(
            image,
            ["sh", "-c", '"$@"; exit $?', "sh", *command],
            detach=True,
            mounts=[Mount(target=here, source=here, type="bind")],
            working_dir=here,
            user=f"{os.getuid()}:{os.getgid()}" if os.getuid() else None,
            environment={JOURNAL_VARIABLE: str(journal), **passed_on},
            labels={_LABEL: str(folder)},
            read_only=True,
            tmpfs={"/tmp": "mode=1777,exec"},
            shm_size="2g",  # /dev/shm, through which the ranks of a stage exchange data
        )
        for block in container.logs(stream=True, follow=True):
            print(block.decode(errors="replace"), end="", flush=True)
        status: int = container.wait()["StatusCode"]
        # After an interrupt, `no_containers_left` lets the stage end first.
        _remove(container)
    return status


@contextmanager
def no_containers_left(folder: Path) -> Iterator[None]:
    """Remove all containers of a run when the block ends; a stage that still runs is interrupted first."""
    try:
        yield
    finally:
        with closing(_client()) as client:
            for container in client.containers.list(all=True, filters={"label": f"{_LABEL}={folder}"}):
                with suppress(APIError):
                    # Signals all processes but the first, a shell that ends with the stage or is killed later.
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
