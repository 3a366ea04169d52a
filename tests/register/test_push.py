"""Pushing a version to a hub, with the real client of the hub."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.hub_server import TOKEN, Hub, running_hub
from tests.register.conftest import Registered

pytestmark = pytest.mark.slow
_COMMAND = Path(sys.executable).with_name("grpo-pipeline")


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty hub."""
    with running_hub() as running:
        yield running


def _push(hub: Hub, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    home = Path("hub-home").absolute()
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "0"}
    command: list[str | Path] = [_COMMAND, "push", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_version_is_pushed_with_its_card_and_tag(hub: Hub, registered: Registered) -> None:
    """A private repository gets its weights in one commit, and nothing that names people or machines."""
    _, policy, _ = registered
    pushed = _push(hub, "latest", "someone/reasoner")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.splitlines()[-1] == f"latest -> {hub.url}/someone/reasoner, tag grpo-policy@v0.0.1"
    files = hub.files["someone/reasoner"]
    assert hub.private == {"someone/reasoner": True}
    assert hub.tags["someone/reasoner"] == {"grpo-policy@v0.0.1"}
    assert files["model.safetensors"] == (policy / "model.safetensors").read_bytes()
    assert b"# grpo-policy v0.0.1" in files["README.md"]
    assert "lineage.json" not in files
    assert (policy / "lineage.json").is_file()
    # A shard that the new weights do not have would be loaded beside them; an existing repository stays private.
    files["model-00002-of-00002.safetensors"] = b"old"
    assert _push(hub, "policy", "someone/reasoner", "--public").returncode == 0
    written = {"config.json", "extra/empty.txt", "model.safetensors", "pipeline.json"}
    assert set(hub.files["someone/reasoner"]) == written
    assert hub.private == {"someone/reasoner": True}


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (("latest", "reasoner"), TOKEN, "push: reasoner: the name of a repository is USER/NAME"),
        (("latest", "someone/reasoner"), "", "push: no login: set HF_TOKEN to a token that may write"),
        (("latest", "someone/reasoner"), "hf_reads", "push: someone/reasoner: the hub refuses"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    hub: Hub, registered: Registered, arguments: tuple[str, ...], token: str, message: str
) -> None:
    """And nothing is on the hub then."""
    pushed = _push(hub, *arguments, token=token)
    assert pushed.returncode == 2
    assert pushed.stderr.startswith(f"error: {message}")
    assert pushed.stderr.count("\n") == 1
    assert not hub.files
