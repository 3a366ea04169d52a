import pytest
import torch
from torch import Tensor

from components.policy.logprobs import CompletionScorer, disable_dropout
from components.policy.sequences import TokenSequence
from tests import tiny


def _reference(model: torch.nn.Module, sequence: TokenSequence, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one sequence's completion from the model's own full logits."""
    prompt, completion = sequence.prompt_ids, sequence.completion_ids
    logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)[len(prompt) - 1 : -1]
    chosen = logprobs_TV.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
    return chosen, torch.special.entr(logprobs_TV.exp()).sum(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 150, 10_000])
def test_scores_are_those_of_each_sequence_alone(temperature: float, max_tokens: int) -> None:
    """Log-probabilities and entropies equal a float64 softmax over the model's full logits, for any micro-batches."""
    checkpoint = tiny.checkpoint()
    sequences = [checkpoint.example(problem) for problem in tiny.PROBLEMS[:9]]
    scorer = CompletionScorer(checkpoint.model, temperature=temperature)
    for batch in tiny.batches(sequences, max_tokens):
        scores = scorer(batch)
        expected = [_reference(checkpoint.model, sequences[index], temperature) for index in batch.sequences]
        torch.testing.assert_close(
            scores.logprobs_N.double(), torch.cat([logprobs for logprobs, _ in expected]), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            scores.entropy_N.double(), torch.cat([entropy for _, entropy in expected]), rtol=1e-5, atol=1e-5
        )
        assert scores.logprobs_N.requires_grad
        assert not scores.entropy_N.requires_grad


def test_dropout_is_off_everywhere() -> None:
    """A model with dropout in its configuration scores the same twice in training mode once it is disabled."""
    checkpoint = tiny.checkpoint()
    for module in checkpoint.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    checkpoint.model.model.layers[0].mlp.down_proj = torch.nn.Sequential(
        checkpoint.model.model.layers[0].mlp.down_proj, torch.nn.Dropout(0.5)
    )
    scorer = CompletionScorer(checkpoint.model, temperature=1.0).train()
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[3])], 1000)
    assert not torch.equal(scorer(batch).logprobs_N, scorer(batch).logprobs_N)
    disable_dropout(checkpoint.model)
    assert torch.equal(scorer(batch).logprobs_N, scorer(batch).logprobs_N)
