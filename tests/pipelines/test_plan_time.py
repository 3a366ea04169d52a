from dataclasses import replace
from typing import Any

import pytest

from components.shared.model_shape import KNOWN_MODELS, ModelShape
from pipelines.plan.hardware import gpu
from pipelines.plan.run import Run
from pipelines.plan.scaling import limit_of, loss_at, simulate
from pipelines.plan.step_time import OTHER, REFERENCE, SAMPLING, SCORING, SYNC, UPDATE, forward_flops, step_time
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
    """Checkpointing one more forward pass, two updates two, a reference one, offloading the way to the host."""
    plain = step_time(run(gradient_checkpointing=False), H200)
    head = HEAD / (MATRICES + HEAD)
    arithmetic = (UPDATE, "arithmetic")
    assert step_time(run(), H200).terms[arithmetic] == pytest.approx(plain.terms[arithmetic] * 4 / (3 + head))
    twice = step_time(run(gradient_checkpointing=False, updates=2), H200)
    assert twice.phases[UPDATE] == pytest.approx(2 * plain.phases[UPDATE])
    alone = step_time(run(gradient_checkpointing=False, reference="none"), H200)
    assert alone.phases[REFERENCE] == 0
    assert plain.phases[REFERENCE] == pytest.approx(plain.terms[arithmetic] / (3 + head))
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
    assert slow.terms[key] == pytest.approx(gathering - slow.terms[UPDATE, "arithmetic"])


def test_new_weights_reach_the_sampler() -> None:
    """Not at all where it samples from the policy's own; through the memory, or over a network card."""
    whole = 2 * SEVEN_B.num_parameters
    own, vllm, apart = (
        step_time(run(sampler=sampler, num_servers=servers), H200).phases[SYNC]
        for sampler, servers in (("transformers", 0), ("vllm", 0), ("vllm_server", 2))
    )
    assert own == 0
    assert vllm == pytest.approx(2 * whole / (0.6 * 4.8e12))
    assert apart == pytest.approx(whole / 50e9)
    gathered = step_time(run(zero_stage=3), H200).phases[SYNC]
    assert gathered == pytest.approx(H200.gather_s(8, whole, 30 * 7))


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


def published(model: str, num_gpus: int, **values: Any) -> Run:
    """A run of other trainers: vLLM beside FSDP or Megatron, every completion with a prompt of its own."""
    others = {"shared_prompts": False, "mean_prompt_tokens": 150, "minibatches": 4, "zero_stage": 3}
    return run(num_gpus, shape=KNOWN_MODELS[model], **{**others, "sampler": "vllm", "max_batch_size": 1024, **values})


NEMO = {"prompts": 64, "group_size": 32, "completion_tokens": 4096}
VERL = {"prompts": 512, "group_size": 16, "completion_tokens": 28672, "minibatches": 16, "reference": "none"}
ZOO = {"prompts": 1024, "group_size": 8, "completion_tokens": 8192}


@pytest.mark.parametrize(
    ("planned", "gpu_name", "seconds", "factor"),
    [
        # NeMo RL's documentation, performance summary v0.4: mean lengths are given.
        (published("llama-3.1-8b", 16, mean_completion_tokens=910, **NEMO), "h100", 97.7, 1.3),
        (published("qwen3-32b", 32, mean_completion_tokens=3056, tensor_parallel=4, **NEMO), "h100", 393, 1.3),
        # verl's documentation of its asynchronous trainer, synchronous rows: lengths are not given, 2,000 assumed.
        (published("qwen2.5-7b", 32, mean_completion_tokens=2000, **VERL), "h20", 790.1, 2.0),
        (published("qwen2.5-7b", 64, mean_completion_tokens=2000, **VERL), "h20", 365.3, 2.0),
        (published("qwen2.5-7b", 128, mean_completion_tokens=2000, **VERL), "h20", 356.3, 2.0),
        # SimpleRL-Zoo: 15 hours for 100 steps, with evaluation and checkpoints; lengths not given, 700 assumed.
        (published("qwen2.5-7b", 16, mean_completion_tokens=700, **ZOO), "h100", 540, 3.0),
    ],
)
def test_published_runs_take_about_as_long(planned: Run, gpu_name: str, seconds: float, factor: float) -> None:
    """Within the factor that docs/explanation/planning.md states."""
    result = step_time(planned, gpu(gpu_name)).total
    assert seconds / factor < result < seconds * factor


def test_a_published_bound_is_met() -> None:
    """NeMo RL's continuous integration gives 1.5 billion parameters on 8 GPUs 25 s, 32 x 16 sequences of 512 tokens."""
    lengths = {"prompts": 32, "group_size": 16, "completion_tokens": 512, "mean_completion_tokens": 350}
    planned = published("qwen2.5-1.5b", 8, minibatches=1, **lengths)
    assert 1 < step_time(planned, gpu("h100")).total < 25
