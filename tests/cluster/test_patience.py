"""Which answers of the API server are asked for again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from components.cluster.kube import RetryPolicy, TrainJobs, UnavailableError, connect, is_transient
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.errors import PipelineError
from tests.fake_cluster import ApiServer


def _answer(status: int, message: str = "said so") -> client.ApiException:
    error = client.ApiException(status=status, reason="reason")
    error.body = json.dumps({"kind": "Status", "message": message})
    return error


@pytest.mark.parametrize("status", [401, 408, 409, 410, 429, 500, 502, 503, 504])
def test_an_answer_that_may_be_another_next_time(status: int) -> None:
    """A token that is being replaced, a lost race, an expired version, a busy server."""
    assert is_transient(_answer(status))


@pytest.mark.parametrize("status", [400, 403, 404, 405, 422])
def test_an_answer_that_will_be_the_same(status: int) -> None:
    """A mistake in what was asked, or no right to ask."""
    assert not is_transient(_answer(status))


@pytest.mark.parametrize(
    "message",
    [
        'admission webhook "x.kueue.io" denied the request: Get "https://10.96.0.1:443": context deadline exceeded',
        'failed calling webhook "x": failed to call webhook: Post "https://trainer:443": connect: connection refused',
    ],
)
def test_a_webhook_that_waited_in_vain_is_no_refusal(message: str) -> None:
    """Whatever the status is that it comes with."""
    assert is_transient(_answer(403, message))
    assert is_transient(_answer(400, message))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster, which is the one that this process finds."""
    with ApiServer() as server:
        monkeypatch.setenv(KUBECONFIG_VARIABLE, str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


class LateToken:
    """A clock in whose course the file with the token is replaced, some time after the server knows the new one."""

    def __init__(self, server: ApiServer, file: Path, after_s: float) -> None:
        self.monotonic, self.now = server.clock.monotonic, server.clock.now
        self._server, self._file, self._after_s = server, file, after_s

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        self._server.clock.advance(seconds)
        if self._server.clock.monotonic() >= self._after_s:
            self._server.kubeconfig(self._file)


@pytest.mark.parametrize(("after_s", "answers"), [(60, True), (10_000, False)])
def test_a_token_that_comes_late_is_waited_for(
    server: ApiServer, tmp_path: Path, after_s: float, answers: bool
) -> None:
    """The kubelet replaces tokens in pods within minutes; one that never comes is named in the end."""
    objects = TrainJobs(connect(), server.namespace)
    server.access.rotate()
    patience = RetryPolicy(LateToken(server, tmp_path / "kubeconfig", after_s))
    if answers:
        assert patience.call("list training jobs", lambda: objects.find({})) == []
    else:
        with pytest.raises(UnavailableError, match=r"did not list training jobs within 900 s: .*401"):
            patience.call("list training jobs", lambda: objects.find({}))


def test_a_refusal_is_named_at_once(server: ApiServer) -> None:
    """Without a second question."""
    server.access.rules = []
    with pytest.raises(PipelineError, match="the cluster refuses to list training jobs"):
        RetryPolicy(server.clock).call("list training jobs", lambda: TrainJobs(connect(), server.namespace).find({}))
    assert len(server.requests) == 1
