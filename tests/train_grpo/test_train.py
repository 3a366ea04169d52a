import gzip
import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.grading.verifier import Verifier
from components.policy.checkpoint import save
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.train_grpo.reference import Reference
from components.train_grpo.train import sampling_services
from components.train_grpo.worker import build_trainer
from tests import tiny
from tests.presets import ROOT
from tests.train_grpo.groups import SHORTNESS
from tests.train_grpo.runs import rows, run
from tests.train_grpo.settings import REWARD_MODEL, SERVERS, grpo_config

UNDECIDED = [tiny.problem(3, id=f"sums/train/{n}", solution=f"#### {answer}") for n, answer in enumerate((6, 6, 8, 9))]
"""Problems with one question and different solutions: a model fitted to them answers now this, now that."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference that is right in half of its samples."""
    folder, checkpoint = tmp_path_factory.mktemp("reference"), tiny.checkpoint()
    engine = Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(zero_stage=0))
    for _ in range(30):
        for batch in tiny.batches(checkpoint.examples(UNDECIDED), 2000):
            engine.backward(-engine(batch).logprobs_N.mean())
        engine.step(1e-2)
    save(checkpoint, folder)
    return folder


@pytest.mark.slow
def test_grpo_learns_to_give_the_right_answer(tmp_path: Path, reference: Path) -> None:
    """From one right answer in two to nearly all, by reward alone, with sharded weights and options of DAPO."""
    dapo = {
        "advantage__estimator": "z_score_bessel",
        "loss": {"aggregation": "token_mean", "clip": {"low": 0.2, "high": 0.28}},
        "prompts__max_resampling_rounds": 2,
        "sampling__truncated": "mask",
    }
    engine = {"engine__zero_stage": 3, "engine__gradient_checkpointing": True, "engine__micro_batch_tokens": 10_000}
    settings = {"num_steps": 20, "prompts_per_step": 1, "group_size": 16, **dapo, **engine}
    run(tmp_path, [tiny.problem(3), tiny.problem(3, id="again")], reference, **settings)
    curves = rows(tmp_path)
    assert 0.2 < sum(row["accuracy"] for row in curves[:2]) / 2 < 0.8
    assert sum(row["accuracy"] for row in curves[-3:]) / 3 > 0.8
    assert (curves[0]["ratio_min"], curves[0]["ratio_max"]) == (1.0, 1.0)
    # Of equal weights: where a policy is sharded or recomputes, its reference is computed by fewer operators.
    assert abs(curves[0]["kl"]) < 1e-12
    assert max(row["kl"] or 0 for row in curves) > 1e-4


@pytest.mark.slow
def test_a_profile_has_the_phases_of_its_step(tmp_path: Path, reference: Path) -> None:
    """Of the steps that are named, and of the next one where a file asks for it; the result is that of any run."""
    settings = {"num_steps": 3, "prompts_per_step": 1, "reward__weights": SHORTNESS}
    run(tmp_path / "plain", UNDECIDED, reference, **settings)
    profiled = tmp_path / "profiled"
    (profiled / "work" / "live").mkdir(parents=True)
    (profiled / "work" / "live" / "profile").touch()
    run(profiled, UNDECIDED, reference, **settings, profile_steps=[3])
    traces = sorted((profiled / "training" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step-000001.json.gz", "step-000003.json.gz"]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {"sampling", "scoring", "reference", "update"} <= ranges
    for name in ("policy/model.safetensors", "training/steps.jsonl", "training/completions.jsonl"):
        assert (profiled / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert not (tmp_path / "plain" / "training" / "profile").exists()


MEMORY = {
    "validation": r"the rollout: .*lower train_grpo\.sampling\.max_batch_size \(it is 64\)",
    "reference": r"the log-probabilities of a rollout: .*micro_batch_tokens .*set train_grpo\.reference: sharded",
    "update": r"the update of the policy: .*lower train_grpo\.engine\.micro_batch_tokens \(it is 100\)",
}


@pytest.mark.parametrize("phase", list(MEMORY))
def test_an_out_of_memory_error_names_the_phase_and_its_keys(verify: Verifier, phase: str) -> None:
    """In one line with the amount, and the keys by which that phase needs less."""
    checkpoint = tiny.checkpoint()
    config = grpo_config(validation={"every_steps": 1} if phase == "validation" else None)
    sampler = TransformersSampler(checkpoint, 64)
    trainer = build_trainer(config, checkpoint, tiny.PROBLEMS, verify, sampler, held_out=tiny.PROBLEMS[:2])
    assert isinstance(trainer.reference, Reference)
    model = trainer.reference.scorer.model if phase == "reference" else checkpoint.model

    def need_much(*_: object) -> None:
        if torch.is_grad_enabled() == (phase == "update"):
            torch.empty(10**15, dtype=torch.uint8)

    model.get_input_embeddings().register_forward_pre_hook(need_much)
    with pytest.raises(PipelineError, match=rf"^not enough memory for {MEMORY[phase]}") as error:
        trainer.run(steps_done=0, after_step=lambda _: None)
    assert "tried to allocate another 931,322.6 GiB" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_largest_pass_comes_first_and_changes_nothing(verify: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """No micro-batch of the run is larger, and every gradient of it is zero."""
    checkpoint = tiny.checkpoint()
    config = grpo_config(num_steps=1, warmup_steps=0, engine__zero_stage=0, reward__weights=SHORTNESS)
    trainer = build_trainer(config, checkpoint, tiny.PROBLEMS, verify, TransformersSampler(checkpoint, 64))
    sizes, gradients, learn = list[int](), list[bool](), trainer.policy.learn

    def noted(batch: Any, *arguments: Any, **options: Any) -> None:
        sizes.append(batch.input_ids_T.numel())
        learn(batch, *arguments, **options)
        gradients.append(any(each.grad is not None and bool(each.grad.any()) for each in checkpoint.model.parameters()))

    monkeypatch.setattr(trainer.policy, "learn", noted)
    trainer.run(steps_done=0, after_step=lambda _: None)
    assert sizes[0] > max(sizes[1:])
    assert gradients == [False, *[True] * (len(sizes) - 1)]


def test_a_new_iteration_begins_with_the_policy_as_its_reference(tmp_path: Path, reference: Path) -> None:
    """The KL is exactly zero there alone; a reward model learns from rollouts of the reference, then of iterations."""
    settings = {"num_iterations": 2, "num_steps": 4, "prompts_per_step": 1, "group_size": 18, "engine__zero_stage": 2}
    model = {**REWARD_MODEL, "initial_rollouts": 2}
    weights = {"accuracy": 1.0, "reward_model": 0.1}
    run(tmp_path, [tiny.problem(3)], reference, **settings, reward__weights=weights, reward__model=model)
    curves = rows(tmp_path)
    assert [row["kl"] == 0.0 for row in curves] == [True, False, True, False]
    trained = rows(tmp_path, "reward_model")
    assert [(row["iteration"], row["reward_model_examples"]) for row in trained] == [(0, 36), (1, 40)]
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "training" / "reward_model").num_labels == 1


def test_a_run_without_a_learning_signal_fails(tmp_path: Path, reference: Path) -> None:
    """It stops at a checkpoint, from which it goes on where the limit is raised, and fails at its end."""
    for limit, message in ((2, "in the last 2 steps"), (2, "in the last 2 steps"), (9, "in any step of the run")):
        settings = {"num_steps": 4, "prompts_per_step": 1, "reward__max_steps_without_signal": limit}
        with pytest.raises(PipelineError, match=f"no learning signal {message}"):
            run(tmp_path, [tiny.problem(3, answer="12345")], reference, **settings)
        step = 4 if limit == 9 else 2
        assert [path.name for path in (tmp_path / "work/checkpoints").glob("step-*")] == [f"step-00000{step}"]


def _example(language: str) -> str:
    """Return the example of a custom reward in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Add a reward", 1)[1].split("\n## ", 1)[0]
    block = re.search(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    return textwrap.dedent(block[1])


def test_a_custom_reward_needs_one_function_and_one_line(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of CONTRIBUTING.md trains as it stands; its outputs are a policy, a row per step and completions."""
    (tmp_path / "my_rewards.py").write_text(_example("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    weights = yaml.safe_load(_example("yaml"))["train_grpo"]["reward"]["weights"]
    weights["tests.train_grpo.groups:patient"] = 0.0
    settings = {"prompts_per_step": 1, "group_size": 16, "logged_completions_per_step": 16}
    run(tmp_path, [tiny.problem(3)], reference, **settings, reward__weights=weights)
    curves = rows(tmp_path)
    assert [row["step"] for row in curves] == [1, 2, 3]
    timings = [row for _, row in jsonl.read_rows(tmp_path / "timings" / "timings.jsonl")]
    phases = ("sampling_s", "scoring_s", "reference_s", "update_s")
    assert all(row[phase] > 0 for row in timings for phase in phases)
    assert all(sum(row[phase] for phase in phases) <= row["step_s"] + 1e-3 for row in timings)
    assert all(0 <= row["update_flop_utilisation"] < 1 for row in timings)  # rounded to 0 on a busy machine
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (reference, tmp_path / "policy"))
    assert any(not torch.equal(one, other) for one, other in zip(before.parameters(), after.parameters(), strict=True))
    records = rows(tmp_path, "completions")
    assert {row["verdict"] for row in records} == {"right", "wrong"}
    for row in records:
        expected = 1 / (1 + row["num_tokens"] / 100) if row["verdict"] == "right" else 0.0
        assert row["rewards"]["my_rewards:brevity"] == [pytest.approx(expected)]
        assert row["reward"] == pytest.approx(row["rewards"]["accuracy"][0] + 0.2 * expected)
    of_first = [row["rewards"]["my_rewards:brevity"][0] for row in records[:16]]
    assert curves[0]["reward_my_rewards_brevity"] == pytest.approx(sum(of_first) / 16)
    calls = jsonl.read_json(tmp_path / "timings" / "reward_calls.json")["tests.train_grpo.groups:patient"]["calls"]
    stored = (tmp_path / "work" / "answers" / "rank-0.jsonl").read_text().count('"call"')
    assert calls == stored == len({row["completion"] for row in records})


def test_a_run_stops_where_a_reward_fails_too_often(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how often and why, in the initial rollouts of a reward model, too."""
    code = "from json import loads\ndef twice(problem, completion, grade):\n    return loads(grade.why)\n"
    (tmp_path / "raising_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "raising_rewards:twice"
    weights = {name: 1.0, "reward_model": 1.0}
    with pytest.raises(PipelineError, match=r"100.% of the 12 .*JSONDecodeError.* \(raising_rewards\.py, line 3\)"):
        run(tmp_path, tiny.PROBLEMS, reference, reward__weights=weights, reward__model=REWARD_MODEL)


def test_on_a_cluster_weights_are_exchanged_through_the_volume(tmp_path: Path) -> None:
    """No memory is shared by pods, and servers are pods of the job: none is started here."""
    clusters = [ClusterConfig(image="gpu:1", mount=str(tmp_path), rollout_servers=number) for number in (0, 1)]
    none, one = (ClusterStage(each, "0f1e2d3c", "train_grpo", tmp_path / "records") for each in clusters)
    for key, sampler in (("vllm", {}), ("servers", SERVERS)):
        config = grpo_config(**{f"sampler__{key}": sampler})
        with on_cluster(one), sampling_services(config, tmp_path, tmp_path):
            assert os.environ[WEIGHTS_VARIABLE] == str(tmp_path / "weights")
            assert SERVERS_VARIABLE not in os.environ
        assert WEIGHTS_VARIABLE not in os.environ
    with (
        on_cluster(none),
        pytest.raises(PipelineError, match=r"set cluster.rollout_servers"),
        sampling_services(config, tmp_path, tmp_path),
    ):
        pass
