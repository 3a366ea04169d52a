"""What a stage does differently as a task of Kubeflow Pipelines in a pod: file modes and retries.

Argo starts tasks with umask 0, so that its own containers can read what they leave: files would be 0666, folders 0777.
And to Kubeflow's retries every failure is alike, a mistake and a busy server: version 2.16 retries all of them, 2.17
only lost pods. So the task itself retries what may work the next time.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from components.shared.config import validate
from components.shared.environment import POD_VARIABLE
from components.shared.errors import RetryableError
from components.shared.progress import say
from components.shared.stage import Stage, exit_on_error, run
from components.shared.system_errors import explain

PAUSES_S = (30.0, 120.0)
"""Between attempts."""
_Result = TypeVar("_Result")


def run_task(stage: Stage, config: Mapping[str, Any], **folders: str) -> dict[str, float]:
    """Run a stage as a Kubeflow task: plain values in, metrics out, the exit code as from the command line."""
    with exit_on_error(stage.name):
        settings = validate(stage.config, dict(config), name=stage.name)
        paths = {name: Path(folder) for name, folder in folders.items()}
        if _is_in_pod():
            keep_files_in_group()
        return with_retries(stage.name, lambda: run(stage, settings, paths))


def _is_in_pod() -> bool:
    return POD_VARIABLE in os.environ


def keep_files_in_group() -> None:
    """Let only the user and the group of this process and its children read and change what they write.

    All pods of runs are in group 0, whichever user the cluster runs them as.
    """
    os.umask(0o007)


def with_retries(name: str, attempt: Callable[[], _Result], sleep: Callable[[float], None] = time.sleep) -> _Result:
    """Return what `attempt` returns; in a pod of Kubeflow, retry twice after an error that may not come again.

    Elsewhere a person is there to run the stage again.
    """
    for pause_s in PAUSES_S if _is_in_pod() else ():
        try:
            return attempt()
        except Exception as error:
            explained = explain(error)
            if not isinstance(explained, RetryableError) or explained.is_final:
                raise
            say(name, f"{explained}; trying again in {pause_s:g} s")
        sleep(pause_s)
    return attempt()
