"""The run form: a params file taken apart into parameters, and put together again."""

import copy
from pathlib import Path

import pytest

from components.preflight.config import resolved
from components.preflight.form import KEYS, PREFIX, Form, form_of, sections_of
from components.preflight.sections import complete, wrong_sections
from pipelines.grpo_post_training_on_cluster import FORM

_ROOT = Path(__file__).parents[2]
_FILES = [_ROOT / "params.yaml", *sorted((_ROOT / "params").glob("*.yaml"))]
_COMMIT = "0123456789" * 4


def _of_file(path: Path) -> Form:
    return {**FORM, **form_of(resolved(path))}


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_a_form_means_what_the_params_file_says(path: Path) -> None:
    """Nothing is lost or changed on the way through the form; only where versions are kept is the volume's now."""
    made, twice = sections_of(_of_file(path), _COMMIT, {})
    assert twice == []
    assert wrong_sections(made) == []
    made, expected = complete(made), resolved(path)
    cluster = made.pop("cluster")
    assert made["register"].pop("registry") == "/work/registry"
    expected["register"].pop("registry")
    assert made == expected
    assert cluster["nodes"] * max(1, cluster["gpus_per_node"]) == expected["train_grpo"]["engine"]["num_processes"]


def test_the_typed_parameters_are_what_training_gets(form: Form) -> None:
    """Each typed parameter changes the keys it stands for, and nothing else."""
    before = complete(sections_of(form, _COMMIT, {})[0])
    values = {
        "base_model": "org/model",
        "cluster_gpu_product": "NVIDIA-H200",
        "cluster_gpus_per_node": 4,
        "cluster_node_selector": {"pool": "gpu"},
        "cluster_num_nodes": 2,
        "cluster_queue": "team",
        "cluster_tolerations": [{"key": "gpu", "operator": "Exists", "value": "", "effect": ""}],
        "cluster_volume_claim": "other",
        "grpo_group_size": 16,
        "grpo_kl_coefficient": 0.5,
        "grpo_learning_rate": 1e-6,
        "grpo_num_steps": 7,
        "image_gpu": "registry.example/gpu:1",
        "registry_kubeflow_url": "http://registry.example:8080",
        "registry_repository": "https://git.example/models.git",
        "registry_weights_remote": "https://dvc.example/weights",
    }
    assert values.keys() == KEYS.keys()
    after = complete(sections_of({**form, **values}, _COMMIT, {})[0])
    for name, keys in KEYS.items():
        for key in keys:
            section, *path, last = key
            place, old = after[section], before[section]
            for part in path:
                place, old = place[part], old[part]
            assert place.pop(last) == values[name], key
            old.pop(last, None)
    for stage in ("train_sft", "train_grpo"):
        assert after[stage]["engine"].pop("num_processes") == 8
        before[stage]["engine"].pop("num_processes")
    assert after == before


def test_a_key_is_given_in_one_place(form: Form) -> None:
    """A key that a parameter stands for is refused in the JSON: one of the two would be ignored."""
    form["section_train_grpo"]["group_size"] = 4
    form["section_train_grpo"]["loss"]["kl"]["coefficient"] = 1.0
    form["section_train_sft"]["engine"]["num_processes"] = 3
    form["section_cluster"] = {"secrets": {}}
    _, twice = sections_of(form, _COMMIT, {})
    assert twice == [
        "section_train_grpo.group_size: follows from grpo_group_size; leave it out here",
        "section_train_grpo.loss.kl.coefficient: follows from grpo_kl_coefficient; leave it out here",
        "section_train_sft.engine.num_processes: follows from cluster_num_nodes times cluster_gpus_per_node; "
        "leave it out here",
        "section_cluster.secrets: follows from secret_hub; leave it out here",
    ]


def test_everything_wrong_is_named_by_its_parameter(form: Form) -> None:
    """Several mistakes in several places are all found at once, in the words of the form."""
    form |= {"grpo_group_size": 1, "grpo_learning_rate": -1.0, "base_model": "scratch:huge", "cluster_num_nodes": 0}
    form["section_report"]["gate"]["min_gian"] = form["section_report"]["gate"].pop("min_gain")
    form["section_reprot"] = {}
    lines = wrong_sections(sections_of(form, _COMMIT, {})[0])
    beginnings = [
        "section_reprot: there is no such section",
        "base_model: no such preset; accepted: scratch:tiny",
        "section_report.gate.min_gian: unknown key; did you mean `min_gain`?",
        "grpo_group_size: input should be greater than 1, got 1",
        "grpo_learning_rate: input should be greater than 0, got -1.0",
        "cluster_num_nodes: input should be greater than 0, got 0",
    ]
    for beginning in beginnings:
        assert sum(line.startswith(beginning) for line in lines) == 1, (beginning, lines)
    assert not any(line.startswith("section_report.gate.min_gain:") for line in lines)  # the misspelling says it all


def test_json_of_the_wrong_shape_is_refused_and_no_crash(form: Form) -> None:
    """A section with text or a number in the place of an object is one more line."""
    form["section_train_grpo"] = {**form["section_train_grpo"], "loss": 3, "engine": "fast"}
    lines = wrong_sections(sections_of(form, _COMMIT, {})[0])
    assert {line.split(":")[0] for line in lines} == {"section_train_grpo.loss", "section_train_grpo.engine"}


def test_time_limits_fit_into_the_step(form: Form) -> None:
    """Limits that add up to more than Kubernetes gives the step would end a training that is allowed to go on."""
    form["section_cluster"] = {"training_timeout_s": 30 * 24 * 3600}
    (line,) = wrong_sections(sections_of(form, _COMMIT, {})[0])
    assert line.startswith("section_cluster: the time limits add up to")


def test_the_form_leaves_its_defaults_as_they_are() -> None:
    """Putting sections together changes nothing in the form, which is shared."""
    before = copy.deepcopy(FORM)
    sections_of(FORM, _COMMIT, {})
    assert before == FORM
    assert {name for name in FORM if name.startswith(PREFIX)} == {
        f"{PREFIX}{name}" for name in (*resolved(_FILES[0]), "cluster")
    }
