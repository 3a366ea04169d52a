"""Small models and random sequences, scored in micro-batches and one sequence at a time."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from components.policy.checkpoint import Checkpoint
from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.output_layer import TokenLogprobs
from components.policy.packing import TokenSequence
from components.policy.padded import padded_because
from tests import tiny

VOCABULARY_SIZE = 50
GROUPS = ((9, 3), (5, 1), (7, 4), (1, 2), (6, 1))
"""Tokens of each prompt, and its completions: groups of one and of many."""
_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "vocab_size": VOCABULARY_SIZE}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    **_HEADS,
    **_ENDS,
}


@dataclass(frozen=True)
class Measured:
    """Log-probability and entropy of each completion token, and the gradient of their weighted sum, the loss."""

    scores_M2: Tensor
    loss: float
    gradients: dict[str, Tensor]


def gpt2() -> PreTrainedModel:
    """Return a GPT-2 that computes in float64 throughout; norms of the other families pass through float32."""
    torch.manual_seed(0)
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    # Weights ten times the usual: attention that hardly looks anywhere in particular would hide mistakes.
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **no_dropout, **_ENDS)).double().eval()


def qwen2() -> PreTrainedModel:
    """Return a Qwen2, of which two heads of queries share one of keys."""
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZE, tie_word_embeddings=False)).eval()


def qwen3() -> PreTrainedModel:
    """Return a Qwen3 whose output layer is its embedding, with heads larger than their share of the hidden size."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**_SIZE, tie_word_embeddings=True, head_dim=16)
    return transformers.Qwen3ForCausalLM(config).eval()


def sequences(groups: Sequence[tuple[int, int]] = GROUPS, *, seed: int = 1) -> list[TokenSequence]:
    """Return random sequences, group after group; the first completion has one token, the others up to eight."""
    draw = random.Random(seed)
    result: list[TokenSequence] = []
    for prompt_length, num_completions in groups:
        prompt = tuple(draw.choices(range(VOCABULARY_SIZE), k=prompt_length))
        for _ in range(num_completions):
            length = draw.randrange(1, 9) if result else 1
            result.append(TokenSequence(prompt, tuple(draw.choices(range(VOCABULARY_SIZE), k=length))))
    return result


def forked(*branches: TokenSequence) -> TokenSequence:
    """Return the sequence with these branches; before each but the first an environment wrote two tokens."""
    ids: list[int] = []
    environment: list[tuple[int, int]] = []
    forks: list[tuple[int, tuple[int, ...]]] = []
    for branch in branches:
        if ids:
            environment.append((len(ids), len(ids) + 2))
            ids += [1, 2]
            forks.append((len(ids), branch.prompt_ids))
        environment += [(len(ids) + start, len(ids) + stop) for start, stop in branch.environment]
        ids += branch.completion_ids
    return TokenSequence(branches[0].prompt_ids, tuple(ids), tuple(environment), tuple(forks))


def weights_M2(num_tokens: int) -> Tensor:
    """Return random weights for the log-probability and the entropy of each completion token."""
    return torch.randn(num_tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def scores_alone(model: PreTrainedModel, given: Sequence[TokenSequence], *, temperature: float) -> Tensor:
    """Return log-probabilities and entropies (M, 2), by a forward for each sequence with the model's own attention."""
    scores: list[Tensor] = []
    for each in given:
        ids_1S = torch.tensor([(*each.prompt_ids, *each.completion_ids)])
        logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0, len(each.prompt_ids) - 1 : -1] / temperature
        logprobs_SV = logits_SV.log_softmax(-1)
        logprobs_S = logprobs_SV.gather(1, torch.tensor(each.completion_ids)[:, None]).squeeze(1)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1).detach()  # as in training, where it is a metric alone
        scores.append(torch.stack([logprobs_S, entropy_S], dim=1))
    return torch.cat(scores)


def logprobs(
    score: Callable[..., TokenLogprobs], given: Sequence[TokenSequence], max_tokens: int = 500, *, padded: bool = False
) -> Tensor:
    """Return the log-probabilities of all sampled tokens, scored in micro-batches, in the order of the sequences."""
    batches, num_tokens = tiny.batches(given, max_tokens, padded=padded), sum(each.num_sampled for each in given)
    return completion_logprobs(score, batches, num_tokens)


def alone(model: PreTrainedModel, given: Sequence[TokenSequence], *, temperature: float) -> Measured:
    """Measure a model one sequence at a time, with the attention and the logits it came with."""
    model = copy.deepcopy(model)
    return _measured(model, scores_alone(model, given, temperature=temperature))


def packed(model: PreTrainedModel, given: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> Measured:
    """Measure a model as training does; the gradient is summed over micro-batches."""
    model = copy.deepcopy(model)
    scorer = LogprobModel(model, temperature=temperature)
    batches = tiny.batches(given, max_tokens, padded=bool(padded_because(model)))
    scores = [scorer(batch) for batch in batches]
    scores_M2 = torch.cat([torch.stack([each.logprobs_N, each.entropy_N], dim=1) for each in scores])
    return _measured(model, scores_M2[torch.cat([batch.token_N for batch in batches]).argsort()])


def _measured(model: PreTrainedModel, scores_M2: Tensor) -> Measured:
    loss = (weights_M2(len(scores_M2)) * scores_M2).sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Measured(scores_M2.detach(), float(loss.detach()), gradients)


def assert_equal(measured: Measured, expected: Measured, *, relative: float) -> None:
    """Fail unless each value is as expected, up to this share of the largest of its tensor."""
    for column, name in enumerate(("log-probabilities", "entropies")):
        assert_near(measured.scores_M2[:, column], expected.scores_M2[:, column], relative, name)
    assert measured.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_near(measured.gradients[name], gradient, relative, name)


def assert_near(measured: Tensor, expected: Tensor, relative: float, name: str) -> None:
    """Fail unless all values are as expected, up to this share of the largest."""
    assert measured.shape == expected.shape
    error = float((measured - expected).abs().max() / expected.abs().max())
    assert error <= relative, f"{name}: off by {error:.1e} of the largest"


def policy(checkpoint: Checkpoint, **settings: Any) -> Policy:
    """Return a policy under training; settings are those of `tiny.engine_config`."""
    return Policy(LogprobModel(checkpoint.model, temperature=1.0), tiny.engine_config(**settings))


def step(trained: Policy, first: int = 0, *, learning_rate: float = 1e-3, max_tokens: int = 60) -> dict[str, float]:
    """Take a step on eight problems; return its metrics."""
    checkpoint = tiny.checkpoint()
    examples = checkpoint.examples(tiny.PROBLEMS[first : first + 8])
    num_tokens = sum(len(example.completion_ids) for example in examples)
    for batch in tiny.batches(examples, max_tokens):
        trained.backward(-trained(batch).logprobs_N.sum() / num_tokens)
    return trained.step(learning_rate)
