import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.cluster import kubeflow
from tests.fake_cluster import ApiServer, Fault, self_signed

SECRET = "s3cr3t-t0ken"


def test_a_token_comes_from_a_file_and_is_read_again(
    server: ApiServer, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that was renewed meanwhile is the one that is sent."""
    server.kfp.token = SECRET
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    assert main(["submit", "--pipeline", str(pipeline), "--token-file", str(file)]) == 0
    file.write_text("older")
    assert main(["status", "--token-file", str(file)]) == 2
    assert _shown(server, capsys) == []


@pytest.mark.parametrize("variable", ["GRPO_PIPELINE_TOKEN", "GRPO_PIPELINE_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH"])
def test_a_token_comes_from_the_environment(
    server: ApiServer, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As itself or as a file; the last is how a pod of a profile has it."""
    server.kfp.token = SECRET
    file = tmp_path / "token"
    file.write_text(SECRET)
    monkeypatch.setenv(variable, SECRET if variable.endswith("TOKEN") else str(file))
    assert main(["status"]) == 0


def test_a_cookie_comes_from_the_environment(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a browser which has logged in."""
    server.kfp.cookie = f"session={SECRET}"
    monkeypatch.setenv("GRPO_PIPELINE_COOKIE", f"session={SECRET}")
    assert main(["status"]) == 0


def test_no_secret_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody on a machine sees the options of a process."""
    for command in ("submit", "status", "logs", "stop"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    options = {word.strip(",[]") for word in capsys.readouterr().out.split() if word.strip("[").startswith("--")}
    assert {"--token-file", "--ca-file"} <= options
    assert not {"--token", "--cookie", "--password", "--secret"} & options


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, 2, "not authenticated; pass --token-file FILE, or set GRPO_PIPELINE_TOKEN"),
        (403, 2, "permission denied; ask for access to the namespace"),
        (429, 75, "cannot answer now, try again later"),
        (503, 75, "cannot answer now, try again later"),
    ],
)
def test_what_the_server_says_no_to_is_one_line(
    server: ApiServer,
    status: int,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what to do, the exit code that fits, and nothing secret."""
    monkeypatch.setenv("GRPO_PIPELINE_TOKEN", SECRET)
    server.faults.add(Fault("GET", "/runs", status=status, times=100))
    assert main(["status"]) == code
    error = capsys.readouterr().err
    assert error.startswith(f"error: {server.url}: {message}")
    assert error.count("\n") == 1
    assert SECRET not in error


def test_an_address_where_nobody_answers_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    """At once, without a traceback, with the code that says to try again."""
    assert main(["status", "--endpoint", "http://127.0.0.1:9"]) == 75
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9: cannot be reached (")


def test_a_server_that_hangs_costs_one_time_limit(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not asked again and again, and the code says to try later."""
    monkeypatch.setattr(kubeflow, "_REQUEST_TIMEOUT_S", 1)
    server.faults.add(Fault("GET", "/runs", delay_s=3, times=100))
    assert main(["status"]) == 75
    assert len([request for request in server.requests if "/runs" in request.path]) == 1
    assert "cannot be reached (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "message"),
    [(200, "the answer is not from the API of Kubeflow Pipelines"), (404, "not a Kubeflow Pipelines API")],
)
def test_an_address_of_something_else_is_told_from_kubeflow(
    status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page to log in, or a wrong path."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>Log in</html>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        assert main(["status", "--endpoint", f"http://127.0.0.1:{page.server_address[1]}"]) == 2
        page.shutdown()
    assert message in capsys.readouterr().err


def test_where_there_are_several_users_the_namespace_has_to_be_named(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And everything then happens in it."""
    server.kfp.multi_user = True
    server.kfp.namespaces = ("team-a",)
    assert main(["status"]) == 2
    assert (
        "this Kubeflow has several users; name the namespace of a profile with --namespace" in capsys.readouterr().err
    )
    assert main(["submit", "--pipeline", str(pipeline), "--namespace", "team-a"]) == 0
    assert (
        main(["schedule", "apply", "x", "--cron", "0 0 2 * * *", "--pipeline", str(pipeline), "--namespace", "team-a"])
        == 0
    )
    assert main(["schedule", "list", "--namespace", "team-a"]) == 0
    (run,) = server.kfp.runs.values()
    assert run["namespace"] == "team-a"
    assert main(["status", "--namespace", "team-b"]) == 2
    assert "(403)" in capsys.readouterr().err


def test_a_server_with_a_certificate_of_its_own_is_trusted_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only then, by option or environment; a file that is not there is named."""
    certificate = self_signed(tmp_path)
    with ApiServer(certificate=certificate) as server:
        monkeypatch.setenv("GRPO_PIPELINE_ENDPOINT", server.url)
        assert main(["status"]) == 75
        assert "certificate verify failed" in capsys.readouterr().err
        assert main(["status", "--ca-file", str(certificate.file)]) == 0
        monkeypatch.setenv("GRPO_PIPELINE_CA_FILE", str(certificate.file))
        assert main(["status"]) == 0
    assert main(["status", "--ca-file", str(tmp_path / "no.pem")]) == 2
    missing = f"error: {tmp_path / 'no.pem'}: cannot read certificates from this file\n"
    assert capsys.readouterr().err.endswith(missing)


def test_no_parameter_of_a_run_holds_what_is_secret(
    server: ApiServer, pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the environment's secrets travels but in the header that is for it."""
    server.kfp.token = SECRET
    monkeypatch.setenv("GRPO_PIPELINE_TOKEN", SECRET)
    assert main(["submit", "--pipeline", str(pipeline)]) == 0
    assert _shown(server, capsys) == []


def test_the_client_is_not_made_before_it_is_needed() -> None:
    """Importing the commands constructs none and imports no kfp: `--help` answers at once."""
    code = "import sys, pipelines.cli; print([name for name in ('kfp', 'kubernetes', 'yaml') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _shown(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Every place but the header where the secret has come to light."""
    out, error = capsys.readouterr()
    places = {"standard output": out, "standard error": error}
    for request in server.requests:
        headers = {name: value for name, value in request.headers.items() if name != "authorization"}
        places[f"{request.method} {request.path}"] = f"{request.path} {request.query} {headers} {request.body!r}"
    return [place for place, text in places.items() if SECRET in text]
