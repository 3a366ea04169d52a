from typing import Any

import pytest

from components.cluster.config import ClusterConfig
from components.preflight import resources
from components.preflight.config import Params, load_params
from components.preflight.resources import shape_of_base, with_memory
from components.rollout.vllm.config import EnginesConfig
from tests.presets import ROOT

_GIB = 2**30
_SEVEN_B = ROOT / "params/deepseekmath-7b.yaml"


def _config(name: str = "params/deepseekmath-7b.yaml", **sections: Any) -> ClusterConfig:
    """The cluster's section of a preset with other keys."""
    values = load_params(ROOT / name).model_dump()
    for section, keys in sections.items():
        for key, value in keys.items():
            values[section][key] = {**values[section][key], **value} if isinstance(value, dict) else value
    params = Params.model_validate(values)
    return with_memory(params, shape_of_base(params))


def _training_gib(**sections: Any) -> int:
    asked = _config(**sections).training_pod
    return asked.memory_gib - asked.shm_gib


def test_explicit_amounts_win() -> None:
    """What a params file says is neither raised nor lowered."""
    cluster = {"cpu_per_node": 2, "memory_per_node_gib": 5, "shm_gib": 3, "evaluate_memory_gib": 7}
    config = _config(cluster=cluster)
    assert config.training_pod == (2, 4, 8, 3)
    assert config.evaluation_gib == 7
    assert _config(cluster={"cpu_per_node": 32}).training_pod.cpu_limit == 32


@pytest.mark.parametrize("base", ["/work/models/mine", "./mine", "nobody/some-model"])
def test_models_of_unknown_size_get_a_fixed_amount(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the volume, which preflight does not mount, and where no hub answers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = {"model": {"base": base}}
    config = _config(train_sft=model, validate_data=model)
    assert (config.training_pod.memory_gib, config.evaluation_gib) == (64 + 2, 32)


def test_the_weights_of_every_process_have_room_while_they_load() -> None:
    """So have a checkpoint, which the first process collects, and engines that sleep while the policy is updated."""
    shape = shape_of_base(load_params(_SEVEN_B))
    assert shape
    weights_gib, gpus = 2 * shape.num_parameters / _GIB, {"cluster": {"gpus_per_node": 8}}
    assert _training_gib(**gpus) > 8 * weights_gib
    assert _training_gib(train_grpo={"sampler": {"vllm": {}}}, **gpus) - _training_gib(**gpus) > 8 * weights_gib
    assert _training_gib() > 12 * shape.num_parameters / _GIB
    evaluation_gib, float32_gib = (_config(evaluate=each).evaluation_gib for each in ({}, {"dtype": "float32"}))
    assert weights_gib < evaluation_gib < 2 * weights_gib < float32_gib
    engines = {"vllm": EnginesConfig(num_engines=3)}
    assert _config(evaluate=engines).evaluation_gib > 3 * weights_gib


@pytest.mark.parametrize(
    "more",
    [
        {"train_grpo": {"engine": {"offload": "optimizer"}}},
        {"train_sft": {"engine": {"offload": "all", "zero_stage": 3, "num_processes": 1}}},
        {"train_grpo": {"reference": "offloaded"}},
        {"train_grpo": {"reward": {"model": {}, "weights": {"reward_model": 1.0}}}},
        {"cluster": {"gpus_per_node": 8}},
        {"cluster": {"gpus_per_node": 0}},
    ],
)
def test_what_lies_in_the_memory_of_the_host_is_asked_for(more: dict[str, Any]) -> None:
    """Each of these takes memory of the pod that nothing else needs."""
    assert _training_gib(**more) > _training_gib()


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"torch_dtype": "float32"}, 4),
        ({"torch_dtype": "float32", "text_config": {"dtype": "bfloat16"}}, 2),
    ],
)
def test_weights_are_as_large_as_the_model_says(
    config: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the text model count; where none says so, weights are in float32, as for transformers."""
    monkeypatch.setattr(resources, "model_config", lambda _: config)
    values = load_params(_SEVEN_B).model_dump()
    values["evaluate"]["dtype"] = "auto"
    assert resources._evaluation_bytes(Params.model_validate(values)) == size


def test_without_a_gpu_evaluation_has_its_cache_in_memory() -> None:
    """More completions at once take more memory, and on a GPU they take none of the host's."""
    large = {"max_batch_size": 65536}
    for gpus in (0, 1):
        few, many = (_config("params.yaml", cluster={"gpus_per_node": gpus}, evaluate=each) for each in ({}, large))
        assert (many.evaluation_gib > few.evaluation_gib) == (gpus == 0)
