import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.shared.model_shape import KNOWN_MODELS, ModelShape
from pipelines.plan.hardware import gpu
from pipelines.plan.memory import STATES, _alternatives, cheapest_changes, fits, memory_of, peak
from pipelines.plan.run import Run
from tests.presets import ROOT

H100, H200, A100 = gpu("h100"), gpu("h200"), gpu("a100")
NUM_PARAMETERS = 6_910_365_696
WHOLE = 2 * NUM_PARAMETERS
VALUES: dict[str, Any] = {
    **{"shape": KNOWN_MODELS["deepseek-7b"], "prompts": 16, "group_size": 64, "micro_batch_tokens": 16384},
    **{"prompt_tokens": 1024, "completion_tokens": 1024, "mean_prompt_tokens": 256, "mean_completion_tokens": 512},
    **{"zero_stage": 2, "element_bytes": 2, "gradient_checkpointing": True},
    **{"reference": "replicated", "sampler": "transformers", "max_batch_size": 512},
}


def run(num_gpus: int = 8, **changes: Any) -> Run:
    """Return a run, by default with these values."""
    return Run(num_gpus=num_gpus, **{**VALUES, **changes})


def near(value: float) -> object:
    """The value to within rounding."""
    return pytest.approx(value, rel=1e-9)


def test_seven_billion_parameters_by_hand() -> None:
    """Under ZeRO 2 on 8 GPUs: weights whole, 4 bytes of gradient and 12 of optimizer per parameter shared."""
    memory = memory_of(run())
    assert memory["weights"] == memory["reference"] == near(13_820_731_392)
    assert memory["gradients"] == near(27_641_462_784 / 8)
    assert memory["optimizer"] == near(82_924_388_352 / 8)
    # 2 groups of 64 on a GPU: 2 prompts of 1,024 and 128 completions of 1,024, each token 2 x 30 x 4,096 elements.
    assert memory["kv_cache"] == near((2 * 1024 + 128 * 1024) * 2 * 30 * 4096 * 2)
    # In fp32, three sets of logits of the 128 completions under way; they stand beside the cache.
    assert memory["sampling"] == near(3 * 4 * 128 * 102400)
    resident = memory["weights"] + memory["optimizer"] + memory["reference"]
    assert memory["sampling_peak"] == near(resident + memory["kv_cache"] + memory["sampling"])
    # With checkpointing the inputs of 30 layers, of 16,384 tokens, and what is saved around them.
    end = 32 + 2 * 128 * 2 + 4096 * (4 + 2) + 4096 * 2 + 12
    assert memory["activations"] == near(16384 * (30 * 4096 * 2 + end))
    # Later a layer of 4,096 and 11,008 is computed again: norms, matrices, attention, MLP. Gradients of three tensors
    # of its MLP and two of its hidden size are there with it, and a bucket of 500 million gradients.
    layer = 2 * 4096 * (4 + 2) + 2 * 4096 * 2 + 4 * 4096 * 2 + 4 * 32 + 4 * 11008 * 2
    assert memory["buffers"] == near(16384 * (layer + 2 * (3 * 11008 + 2 * 4096)) + 2 * 500_000_000)


@pytest.mark.parametrize(
    ("changes", "weights", "gradients", "optimizer"),
    [
        ({"zero_stage": 0}, 2, 4, 12),
        ({"zero_stage": 1}, 2, 4, 12 / 8),
        ({"zero_stage": 2}, 2, 4 / 8, 12 / 8),
        ({"zero_stage": 3}, 2 / 8, 4 / 8, 12 / 8),
        # Weights in fp32 are their own master copy, unless they are sharded.
        ({"zero_stage": 0, "element_bytes": 4}, 4, 4, 8),
        ({"zero_stage": 1, "element_bytes": 4}, 4, 4, 12 / 8),
        # What is offloaded is not on the GPU, but for small tensors.
        ({"zero_stage": 3, "offload": "optimizer"}, 2 / 8, 0, 0),
        ({"zero_stage": 3, "offload": "all"}, 0, 0, 0),
    ],
)
def test_each_stage_of_zero_shards_more(changes: Any, weights: float, gradients: float, optimizer: float) -> None:
    """Bytes per parameter on 8 GPUs; tensors too small to be sharded add little."""
    memory = memory_of(run(**changes))
    assert memory["weights"] == pytest.approx(weights * NUM_PARAMETERS, rel=0.001, abs=0.001 * NUM_PARAMETERS)
    assert memory["gradients"] == near(gradients * NUM_PARAMETERS)
    assert memory["optimizer"] == near(optimizer * NUM_PARAMETERS)
    for placement, per_parameter in (("none", 0.0), ("sharded", 2 / 8), ("offloaded", 0.0)):
        reference = memory_of(run(reference=placement))["reference"]
        assert reference == pytest.approx(per_parameter * NUM_PARAMETERS, rel=0.001)


def test_quantised_matrices_take_four_bits_and_their_scales() -> None:
    """Of 7B: 0.5625 bytes in place of 2 for each element of 30 layers; nothing that 4 bits exclude is proposed."""
    plain, quantised = (run(lora_rank=8, lora_targets=("q_proj",), quantised=each) for each in (False, True))
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    saved = memory_of(plain)["weights"] - memory_of(quantised)["weights"]
    assert saved == near((2 - 0.5625) * 30 * layer)
    changes = [each.text for options in _alternatives(quantised) for each in options]
    assert "engine.zero_stage: 3" not in changes


def test_the_sampler_has_its_copy_of_the_weights() -> None:
    """Under ZeRO 3 an unsharded one all the time; vLLM's only while it is awake; servers' are elsewhere."""
    sharded, vllm = memory_of(run(zero_stage=3)), memory_of(run(zero_stage=3, sampler="vllm"))
    apart = memory_of(run(zero_stage=3, sampler="vllm_server", num_server_gpus=2))
    assert memory_of(run())["sampler_weights"] == 0
    assert sharded["sampler_weights"] == vllm["sampler_weights"] == near(WHOLE)
    # What a sleeping engine keeps: its context and its graphs, half a GiB and one.
    assert vllm["engine"] == near(1.5 * 2**30)
    assert memory_of(run(sampler="vllm", compiled=False))["engine"] == near(0.5 * 2**30)
    assert sharded["update_peak"] - vllm["update_peak"] == near(WHOLE - vllm["engine"])
    assert apart["sampler_weights"] == apart["kv_cache"] == apart["sampling"] == 0
    # What is sharded is divided among the GPUs that train.
    assert apart["optimizer"] == memory_of(run(6, zero_stage=3))["optimizer"]


def test_a_reward_model_has_states_like_the_policy() -> None:
    """Weights, gradients and optimizer, sharded alike, in the update and while sampling."""
    plain, judged = (memory_of(run(zero_stage=3, reward_model=each)) for each in (False, True))
    assert judged["reward_model"] == near(_states(plain))
    for part in ("update_peak", "sampling_peak"):
        assert judged[part] - plain[part] == near(_states(plain))


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    """Rank 8 on queries and keys of 30 layers: 2 x 30 x 8 x 8,192 parameters."""
    memory = memory_of(run(lora_rank=8, lora_targets=("q_proj", "k_proj")))
    trained = 2 * 30 * 8 * (4096 + 4096)
    assert memory["optimizer"] == near(12 * trained / 8)
    assert memory["gradients"] == near(4 * trained / 8)
    assert memory["weights"] == near(WHOLE + 2 * trained)


def test_the_output_layer_can_be_the_peak_of_the_update() -> None:
    """512 tokens of a small model without sharding: gradients, the logits of all twice, hidden states."""
    shape = KNOWN_MODELS["qwen2.5-0.5b"]
    lengths = {"prompt_tokens": 256, "completion_tokens": 256, "micro_batch_tokens": 512}
    memory = memory_of(run(zero_stage=0, shape=shape, **lengths))
    assert memory["buffers"] == near(4 * 151936 * 896 + 2 * 4 * 512 * 151936 + 512 * 896 * 2)
    # All of a model from scratch is gathered, in the bucket, and gathered ahead.
    scratch = ModelShape(320, 960, 6, 5, 1, 64, 2048, tied=False)
    assert memory_of(run(zero_stage=3, shape=scratch, **lengths))["buffers"] == near(3 * 2 * scratch.num_parameters)


def test_size_of_a_micro_batch() -> None:
    """At most its tokens, unless one completion is longer, and never more than a GPU has."""
    assert run().tokens_at_once == 16384
    assert run(micro_batch_tokens=100).tokens_at_once == 2048
    assert run(micro_batch_tokens=10**6).tokens_at_once == 2 * (1024 + 64 * 1024)
    assert run(micro_batch_tokens=10**6, minibatches=2).tokens_at_once == 1024 + 64 * 1024


CHANGES: dict[str, Any] = {
    **{"zero_stage": st.integers(0, 3), "element_bytes": st.sampled_from([2, 4])},
    **{"gradient_checkpointing": st.booleans(), "micro_batch_tokens": st.integers(512, 65536)},
    **{"sampler": st.sampled_from(["transformers", "vllm"]), "prompts": st.integers(1, 600)},
    "reference": st.sampled_from(["none", "replicated", "sharded", "offloaded"]),
}


@settings(max_examples=60)
@given(changes=st.fixed_dictionaries(CHANGES), num_gpus=st.integers(1, 600))
def test_more_gpus_never_need_more_memory_each(changes: dict[str, Any], num_gpus: int) -> None:
    """Nor does a higher stage of ZeRO hold more of the model."""
    few, more = (memory_of(run(number, **changes)) for number in (num_gpus, num_gpus + 1))
    assert peak(more) <= peak(few)
    assert _states(more) <= _states(few)
    if changes["zero_stage"] and num_gpus > 1:
        assert _states(few) <= _states(memory_of(run(num_gpus, **{**changes, "zero_stage": changes["zero_stage"] - 1})))


def _states(memory: dict[str, float]) -> float:
    return sum(memory[name] for name in STATES)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "change"),
    [
        # Two groups at once are 61 GiB of keys and values.
        (8, {"zero_stage": 3, "max_batch_size": 512}, "sampling.max_batch_size: 64"),
        (8, {"zero_stage": 0}, "engine.zero_stage: 1"),
        # Offloading alone would do, too, and so would ZeRO 2.
        (6, {"zero_stage": 1}, "engine.micro_batch_tokens: 8192"),
        # What is offloaded has to be sharded, although offloading alone would fit.
        (1, {"zero_stage": 0, "prompts": 1}, "engine.zero_stage: 1, engine.offload: optimizer"),
    ],
)
def test_the_cheapest_change_that_fits_is_named(num_gpus: int, changes: dict[str, Any], change: str) -> None:
    """Not just any that makes it fit."""
    planned = run(num_gpus, **{"max_batch_size": 64, **changes})
    assert not fits(planned, H100)
    assert cheapest_changes(planned, H100) == change
    assert fits(run(zero_stage=3, max_batch_size=64), H100)


def test_more_gpus_are_the_last_resort() -> None:
    """Doubled until it fits, while there are prompts for them."""
    large = {"zero_stage": 3, "offload": "optimizer", "reference": "none", "max_batch_size": 64, "sampler": "vllm"}
    large |= {"micro_batch_tokens": 2048, "shape": KNOWN_MODELS["qwen2.5-32b"]}
    # The sampler's copy and the gathered weights are 61 GiB each: of the policy a sixteenth has room beside them.
    assert cheapest_changes(run(8, **large), H200) == "--gpus 16"
    assert cheapest_changes(run(8, prompts=8, **large), H200) is None
    # 72 billion parameters on one GPU of 44 GiB.
    assert cheapest_changes(run(1, shape=KNOWN_MODELS["qwen2.5-72b"], prompts=1), gpu("l40s")) is None


def test_servers_need_memory_for_weights_and_a_completion() -> None:
    """61 GiB, and 10 or 13 GiB for 41,024 or 51,024 tokens."""
    apart = run(64, shape=KNOWN_MODELS["qwen2.5-32b"], zero_stage=3, reference="none", offload="all")
    apart = replace(apart, sampler="vllm_server", num_server_gpus=32)
    longer = replace(apart, completion_tokens=50_000)
    assert peak(memory_of(longer)) < A100.usable_bytes
    assert fits(replace(apart, completion_tokens=40_000), A100)
    assert not fits(longer, A100)
    # Over two GPUs there is room; unless vLLM is told to set more aside.
    split = replace(longer, tensor_parallel=2)
    assert fits(split, A100)
    assert not fits(replace(split, cache_bytes=100e9), A100)


TOLERANCE = 0.10


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What each of two processes counted, by case and part."""
    folder = tmp_path_factory.mktemp("counted")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "tests.pipelines.plan_processes", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def as_planned(case: str) -> Run:
    """The plan's view of a case of plan_processes.py."""
    from tests.pipelines import plan_processes as measured

    changes = {"precision": "fp32", "gradient_checkpointing": False, **measured.CASES[case]}
    changes["element_bytes"] = 2 if changes.pop("precision") == "bf16" else 4
    prompt, completion = measured.PROMPT_TOKENS, measured.COMPLETION_TOKENS
    changes |= {"prompt_tokens": prompt, "completion_tokens": completion}
    changes |= {"mean_prompt_tokens": prompt, "mean_completion_tokens": completion, "max_batch_size": 256}
    changes |= {"micro_batch_tokens": measured.MICRO_BATCH_TOKENS, "group_size": measured.GROUP_SIZE, "prompts": 4}
    return run(2, shape=measured.SHAPE, reference="none", **changes)


@pytest.mark.long(minutes=0.2)
@pytest.mark.parametrize("case", ["ZeRO 0", "ZeRO 2", "ZeRO 3", "ZeRO 3, bf16", "ZeRO 3, bf16, checkpointing"])
def test_parts_match_measured_memory(counted: list[dict[str, dict[str, float]]], case: str) -> None:
    """Within a tenth, in each of two processes."""
    memory = memory_of(as_planned(case))
    planned = {name: memory[name] for name in (*STATES, "activations")}
    planned["update"] = memory["activations"] + memory["buffers"]
    for measured in counted:
        assert planned == pytest.approx(measured[case], rel=TOLERANCE)


@pytest.mark.slow
def test_cache_matches_measured_memory() -> None:
    """Two groups of four whose completions all reach their limit."""
    import torch

    from components.policy.attention import use_packed_attention
    from components.rollout.decoding import Decoding
    from components.rollout.sampler import Sampling
    from components.rollout.trajectory import RolloutContext, Trajectory
    from tests import tiny

    checkpoint = tiny.checkpoint()
    use_packed_attention(checkpoint.model)
    checkpoint.__dict__["end_ids"] = ()
    rollout = RolloutContext(checkpoint, Sampling(num_samples=4, temperature=1.0, max_new_tokens=100, seed=1))
    prompts = [(1,) * 40, (2,) * 40]
    batch = Decoding(checkpoint, prompts, 4, 1.0)
    rows = [Trajectory(rollout, tiny.PROBLEMS[0], prompt) for prompt in prompts for _ in range(4)]
    with torch.no_grad():
        batch.run(rows, torch.rand(8, 100, dtype=torch.float64))
    cache = batch.cache
    tensors = [*cache._prompt_keys, *cache._prompt_values, *cache._keys, *cache._values]
    shape = ModelShape(64, 256, 2, 4, 4, 16, checkpoint.model.config.vocab_size, tied=False, qk_norm=True)
    lengths = {"prompt_tokens": 40, "completion_tokens": 100, "prompts": 2, "group_size": 4, "max_batch_size": 8}
    memory = memory_of(run(1, shape=shape, element_bytes=4, **lengths))
    counted = sum(each.untyped_storage().nbytes() for each in tensors)
    assert memory["kv_cache"] == pytest.approx(counted, rel=TOLERANCE)
