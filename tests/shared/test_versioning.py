"""Git in a workspace: which of its failures may pass; and whether a run would reproduce the newest version."""

from pathlib import Path
from typing import Any

import pytest

from components.register.checks import changes_since
from components.shared.errors import PipelineError, RetryableError
from components.shared.versioning import Workspace
from components.train_grpo.config import TrainGRPOConfig
from tests.lineages import made
from tests.presets import preset


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 503", RetryableError),
        ("fatal: detected dubious ownership\n\tgit config --global --add safe.directory /r", PipelineError),
        ("fatal: unable to access 'https://gti.example/': Could not resolve host: gti.example", RetryableError),
        ("fatal: the remote end hung up unexpectedly", RetryableError),
        ("ssh: Could not resolve hostname host\r\nfatal: Could not read from remote repository.", RetryableError),
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 403", PipelineError),
    ],
)
def test_absence_differs_from_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, kind: type[PipelineError]
) -> None:
    """Only the first is worth another attempt."""
    (tmp_path / "git").write_text(f'#!/bin/sh\necho "{printed}" >&2\nexit 128\n')
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(PipelineError) as raised:
        Workspace(tmp_path, tmp_path).git("push")
    reason = printed.partition("\r")[0].removeprefix("fatal: ").replace("\n\t", "; if you trust its owner, run: ")
    assert (type(raised.value), str(raised.value)) == (kind, f"git: {reason}")


def test_changes_since_a_version_are_named() -> None:
    """The code and keys of any stage; operational keys, such as the number of processes, are no changes."""
    grpo = preset()["train_grpo"]
    made_by = made("train_grpo", TrainGRPOConfig.model_validate(grpo).model_dump(mode="json"), code="c0de")

    def changes(code: str = "c0de", **changed: Any) -> list[str]:
        return changes_since(made_by, {"train_grpo": TrainGRPOConfig.model_validate({**grpo, **changed})}, code)

    assert changes(engine={**grpo["engine"], "num_processes": 4}) == []
    assert changes("other") == ["the code"]
    assert changes(group_size=8) == ["train_grpo.group_size"]
    made_by = made("train_grpo", {"laps": 3}, code="c0de")  # by an older version of the code, with other keys
    assert "train_grpo.num_steps" in changes()
