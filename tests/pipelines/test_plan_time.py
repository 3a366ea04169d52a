from dataclasses import replace
from typing import Any

import pytest

from components.shared.model_shape import ModelShape
from pipelines.plan.hardware import gpu
from pipelines.plan.scaling import limit_of, loss_at, simulate
from pipelines.plan.step_time import (
    CHECKPOINTS,
    OTHER,
    REFERENCE,
    SAMPLING,
    SCORING,
    SYNC,
    UPDATE,
    checkpoint_bytes,
    forward_flops,
    step_time,
)
from tests.pipelines.planned import SEVEN_B, run

H200 = gpu("h200")
MATRICES = 30 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
HEAD = 102400 * 4096


def test_operations_of_a_forward_pass_by_hand() -> None:
    """A group of 64: its prompt of 256 tokens once, completions of 512, and logits for these alone."""
    tokens = 64 * 512
    pairs = 256**2 / 2 + tokens * (256 + 512 / 2)
    expected = 2 * (MATRICES * (256 + tokens) + HEAD * tokens) + 4 * 4096 * 30 * pairs
    assert forward_flops(run(), 64) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_operations_match_those_counted_in_training() -> None:
    """For a rollout of equal lengths, to what a causal diagonal adds."""
    import torch

    from components.policy.flops import FlopCounter
    from components.policy.packing import TokenSequence, pack
    from tests import tiny

    model = tiny.checkpoint().model
    sequences = [TokenSequence((prompt,) * 40, (7,) * 60) for prompt in (1, 2) for _ in range(4)]
    batches = pack(sequences, max_tokens=1000, device=torch.device("cpu"))
    shape = ModelShape(64, 256, 2, 4, 4, 16, model.config.vocab_size, tied=False, qk_norm=True)
    lengths = {"mean_prompt_tokens": 40, "mean_completion_tokens": 60, "group_size": 4}
    assert forward_flops(run(shape=shape, **lengths), 8) == pytest.approx(
        FlopCounter(model).forward_flops(batches), rel=0.01
    )


def test_collectives_by_hand() -> None:
    """15 GB over 8 GPUs of a node: seven eighths at 0.8 of 450 GB/s, and seven hops."""
    h100 = gpu("h100")
    assert h100.gather_s(8, 15e9) == pytest.approx(15e9 * 7 / 8 / 360e9 + 7e-6)
    assert h100.gather_s(8, 15e9, num_calls=10) == pytest.approx(15e9 * 7 / 8 / 360e9 + 70e-6)
    assert h100.gather_s(1, 15e9) == 0
    # Two nodes share eight cards of 50 GB/s: 400 GB/s are the slower link.
    assert h100.gather_s(16, 15e9) == pytest.approx(15e9 * 15 / 16 / 320e9 + 14e-6 + 5e-6)


def test_sampling_waits_for_the_longest_completion() -> None:
    """Twice the limit is twice the steps, whatever the mean; they read all weights each time."""
    one, two = (step_time(run(completion_tokens=tokens), H200) for tokens in (1024, 2048))
    key = (SAMPLING, "reading weights")
    assert two.terms[key] == pytest.approx(2 * one.terms[key])
    assert one.terms[key] == pytest.approx(1024 * 2 * (MATRICES + HEAD) / (0.6 * 4.8e12))


def test_transformers_samples_batches_in_sequence() -> None:
    """Four groups in batches of two: the longest completion twice; vLLM fills its places as they become free."""
    slow, packed = (
        step_time(run(4, sampler=sampler, max_batch_size=128), H200).terms[SAMPLING, "reading weights"]
        for sampler in ("transformers", "vllm")
    )
    whole = step_time(run(4, max_batch_size=256), H200).terms[SAMPLING, "reading weights"]
    assert slow == pytest.approx(2 * whole)
    assert packed == pytest.approx((256 * 512 / 128 + 1024 - 512) / 1024 * whole)
    # A cache of 64 completions with their share of the prompt.
    cache = 64 * (256 / 64 + 512) * 2 * 30 * 4096 * 2
    held = step_time(run(4, sampler="vllm", cache_bytes=cache), H200).terms[SAMPLING, "reading weights"]
    assert held == pytest.approx((256 * 512 / 64 + 1024 - 512) / 1024 * whole)


def test_cost_of_each_setting() -> None:
    """Checkpointing one more forward pass, adapters one less, two updates two, offloading the way to the host."""
    plain = step_time(run(gradient_checkpointing=False), H200)
    head = HEAD / (MATRICES + HEAD)
    arithmetic, moving = (UPDATE, "arithmetic"), (UPDATE, "moving activations")
    assert step_time(run(), H200).terms[arithmetic] == pytest.approx(plain.terms[arithmetic] * 4 / (3 + head))
    twice = step_time(run(gradient_checkpointing=False, updates=2), H200)
    assert twice.phases[UPDATE] == pytest.approx(2 * plain.phases[UPDATE])
    adapters = step_time(run(lora_rank=8, lora_targets=("q_proj",)), H200)
    assert adapters.terms[arithmetic] == pytest.approx(step_time(run(), H200).terms[arithmetic] * 3 / 4)
    alone = step_time(run(gradient_checkpointing=False, reference="none"), H200)
    assert alone.phases[REFERENCE] == 0
    assert plain.phases[REFERENCE] == pytest.approx((plain.terms[arithmetic] + plain.terms[moving]) / (3 + head))
    host = step_time(run(gradient_checkpointing=False, offload="optimizer"), H200)
    assert host.terms[UPDATE, "optimizer"] > 10 * plain.terms[UPDATE, "optimizer"]


def test_gathering_overlaps_with_arithmetic() -> None:
    """Where the network is fast enough nothing is waited for, and else only what takes longer."""
    key = (UPDATE, "gathering weights")
    assert step_time(run(zero_stage=3), H200).terms[key] == 0
    slow_gpu = replace(H200, node_rate=1e8)
    slow = step_time(run(zero_stage=3), slow_gpu)
    # 2 groups of 64 on a GPU, 2 x 33,024 tokens: 5 micro-batches, each gathered for both passes.
    gathering = 2 * 5 * slow_gpu.gather_s(8, 2 * SEVEN_B.num_parameters, 30 * 7)
    computing = slow.terms[UPDATE, "arithmetic"] + slow.terms[UPDATE, "moving activations"]
    assert slow.terms[key] == pytest.approx(gathering - computing)


def test_the_way_of_new_weights_to_the_sampler_takes_time() -> None:
    """None where it samples from the policy's own; by files the longest, within the GPU the shortest."""
    whole, digests = 2 * SEVEN_B.num_parameters, 4 * SEVEN_B.num_parameters / (0.6 * 4.8e12)
    assert step_time(run(), H200).phases[SYNC] == 0
    seconds = {
        way: step_time(run(sampler="vllm_server", num_servers=2, weights_by=way), H200).phases[SYNC]
        for way in ("folder", "gloo", "nccl", "ipc")
    }
    assert seconds["folder"] == pytest.approx(whole * (1 / 25e9 + 3 / 2e9) + digests)
    assert seconds["nccl"] == pytest.approx(whole / 50e9 + digests + 3e-4 * SEVEN_B.num_tensors)
    assert seconds["ipc"] < seconds["nccl"] < 1 < seconds["gloo"] < seconds["folder"]
    assert SEVEN_B.num_tensors == 30 * 9 + 3
    adapters: dict[str, Any] = {
        "lora_rank": 16,
        "lora_targets": ("all-linear",),
        "sampler": "vllm",
        "weights_by": "folder",
    }
    few, all_of_them = (step_time(run(adapters_only=each, **adapters), H200).phases[SYNC] for each in (True, False))
    assert few < all_of_them / 100
    gathered = step_time(run(zero_stage=3), H200).phases[SYNC]
    assert gathered == pytest.approx(H200.gather_s(8, whole, 30 * 7))


def test_checkpoints_are_a_part_of_the_step() -> None:
    """12 bytes per parameter every 20 steps, and the model once more for the registry, at the rate of the disk."""
    planned = run(checkpoint_every=20)
    assert checkpoint_bytes(planned) == 12 * SEVEN_B.num_parameters
    assert checkpoint_bytes(run(checkpoint_every=20, checkpoint_exports=True)) == 14 * SEVEN_B.num_parameters
    slow, fast = (step_time(planned, H200, rate).phases[CHECKPOINTS] for rate in (1e9, 2e9))
    assert slow == pytest.approx(12 * SEVEN_B.num_parameters / 1e9 / 20) == pytest.approx(2 * fast)
    assert step_time(run(), H200).phases[CHECKPOINTS] == 0


def test_a_small_model_is_limited_by_launches() -> None:
    """Its arithmetic is nothing; the operations of each layer are launched one by one, in every micro-batch."""
    small = run(1, shape=ModelShape(96, 384, 3, 3, 3, 32, 234, tied=False), micro_batch_tokens=1024, reference="none")
    terms = step_time(small, H200).terms
    assert terms[UPDATE, "starting operations"] > 10 * terms[UPDATE, "arithmetic"]
    assert terms[SAMPLING, "starting operations"] > 0.9 * step_time(small, H200).phases[SAMPLING]


def test_captured_graphs_decode_faster_than_single_launches() -> None:
    """Those of vLLM with `compile`, before vLLM without."""
    graphs, eager = (step_time(run(sampler="vllm", compiled=each), H200).phases[SAMPLING] for each in (True, False))
    assert graphs < 0.8 * eager


def test_overlapping_hides_the_shorter_half() -> None:
    """The step is as long as the longer of sampling and training, and what neither hides."""
    result = step_time(run(overlap=True), H200)
    halves = (result.phases[SAMPLING] + result.phases[SCORING], result.phases[REFERENCE] + result.phases[UPDATE])
    assert result.total == pytest.approx(max(halves) + result.phases[SYNC] + result.phases[OTHER])
    assert result.total < step_time(run(), H200).total


def test_more_gpus_are_never_slower_until_groups_run_out() -> None:
    """From one to as many as there are prompts, arithmetic is divided among them."""
    times = [step_time(run(number), H200) for number in (1, 2, 4, 8, 16)]
    arithmetic = [result.terms[UPDATE, "arithmetic"] for result in times]
    assert arithmetic == [pytest.approx(arithmetic[0] / number) for number in (1, 2, 4, 8, 16)]
    assert step_time(run(32), H200).terms[UPDATE, "arithmetic"] == pytest.approx(arithmetic[-1])
    assert sorted(result.total for result in times)[::-1] == [result.total for result in times]


def test_strong_scaling_stops_when_groups_run_out() -> None:
    """16 prompts: beyond 16 GPUs the others wait, and decoding takes as long as before."""
    points = simulate(run(zero_stage=3), H200, "strong")
    assert [point.num_gpus for point in points] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert points[0].efficiency == pytest.approx(1)
    efficiencies = [point.efficiency for point in points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    result = limit_of(points)
    assert result is not None
    assert (result.num_gpus, result.phase, result.term) == (32, SAMPLING, "starting operations")
    assert "longest completion" in result.reason


def test_weak_scaling_is_limited_by_communication() -> None:
    """With as many prompts per GPU only what is exchanged takes longer."""
    points = simulate(run(zero_stage=3), H200, "weak")
    assert [point.prompts for point in points] == [2 * point.num_gpus for point in points]
    assert limit_of(points) is None
    assert 0.5 < points[-1].efficiency < 0.9
    assert loss_at(points[0], points[-1]).term == "gathering completions"
    slow = replace(H200, network_rate=1e7)
    result = limit_of(simulate(run(zero_stage=3), slow, "weak"))
    assert result is not None
    assert (result.num_gpus, result.phase, result.term) == (16, UPDATE, "gathering weights")


def test_servers_grow_with_the_gpus() -> None:
    """A quarter of 8 stays a quarter."""
    points = simulate(run(8, sampler="vllm_server", num_servers=2), H200, "weak")
    assert points[1].efficiency == pytest.approx(1, abs=0.05)
