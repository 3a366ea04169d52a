import json
from pathlib import Path
from typing import Any

import pytest

from components.prepare_data.config import PrepareConfig
from components.shared.config import Config
from components.shared.versioning import ModelVersion, Workspace, changes_since, newest_version
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from tests.presets import preset

CODE = "c0de"


def configs(**changed: Any) -> dict[str, Config]:
    """The sections that a policy is made by, with keys of train_grpo changed."""
    params = preset()
    return {
        "prepare_data": PrepareConfig.model_validate(params["prepare_data"]),
        "train_sft": TrainSFTConfig.model_validate(params["train_sft"]),
        "train_grpo": TrainGRPOConfig.model_validate({**params["train_grpo"], **changed}),
    }


def lineage() -> dict[str, Any]:
    """What a policy of the smoke preset keeps of how it was made."""
    dumped = {stage: config.model_dump(mode="json") for stage, config in configs().items()}
    prepared = {"stage": "prepare_data", "config": dumped["prepare_data"], "inputs": {}, "code": CODE}
    problems = {"digest": "d", "lineage": prepared}
    sft = {"stage": "train_sft", "config": dumped["train_sft"], "inputs": {"problems": problems}, "code": CODE}
    inputs = {
        "problems": problems,
        "reference": {"digest": "d", "lineage": sft},
        "extra": {"digest": "d", "lineage": None},
    }
    return {"stage": "train_grpo", "config": dumped["train_grpo"], "inputs": inputs, "code": CODE}


def test_the_same_code_on_the_same_data_and_config_changes_nothing() -> None:
    """Such a run would register the version that is there."""
    assert changes_since(ModelVersion("grpo-policy@v0.0.1", lineage()), configs(), CODE) == []


def test_where_and_how_fast_something_is_computed_is_no_change() -> None:
    """More processes compute the same."""
    engine = preset()["train_grpo"]["engine"]
    same = configs(engine={**engine, "num_processes": 4})
    assert changes_since(ModelVersion("grpo-policy@v0.0.1", lineage()), same, CODE) == []


def test_each_change_is_named() -> None:
    """The code, a key of the config, and the commit of the data."""
    promoted = ModelVersion("grpo-policy@v0.0.1", lineage())
    assert changes_since(promoted, configs(), "other") == ["the code"]
    assert changes_since(promoted, configs(group_size=8), CODE) == ["train_grpo.group_size"]
    data = {"url": "https://git.example/data", "commit": "f" * 40}
    moved = {**configs(), "prepare_data": _with_repository(data)}
    assert "prepare_data.repository" in changes_since(promoted, moved, CODE)


def test_a_config_of_an_older_code_is_a_change() -> None:
    """Keys that exist no more say nothing about today's."""
    old = lineage()
    old["config"] = {"epochs": 3}
    assert "train_grpo.num_steps" in changes_since(ModelVersion("grpo-policy@v0.0.1", old), configs(), CODE)


def test_the_newest_version_that_was_not_withdrawn_counts(tmp_path: Path) -> None:
    """By its number, not its name: v0.0.10 is newer than v0.0.9."""
    registry = _registry(tmp_path, ["v0.0.9", "v0.0.10", "v0.0.11"])
    registry.git("tag", "grpo-policy@v0.0.11!#1")
    promoted = newest_version(str(registry.folder), "grpo-policy")
    assert promoted == ModelVersion("grpo-policy@v0.0.10", {"of": "v0.0.10"})


@pytest.mark.parametrize("name", ["grpo", "other"])
def test_versions_of_other_models_do_not_count(tmp_path: Path, name: str) -> None:
    """A registry may hold several models."""
    registry = _registry(tmp_path, ["v0.0.1"])
    assert newest_version(str(registry.folder), name) is None


def _registry(folder: Path, versions: list[str]) -> Workspace:
    outside = Workspace(folder, folder)
    outside.git("init", "--quiet", "registry")
    registry = Workspace(folder / "registry", folder)
    for version in versions:
        (registry.folder / "lineage.json").write_text(json.dumps({"of": version}))
        registry.git("add", "--all")
        registry.git("commit", "--quiet", "--message", version)
        registry.git("tag", f"grpo-policy@{version}")
    return registry


def _with_repository(data: dict[str, str]) -> PrepareConfig:
    source = {"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}
    plain = configs()["prepare_data"].model_dump(mode="json")
    return PrepareConfig.model_validate({**plain, "sources": [source], "repository": data})
