"""Git in a workspace: which of its failures may pass; and whether a run would reproduce the newest version."""

from pathlib import Path
from typing import Any

import pytest

from components.register.checks import changes_since
from components.shared.config import Config
from components.shared.errors import PipelineError, RetryableError
from components.shared.lineage import Lineage
from components.shared.versioning import Workspace
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from tests.lineages import made
from tests.presets import preset

_CODE = "c0de"


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 503", RetryableError),
        ("fatal: unable to access 'https://gti.example/': Could not resolve host: gti.example", RetryableError),
        ("fatal: the remote end hung up unexpectedly", RetryableError),
        ("fatal: unable to access 'https://git.example/': The requested URL returned error: 403", PipelineError),
    ],
)
def test_a_server_that_is_away_is_distinguished_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, kind: type[PipelineError]
) -> None:
    """Only the first is worth another attempt."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "{printed}" >&2\nexit 128\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    with pytest.raises(PipelineError) as raised:
        Workspace(tmp_path, tmp_path).git("push")
    assert (type(raised.value), str(raised.value)) == (kind, f"git: {printed.removeprefix('fatal: ')}")


def _configs(**changed: Any) -> dict[str, Config]:
    """The sections that a policy is made by, with keys of train_grpo changed."""
    params = preset()
    return {
        "train_sft": TrainSFTConfig.model_validate(params["train_sft"]),
        "train_grpo": TrainGRPOConfig.model_validate({**params["train_grpo"], **changed}),
    }


def _version(**grpo: Any) -> Lineage:
    """The lineage of a policy of the smoke preset, or with another section `train_grpo`."""
    dumped = {stage: config.model_dump(mode="json") for stage, config in _configs().items()}
    inputs = {"reference": made("train_sft", dumped["train_sft"], code=_CODE), "extra": None}
    return made("train_grpo", grpo or dumped["train_grpo"], inputs, code=_CODE)


def test_changes_since_a_version_are_named() -> None:
    """The code and keys of any stage; operational keys, such as the number of processes, are no changes."""
    engine = preset()["train_grpo"]["engine"]
    assert changes_since(_version(), _configs(engine={**engine, "num_processes": 4}), _CODE) == []
    assert changes_since(_version(), _configs(), "other") == ["the code"]
    assert changes_since(_version(), _configs(group_size=8), _CODE) == ["train_grpo.group_size"]
    # Written by an older version of the code, with other keys.
    assert "train_grpo.num_steps" in changes_since(_version(laps=3), _configs(), _CODE)
