import copy
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params, load_params, stage_sections
from components.preflight.form import TYPED_KEYS, Form, complete, form_of, sections_of, wrong_sections
from tests.preflight.conftest import DEPLOYMENT, with_overrides
from tests.presets import FILES, write_params

_COMMIT = "0123456789" * 4


def _sections(form: Form) -> tuple[dict[str, Any], list[str]]:
    return sections_of(form, DEPLOYMENT, commit=_COMMIT, secrets={})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_form_means_what_the_params_file_says(path: Path) -> None:
    """Nothing is lost or changed on the way through the form, but for the registry's folder: it is on the volume."""
    form = form_of(load_params(path))
    before = copy.deepcopy(form)
    sections, twice = _sections(form)
    assert form == before, "it is shared"
    assert twice == wrong_sections(sections) == []
    made, expected = complete(Params.model_validate(sections)), stage_sections(load_params(path))
    cluster = made.pop("cluster")
    for stage in ("train_grpo", "report", "register"):
        assert made[stage].pop("registry") == "/work/registry"
        expected[stage].pop("registry")
    assert made == expected
    assert cluster["nodes"] * max(1, cluster["gpus_per_node"]) == expected["train_grpo"]["engine"]["num_processes"]


def test_the_cluster_of_a_params_file_is_that_of_the_form(tmp_path: Path) -> None:
    """A section `cluster` says what training jobs ask for: typed parameters, and the rest in the preset."""
    typed, rest = {"nodes": 2, "gpus_per_node": 4, "gpu_type": "H200", "queue": "team"}, {"max_restarts": 1}
    write_params(tmp_path / "mine.yaml", {"extends": str(FILES[0]), "cluster": typed | rest})
    form = form_of(load_params(tmp_path / "mine.yaml"))
    assert {name: form[f"cluster_{name}"] for name in typed} == typed
    assert (form["preset"]["cluster"], form["overrides"]) == (rest, "")
    assert _sections(form)[0]["train_sft"]["engine"]["num_processes"] == 8


def test_the_typed_parameters_are_what_training_gets(form: Form) -> None:
    """Each typed parameter changes its key, and what follows from it."""
    values = {
        "cluster_gpu_type": "NVIDIA-H200",
        "cluster_gpus_per_node": 4,
        "cluster_nodes": 2,
        "cluster_queue": "team",
        "data_revision": _COMMIT,
        "data_repository": "https://git.example/data.git",
        "registry": "https://git.example/models.git",
        "weights_storage": "https://dvc.example/weights",
        "grpo_learning_rate": 1e-6,
        "grpo_kl_coefficient": 0.5,
        "grpo_num_steps": 7,
        "base_model": "org/model",
    }
    assert values.keys() == TYPED_KEYS.keys()
    sections, _ = _sections({**form, **values})
    for name, key in TYPED_KEYS.items():
        value: Any = sections
        for part in key:
            value = value[part]
        assert value == values[name]
    complete_sections = complete(Params.model_validate(sections))
    assert complete_sections["train_grpo"]["engine"]["num_processes"] == 8
    # Checkpoints and the report are in the registry of the versions, and the validated model is the trained one.
    assert complete_sections["train_grpo"]["storage"] == values["weights_storage"]
    assert complete_sections["report"]["registry"] == values["registry"]
    assert complete_sections["validate_data"]["model"]["base"] == "org/model"


def test_a_key_is_set_in_one_place(form: Form) -> None:
    """Refuse a key in the text that has a field of its own, or follows from other fields: it would be ignored."""
    form = with_overrides(
        form,
        train_grpo={"num_steps": 4, "loss": {"kl": {"coefficient": 1.0}}},
        train_sft={"engine": {"num_processes": 3}},
        cluster={"secrets": {}, "image": "mine"},
        deployment={},
    )
    keys = ["train_grpo.loss.kl.coefficient", "train_grpo.num_steps", "train_sft.engine.num_processes"]
    keys += ["cluster.image", "cluster.secrets", "deployment"]
    lines = _sections(form)[1]
    assert [line.split(": ")[0] for line in lines] == [f"overrides.{key}" for key in keys]
    assert lines[2].endswith(": follows from cluster_nodes times cluster_gpus_per_node; leave it out here")


def test_everything_wrong_is_named_by_its_parameter(form: Form) -> None:
    """Several mistakes in several places are all found at once, in the words of the form; shapes included."""
    form |= {"grpo_num_steps": 0, "base_model": "scratch:huge", "cluster_nodes": 0}
    wrong: dict[str, Any] = {"report": {"gate": {"min_gian": 0.1}}, "reprot": {}, "cluster": {"stall_timeout": 1}}
    form = with_overrides(form, **wrong, train_grpo={"loss": 3}, evaluate="often")
    lines = wrong_sections(_sections(form)[0])
    beginnings = [
        "overrides.reprot: unknown key; did you mean `report`?",
        'base_model: no such preset, got "scratch:huge"; accepted: scratch:tiny',
        "overrides.report.gate.min_gian: unknown key; did you mean `min_gain`?",
        "grpo_num_steps: should be above 0, got 0",
        "cluster_nodes: should be above 0, got 0",
        "overrides.train_grpo.loss: should be a mapping of keys to values, got 3",
        "overrides.evaluate: should be a mapping of keys to values",
        "overrides.cluster.stall_timeout: unknown key; did you mean `stall_timeout_s`?",
    ]
    for beginning in beginnings:
        assert sum(line.startswith(beginning) for line in lines) == 1, (beginning, lines)
    assert not any("validate_data" in line for line in lines)
