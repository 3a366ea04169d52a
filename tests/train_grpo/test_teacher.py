"""A teacher: what its student learns from it, here or behind a server, and which models can be one."""

import copy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from components.grading.verifier import Verifier
from components.policy import output_layer
from components.policy.checkpoint import save
from components.policy.logprobs import LogprobModel
from components.policy.output_layer import TeacherTerm
from components.policy.packing import TokenSequence
from components.policy.padded import use_padded_rows
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import PipelineError, RetryableError
from components.train_grpo import teacher as teacher_module
from components.train_grpo.api import RETRIES
from components.train_grpo.teacher import TeacherServer
from components.train_grpo.worker import build_trainer
from tests import chat_model, tiny
from tests.cluster.processes import free_port
from tests.pipelines.test_use import wait_for
from tests.policy import plain
from tests.rollout.vllm_policies import policy, trainer_logprobs
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_slow_rewards import answering


def _distilled(verify: Verifier, teacher: Path, server: str | None = None) -> list[float]:
    """Learn from the teacher alone; return the divergence from it at each step."""
    settings = {"num_steps": 6, "warmup_steps": 0, "group_size": 12, "learning_rate": 1e-2}
    source = {"base": str(teacher), "server": server}
    config = grpo_config(**settings, reward__weights={"accuracy": 0.0}, loss__kl__coefficient=0.0, teacher=source)
    student = tiny.checkpoint()
    trainer = build_trainer(config, student, tiny.PROBLEMS, verify, TransformersSampler(student, 64))
    trainer.run(steps_done=0, after_step=lambda step: None)
    return [float(row["teacher_kl"] or 0.0) for row in trainer.history.curves]


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
@pytest.mark.parametrize("padded", [False, True])
def test_the_divergence_and_its_gradient_are_those_of_whole_distributions(
    monkeypatch: pytest.MonkeyPatch, padded: bool, chunk_tokens: int
) -> None:
    """In float64, beside a loss of the tokens, at the temperature of sampling; the teacher has no gradient."""
    monkeypatch.setattr(output_layer, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(output_layer, "_MIN_CHUNK_TOKENS", chunk_tokens)
    student, teacher = plain.gpt2(), plain.gpt2()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    given, written_out = plain.sequences(), copy.deepcopy(student)
    weights_M = torch.rand(sum(each.num_sampled for each in given), dtype=torch.float64)
    expected = _written_out(written_out, teacher, given, weights_M)
    expected.sum().backward()
    if padded:
        student, teacher = use_padded_rows(student, "tried"), use_padded_rows(teacher, "tried")
    model, frozen = LogprobModel(student, temperature=0.7), LogprobModel(teacher, temperature=0.7).requires_grad_(False)
    kl_M, total = torch.full_like(weights_M, torch.nan), torch.zeros((), dtype=torch.float64)
    for batch in tiny.batches(given, 40, padded=padded):
        term = TeacherTerm(frozen.logits_of(batch), weights_M[batch.token_N])
        loss = model(batch, lambda scores, _: 0.5 * scores.logprobs_N.sum(), term=term)
        loss.backward()
        assert term.kl_N is not None
        kl_M[batch.token_N] = term.kl_N
        total += loss.detach()
    torch.testing.assert_close(total, expected.sum().detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((weights_M * kl_M).sum(), expected[1].detach(), rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(student.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def _written_out(
    student: PreTrainedModel, teacher: PreTrainedModel, given: Sequence[TokenSequence], weights_M: Tensor
) -> Tensor:
    """Half the sum of the log-probabilities, and the weighted sum of the divergences."""
    parts, start = torch.zeros(2, dtype=torch.float64), 0
    for each in given:
        ids = torch.tensor([(*each.prompt_ids, *each.completion_ids)])
        places = slice(len(each.prompt_ids) - 1, -1)
        logits = [model(input_ids=ids, use_cache=False).logits[0, places] / 0.7 for model in (student, teacher)]
        own_SV, other_SV = (each.log_softmax(-1) for each in logits)
        chosen_S = own_SV.gather(1, torch.tensor(each.completion_ids)[:, None])
        kl_S = (own_SV.exp() * (own_SV - other_SV.detach())).sum(-1)
        stop = start + len(kl_S)
        parts = parts + torch.stack([0.5 * chosen_S.sum(), (weights_M[start:stop] * kl_S).sum()])
        start = stop
    return parts


@pytest.mark.parametrize("server", [None, "http://teacher/v1"])
def test_a_student_comes_closer_to_its_teacher_without_any_reward(
    verify: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str | None
) -> None:
    """Every token teaches, though all rewards of a group are equal."""
    teacher = tiny.checkpoint(seed=7)
    save(teacher, tmp_path)
    scorer = LogprobModel(teacher.model, temperature=1.0)

    def score(_: TeacherServer, sequences_B: Sequence[TokenSequence], indices: set[int]) -> Tensor:
        assert indices == {*range(len(sequences_B))}
        return plain.logprobs(scorer, sequences_B, 100)

    monkeypatch.setattr(TeacherServer, "logprobs", score)
    divergence = _distilled(verify, tmp_path, server)
    assert divergence[0] > 0.05
    assert divergence[-1] < 0.9 * divergence[0]


def test_a_teacher_with_another_tokenizer_is_refused(verify: Verifier, tmp_path: Path) -> None:
    """Its probabilities are of other tokens."""
    other = chat_model.write(tmp_path / "other")
    with pytest.raises(PipelineError, match=r"train_grpo\.teacher\.base: \S+ has another tokenizer than the policy"):
        _distilled(verify, other)


def _scored(*logprobs: float | None) -> tuple[int, Any]:
    """Return a server's answer about tokens 7, 8, 9 ...; it says nothing of the first."""
    places = [each and {str(7 + place): {"logprob": each, "rank": 1}} for place, each in enumerate(logprobs)]
    return 200, {"choices": [{"prompt_logprobs": places}]}


def test_a_server_is_asked_about_the_sampled_tokens_of_some_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment's tokens are read and not counted; a passing failure is tried again."""
    monkeypatch.setenv("MY_KEY", "secret")
    acted = TokenSequence((7, 8), (9, 10, 11, 12), ((1, 3),))
    answers = [(503, {}), _scored(None, -0.5, -1.0, -2.0, -3.0, -4.0)]
    monkeypatch.setattr(teacher_module, "RETRIES", RETRIES.new(backoff_factor=0.0))
    with answering(answers) as (url, requests):
        scored_M = TeacherServer(url, "MY_KEY").logprobs([TokenSequence((1,), (2,)), acted], [1])
    assert scored_M[1:].tolist() == [-1.0, -4.0]
    assert scored_M.isnan().tolist() == [True, False, False]
    assert (requests[-1]["path"], requests[-1]["key"]) == ("/v1/completions", "Bearer secret")
    assert requests[-1]["prompt"] == [7, 8, 9, 10, 11, 12]


def test_a_server_that_cannot_score_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there, it is no vLLM, its key is not there, or it would score at another temperature."""
    monkeypatch.setattr(teacher_module, "RETRIES", RETRIES.new(total=0))
    with pytest.raises(RetryableError, match=r"127\.0\.0\.1:9"):
        TeacherServer("http://127.0.0.1:9/v1").logprobs([TokenSequence((7,), (8,))], [0])
    answer = 200, {"choices": [{"prompt_logprobs": None}]}
    message = "returns no log-probabilities of the prompt"
    with answering([answer]) as (url, _), pytest.raises(PipelineError, match=rf"{url}/completions {message}"):
        TeacherServer(url).logprobs([TokenSequence((7,), (8,))], [0])
    with pytest.raises(PipelineError, match=r"teacher\.key_variable: the environment has no NOT_SET"):
        TeacherServer("http://127.0.0.1:9/v1", "NOT_SET")
    with pytest.raises(ValidationError, match=r"teacher\.server needs sampling\.temperature: 1"):
        grpo_config(teacher={"base": "t", "server": "http://t/v1"}, sampling__temperature=0.9)


@pytest.mark.long(minutes=1)
def test_a_vllm_server_scores_as_the_trainer_does(tmp_path: Path) -> None:
    """As `grpo-pipeline serve` starts it."""
    teacher, student = policy(7), policy(1)
    save(teacher, tmp_path)
    port, program = free_port(), str(Path(sys.executable).with_name("grpo-pipeline"))
    command = [program, "serve", str(tmp_path), f"--port={port}", "--", "--dtype=float32"]
    log = (tmp_path / "server.log").open("wb")  # a pipe that nobody reads would stop the server
    with log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server:
        try:
            wait_for(port, server)
            examples = student.examples(tiny.PROBLEMS[:6])
            exact_M = torch.tensor([x for each in trainer_logprobs(teacher, examples, 1.0) for x in each])
            scored_M = TeacherServer(f"http://127.0.0.1:{port}/v1").logprobs(examples, range(6)).float()
        finally:
            server.kill()
    torch.testing.assert_close(scored_M, exact_M, rtol=0, atol=1e-3)
