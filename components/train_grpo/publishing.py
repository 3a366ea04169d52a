"""Start and end the process that pushes checkpoints into the registry while this one trains."""

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
"""Prefix of a run's staging folder in its work folder, and the file by which the run locks it."""
_LAST_PUSH_S, _LAST_PUSH_OF_FAILED_S = 600.0, 20.0
"""Time to push the last checkpoint after the end of training, and after a failure or a request to stop."""


@contextmanager
def checkpoints_published(config: TrainGRPOConfig, work: Path) -> Iterator[None]:
    """Push the checkpoints written into `work` in the background while the block runs, then wait for the last push.

    Failed pushes do not fail the training. The pushing process ends with this one, even if this one is killed.
    """
    settings = config.checkpoint
    if not config.publishes_checkpoints:
        yield
        return
    _remove_abandoned(work)
    # A random name: another run of the same work, for which this one waits in a queue, may have its own folder there.
    staging = work / f"{_STAGING}{secrets.token_hex(4)}"
    lock = durable.lock_folder(staging / _LOCK, wait=True)
    command = [sys.executable, "-m", _MODULE, "--work", str(work), "--staging", str(staging)]
    command += ["--registry", config.registry, "--keep-last", str(settings.keep_in_registry)]
    command += ["--storage", config.storage] if config.storage else []
    command += ["--storage-endpoint", config.storage_endpoint] if config.storage_endpoint else []
    command += ["--keep-best"] if settings.keep_best else []
    limit_s = _LAST_PUSH_OF_FAILED_S
    # A new session, because Ctrl-C is for the training. The watchdog ends it when this end of the pipe is closed.
    with subprocess.Popen(watched(staging, command), stdin=subprocess.PIPE, start_new_session=True) as publisher:
        try:
            yield
            limit_s = _LAST_PUSH_S
        finally:
            try:
                (staging / "end").touch()
            except FileNotFoundError:  # another run has finished the work and removed the work folder
                publisher.kill()
            try:
                publisher.wait(limit_s)
            except subprocess.TimeoutExpired:
                say("train_grpo", f"warning: the last checkpoint is not in the registry: no end within {limit_s:g} s")
            durable.remove(staging)
            lock.release()


def _remove_abandoned(work: Path) -> None:
    """Remove the staging folders of runs that were killed together with their watchdog, as with their pod."""
    for staging in work.glob(f"{_STAGING}*"):
        with suppress(durable.InUseError, OSError):  # it is in use, or belongs to another user
            lock = durable.lock_folder(staging / _LOCK)
            durable.remove(staging)
            lock.release()
