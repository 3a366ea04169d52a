"""The process that pushes checkpoints into the registry while this one trains: started here, and ended here."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.shared import durable
from components.shared.progress import say
from components.shared.watchdog import watched
from components.train_grpo.config import TrainGRPOConfig

_MODULE = "components.register.checkpoints"
_STAGING, _LOCK = "publishing-", "run.lock"
"""Prefix of the staging folder of a run in its work folder, and the file by which the run locks it."""
_LAST_PUSH_S, _LAST_PUSH_OF_FAILED_S = 600.0, 20.0
"""Time for the last checkpoint after training has ended, and after it has failed or was asked to stop."""


@contextmanager
def checkpoints_published(config: TrainGRPOConfig, work: Path) -> Iterator[None]:
    """Push the checkpoints that are written into `work` in the background; the last push is awaited at the end.

    Its failures do not fail the training, and it ends with this process, however that ends.
    """
    settings = config.checkpoint
    if not config.publishes_checkpoints:
        yield
        return
    _remove_abandoned(work)
    # Another run of the same work may have one there: it does the work while this one waits in a queue.
    staging = work / f"{_STAGING}{secrets.token_hex(4)}"
    lock = durable.lock_folder(staging / _LOCK, wait=True)
    command = [sys.executable, "-m", _MODULE, "--work", str(work), "--staging", str(staging)]
    command += ["--registry", config.registry, "--keep-last", str(settings.keep_in_registry)]
    command += ["--storage", config.storage] if config.storage else []
    command += ["--storage-endpoint", config.storage_endpoint] if config.storage_endpoint else []
    command += ["--keep-best"] if settings.keep_best else []
    limit_s = _LAST_PUSH_OF_FAILED_S
    # In a session of its own: Ctrl-C is for the training. The watchdog ends it when this end of the pipe is closed.
    with subprocess.Popen(watched(staging, command), stdin=subprocess.PIPE, start_new_session=True) as publisher:
        try:
            yield
            limit_s = _LAST_PUSH_S
        finally:
            try:
                (staging / "end").touch()
            except FileNotFoundError:  # the run that has done the work has removed its folder
                publisher.kill()
            try:
                publisher.wait(limit_s)
            except subprocess.TimeoutExpired:
                say("train_grpo", f"warning: the last checkpoint is not in the registry: no end within {limit_s:g} s")
            durable.remove(staging)
            lock.release()


def _remove_abandoned(work: Path) -> None:
    """Remove the staging folders of runs that ended together with their watchdog, as when a pod is killed."""
    for staging in work.glob(f"{_STAGING}*"):
        with suppress(durable.InUseError, OSError):  # in use, or of another user
            lock = durable.lock_folder(staging / _LOCK)
            durable.remove(staging)
            lock.release()
