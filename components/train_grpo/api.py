"""Requests to an OpenAI-compatible server, for the judge and for a teacher."""

import os
from typing import Any

import urllib3

from components.shared.errors import PipelineError, RetryableError

RETRIES = urllib3.Retry(
    4,
    read=1,
    backoff_factor=1.0,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)
_SHOWN_CHARACTERS = 300


class Api:
    """A URL of a server, to which JSON is posted."""

    def __init__(
        self, url: str, where: str, key_variable: str | None, *, retries: urllib3.Retry, timeout_s: float, maxsize: int
    ) -> None:
        """Keep at most `maxsize` connections open. Errors name `where`, a section of the params.

        PipelineError if the environment variable `key_variable` is not set.
        """
        headers = {}
        if key_variable:
            if not os.environ.get(key_variable):
                raise PipelineError(f"{where}.key_variable: the environment has no {key_variable}")
            headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
        self._url, self.where = url, f"{where}: {url}"
        self._pool = urllib3.PoolManager(maxsize=maxsize, headers=headers, retries=retries, timeout=timeout_s)

    def post(self, body: dict[str, Any]) -> Any:
        """Return the answer to a request as JSON.

        Raises:
            RetryableError: The server is overloaded, cannot be reached, or does not answer in time.
            PipelineError: It refuses the request, or does not answer with JSON.
        """
        try:
            answer = self._pool.request("POST", self._url, json=body)
            if answer.status == 429 or answer.status >= 500:
                raise RetryableError(f"{self.where} answers {answer.status}")
            if answer.status != 200:
                reason = " ".join(answer.data.decode(errors="replace").split())[:_SHOWN_CHARACTERS]
                raise PipelineError(f"{self.where} answers {answer.status} ({reason})")
            return answer.json()
        except urllib3.exceptions.HTTPError as error:
            raise RetryableError(f"{self.where}: {error}") from None
        except ValueError:
            raise PipelineError(f"{self.where} does not answer with JSON") from None
