"""Step times by hand, and against those that others have published (benchmarks/published.yaml)."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from components.shared.model_shape import KNOWN_MODELS, ModelShape
from pipelines.plan.hardware import gpu
from pipelines.plan.run import Run
from pipelines.plan.step_time import EFFICIENCY, REFERENCE, SAMPLING, UPDATE, forward_flops, step_time
from tests.pipelines.test_plan_memory import run
from tests.presets import ROOT

H200 = gpu("h200")
MATRICES = 30 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
HEAD = 102400 * 4096


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


def test_a_step_by_hand() -> None:
    """Two groups of 64 on each of 8 GPUs: the longest completion reads the weights, and each token its cache."""
    tokens, forward = 128 * 512, forward_flops(run(), 128)
    cached = 256 / 64 + (512 + 1024) / 4
    num_bytes = 1024 * 2 * (MATRICES + HEAD) + tokens * cached * 2 * 30 * 4096 * 2
    operations = 2 * ((MATRICES + HEAD) * tokens + MATRICES * 2 * 256)
    phases = step_time(run(), H200).phases
    assert phases[SAMPLING] == pytest.approx((operations / 989e12 + num_bytes / 4.8e12) / EFFICIENCY)
    assert phases[REFERENCE] == pytest.approx(forward / 989e12 / EFFICIENCY)
    assert phases[UPDATE] == pytest.approx(4 * forward / 989e12 / EFFICIENCY)


def test_transformers_samples_batches_in_sequence() -> None:
    """Four groups in batches of two: the longest completion twice; vLLM fills its places as they become free."""
    memory_bound = replace(H200, bf16_rate=1e30)
    short = {"completion_tokens": 512, "mean_completion_tokens": 512, "prompts": 16}
    one = step_time(run(4, max_batch_size=256, **short), memory_bound).phases[SAMPLING]
    weights_s = 512 * 2 * (MATRICES + HEAD) / 4.8e12 / EFFICIENCY
    for sampler in ("transformers", "vllm"):
        two = step_time(run(4, sampler=sampler, max_batch_size=128, **short), memory_bound).phases[SAMPLING]
        assert two - one == pytest.approx(weights_s)
    # A cache of 64 completions with their share of the prompt.
    cache = 64 * (256 / 64 + 512) * 2 * 30 * 4096 * 2
    held = step_time(run(4, sampler="vllm", cache_bytes=cache, **short), memory_bound).phases[SAMPLING]
    assert held - one == pytest.approx(3 * weights_s)


def test_overlapping_hides_the_shorter_half() -> None:
    """The step is as long as the longer of sampling and training."""
    result = step_time(run(overlap=True), H200)
    assert result.total == max(result.phases[SAMPLING], result.phases[REFERENCE] + result.phases[UPDATE])
    assert result.total < step_time(run(), H200).total == pytest.approx(sum(result.phases.values()))


ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks/published.yaml").read_text())["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_published_steps_take_about_as_long(row: dict[str, Any]) -> None:
    """Within a factor of 2, and as docs/scaling.md says."""
    shape = KNOWN_MODELS[row["model"]] if isinstance(row["model"], str) else ModelShape(**row["model"])
    seconds, published = step_time(Run(shape=shape, **row["run"]), gpu(row["gpu"])).total, row["published_s"]
    assert 0.5 < seconds / published < 2
    name = f"[{row['name']}]({row['source']}) | {row['run']['num_gpus']} {row['gpu'].upper()}"
    line = f"| {name} | {published:,.0f} s | {seconds:,.0f} s | {seconds / published:.2f} |"
    assert line in (ROOT / "docs/scaling.md").read_text(), line
