"""What may pass is tried again by the Kubeflow task itself.

Kubeflow cannot do it: to its retries every failure is alike, a mistake and a busy server. Version 2.16 tries again
whatever has failed, 2.17 lost pods alone.
"""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from components.shared.errors import RetryableError
from components.shared.pod import in_task
from components.shared.progress import say

PASSING_FAULTS = {
    errno.EIO,
    errno.ESTALE,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
"""What a network or a shared file system answers when it may well work the next time."""
PAUSES_S = (30.0, 120.0)
"""Between attempts."""
_Answer = TypeVar("_Answer")


def with_retries(section: str, attempt: Callable[[], _Answer], sleep: Callable[[float], None] = time.sleep) -> _Answer:
    """Make an attempt, and in a pod of Kubeflow two more where its error may pass; return what it returns.

    Elsewhere somebody is there to run a stage again.
    """
    for pause_s in PAUSES_S if in_task() else ():
        try:
            return attempt()
        except (RetryableError, OSError) as error:
            if not _may_pass(error):
                raise
            say(section, f"{error}; trying again in {pause_s:g} s")
        sleep(pause_s)
    return attempt()


def _may_pass(error: RetryableError | OSError) -> bool:
    return not error.is_final if isinstance(error, RetryableError) else error.errno in PASSING_FAULTS
