"""What a server or the way to it says no to, in one line that says what to do."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from components.shared.errors import PipelineError, RetryableError

_WHAT_TO_DO = {
    401: "it does not know who asks; give --token-file FILE, or set GRPO_PIPELINE_TOKEN or GRPO_PIPELINE_COOKIE",
    403: "it knows who asks and says no; ask for access to the namespace, or name another with --namespace",
}


@contextmanager
def explained(endpoint: str, *, missing: str = "") -> Iterator[None]:
    """Turn what goes wrong in the block into an error for people; `missing` says what a 404 is about."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise _refusal(endpoint, error, missing) from None
    except (HTTPError, OSError) as error:
        raise RetryableError(f"{endpoint}: cannot be reached ({_reason(error)})") from None


def _refusal(endpoint: str, error: Any, missing: str) -> PipelineError:
    status = int(error.status or 0)
    if status in _WHAT_TO_DO:
        return PipelineError(f"{endpoint}: {_WHAT_TO_DO[status]} ({status})")
    if status == 404:
        return PipelineError(missing or f"{endpoint}: is no Kubeflow Pipelines: it has no {_said(error)} (404)")
    if status == 429 or status >= 500:
        return RetryableError(f"{endpoint}: cannot answer for the moment: {_said(error)} ({status})")
    return PipelineError(f"{endpoint}: {_said(error)} ({status})")


def _said(error: Any) -> str:
    """The message in a server's answer, in one line."""
    try:
        body = json.loads(error.body or "")
        text = str(body.get("message") or body.get("error") or body.get("error_message"))
    except (ValueError, AttributeError):
        text = str(error.reason)  # a proxy's page says less than the reason before it
    return " ".join(text.split())[:300]


def _reason(error: BaseException) -> str:
    """The innermost reason without the connection's own description before it."""
    inner = getattr(error, "reason", None)
    text = str(inner if isinstance(inner, BaseException) else error)
    return " ".join(re.sub(r"^\w+\(host=.*?\): ", "", text).split())[:200]
