"""Storages on real servers: S3 at another address than Amazon's, and SSH."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.register.config import RegisterConfig
from components.register.registry import fetch
from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from tests.register.registrations import make_config, make_policy, run_register, tags
from tests.register.storage_servers import BUCKET, SSHD, S3Server, s3_server, ssh_server

pytestmark = pytest.mark.slow
URL = f"s3://{BUCKET}/versions"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket; this process has its credentials, and no configuration files."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.credentials.items():
            monkeypatch.setenv(name, value)
        yield server


def _config_of(tmp_path: Path, endpoint: str | None) -> RegisterConfig:
    return make_config(tmp_path, storage=URL, storage_endpoint=endpoint)


def test_reader_needs_only_credentials(
    s3: S3Server, passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry keeps address and region that the environment had, also for plain DVC, and no keys."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    policy = make_policy(tmp_path / "policy")
    version = run_register(_config_of(tmp_path, None), policy, passed, tmp_path / "out")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    config = (tmp_path / "registry/.dvc/config").read_text()
    assert f"endpointurl = {s3.endpoint}\n    region = us-east-1\n" in config
    assert s3.credentials["AWS_SECRET_ACCESS_KEY"] not in config
    assert fetch(str(tmp_path / "registry"), "v0.0.1", tmp_path / "fetched").tag == version["tag"]
    assert lineage.digest(tmp_path / "fetched") == lineage.digest(policy)
    command = ["artifacts", "get", "registry", "grpo-policy", "--rev", version["version"], "--out", "plain"]
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    subprocess.run([sys.executable, "-m", "dvc", *command], check=True, cwd=tmp_path)
    assert lineage.digest(tmp_path / "plain") == lineage.digest(policy)
    with pytest.raises(PipelineError, match=rf"storage_endpoint: .* are stored in {s3.endpoint}, not in http://other"):
        run_register(_config_of(tmp_path, "http://other:1"), policy, passed, tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AWS_ACCESS_KEY_ID", "", "Unable to locate credentials"),
        ("AWS_SECRET_ACCESS_KEY", "another", "Forbidden|SignatureDoesNotMatch|signature"),
    ],
)
def test_missing_and_wrong_credentials_are_named(
    s3: S3Server, passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    """On writing as on reading, with exit code 2; nothing is registered."""
    config, policy = _config_of(tmp_path, s3.endpoint), make_policy(tmp_path / "policy")
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises(PipelineError, match=rf"^{URL}: cannot .*({reason}).*credentials") as refused:
            run_register(config, policy, passed, tmp_path / "out")
        assert tags(tmp_path / "registry") == []
    run_register(config, policy, passed, tmp_path / "out")
    monkeypatch.setenv(name, value)
    with pytest.raises(PipelineError, match=rf"({reason}).*credentials") as unreadable:
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
    assert (refused.value.exit_code, unreadable.value.exit_code) == (2, 2)


@pytest.mark.skipif(SSHD is None, reason="needs sshd (the Debian package openssh-server)")
def test_weights_behind_ssh(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back through a real sshd; a refused key is exit code 2, a server that is down 75."""
    policy = make_policy(tmp_path / "policy")
    with ssh_server(tmp_path / "ssh") as server:
        monkeypatch.setenv("HOME", str(server.home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        config = make_config(tmp_path, storage=server.url)
        run_register(config, policy, passed, tmp_path / "out")
        fetch(config.registry, "v0.0.1", tmp_path / "fetched")
        assert lineage.digest(tmp_path / "fetched") == lineage.digest(policy)
        key = server.home / ".ssh/id_ed25519"
        key.unlink()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, input=b"y\n")
        with pytest.raises(PipelineError, match="credentials") as refused:
            fetch(config.registry, "v0.0.1", tmp_path / "refused")
        assert refused.value.exit_code == 2
    with pytest.raises(RetryableError):
        fetch(config.registry, "v0.0.1", tmp_path / "down")
