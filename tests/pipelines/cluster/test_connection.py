import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.cluster import kubeflow
from tests.fake_cluster import ApiServer, Fault, self_signed
from tests.pipelines.conftest import Program

SECRET = "s3cr3t-t0ken"


def test_a_token_file_is_read_for_each_request_and_its_content_is_shown_nowhere(
    server: ApiServer, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are renewed; a run's parameters, the output and the requests' bodies hold nothing secret."""
    server.kfp.token = SECRET
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    assert main(["submit", "--pipeline", str(pipeline), "--token-file", str(file)]) == 0
    file.write_text("older")
    assert main(["status", "--token-file", str(file)]) == 2
    shown = [*capsys.readouterr()]
    for request in server.requests:
        headers = {name: value for name, value in request.headers.items() if name != "authorization"}
        shown.append(f"{request.path} {request.query} {headers} {request.body!r}")
    assert SECRET not in "".join(shown)


@pytest.mark.parametrize("name", ["TOKEN", "TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH", "COOKIE"])
def test_credentials_come_from_the_environment(
    server: ApiServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token, a file with one as a pod of a profile has it, or the cookie of a browser that has logged in."""
    (tmp_path / "token").write_text(SECRET)
    setattr(server.kfp, "cookie" if name == "COOKIE" else "token", SECRET)
    value = SECRET if name in ("TOKEN", "COOKIE") else str(tmp_path / "token")
    monkeypatch.setenv(name if name.startswith("KF_") else f"GRPO_PIPELINE_{name}", value)
    assert main(["status"]) == 0


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, 2, "not authenticated; pass --token-file FILE, or set GRPO_PIPELINE_TOKEN"),
        (403, 2, "permission denied; ask for access to the namespace"),
        (429, 75, "cannot answer now, try again later"),
        (503, 75, "cannot answer now, try again later"),
    ],
)
def test_a_refusal_names_an_action(server: ApiServer, status: int, code: int, message: str, program: Program) -> None:
    """And has the exit code that fits."""
    server.faults.add(Fault("GET", "/runs", status=status, times=100))
    error = program("status", code=code).error
    assert error.startswith(f"error: {server.url}: {message}")
    assert error.count("\n") == 1


def test_a_silent_server_is_asked_once(server: ApiServer, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    """An address without a server, and one that hangs for longer than the limit; the code says to try later."""
    _, error = program("status", "--endpoint", "127.0.0.1:9", code=75)
    assert error.startswith("error: https://127.0.0.1:9: cannot be reached (")
    monkeypatch.setattr(kubeflow, "_REQUEST_TIMEOUT_S", 1)
    server.faults.add(Fault("GET", "/runs", delay_s=1.5, times=100))
    assert "cannot be reached (" in program("status", code=75).error
    assert len([request for request in server.requests if "/runs" in request.path]) == 1


@pytest.mark.parametrize(
    ("folder", "message"),
    [("apis/v2beta1", "the answer is not from the API of Kubeflow Pipelines"), ("", "not a Kubeflow Pipelines API")],
)
def test_another_server_is_not_taken_for_kubeflow(folder: str, message: str, tmp_path: Path, program: Program) -> None:
    """A login page, or a wrong path."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "healthz").write_text("<html>Log in</html>")
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as page:
        threading.Thread(target=page.serve_forever, args=(0.02,), daemon=True).start()
        assert message in program("status", "--endpoint", f"http://127.0.0.1:{page.server_address[1]}", code=2).error
        page.shutdown()


def test_everything_is_in_the_namespace_of_the_profile(server: ApiServer, pipeline: Path, program: Program) -> None:
    """Runs, schedules and experiments; with several users the namespace must be named."""
    server.kfp.multi_user = True
    server.kfp.namespaces = ("team-a",)
    assert "several users; name the namespace of a profile with --namespace" in program("status", code=2).error
    team_a = ["--namespace", "team-a"]
    program("submit", "--pipeline", str(pipeline), *team_a)
    program("schedule", "apply", "x", "--cron", "0 0 2 * * *", "--pipeline", str(pipeline), *team_a)
    program("schedule", "list", *team_a)
    kfp = server.kfp
    rows = [*kfp.runs.values(), *kfp.experiments.values(), *kfp.recurring_runs.values()]
    assert [row["namespace"] for row in rows] == ["team-a"] * 3
    assert "(403)" in program("status", "--namespace", "team-b", code=2).error


def test_a_named_certificate_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    """By option or environment; a file that does not exist is named."""
    certificate = self_signed(tmp_path)
    with ApiServer(certificate=certificate) as server:
        monkeypatch.setenv("GRPO_PIPELINE_ENDPOINT", server.url)
        assert "certificate verify failed" in program("status", code=75).error
        program("status", "--ca-file", str(certificate))
        monkeypatch.setenv("GRPO_PIPELINE_CA_FILE", str(certificate))
        program("status")
    missing = f"{tmp_path}/no.pem"
    assert program("status", "--ca-file", missing, code=2).error == f"error: {missing}: no such file or directory\n"
