from collections import Counter

import pytest
import torch

from components.policy.checkpoint import Checkpoint
from components.policy.logprobs import CompletionScorer
from components.rollout.transformers_engine import TransformersEngine
from tests import tiny

QUESTIONS = [problem.question for problem in tiny.PROBLEMS[:5]]


def _greedy(checkpoint: Checkpoint, question: str, max_new_tokens: int) -> tuple[int, ...]:
    """Greedy decoding of one prompt with full forwards and nothing else."""
    ids = list(checkpoint.prompt_ids(question))
    start = len(ids)
    while len(ids) - start < max_new_tokens:
        ids.append(int(checkpoint.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in checkpoint.end_ids:
            break
    return tuple(ids[start:])


@pytest.mark.parametrize("max_batch_size", [1, 2, 64])
def test_greedy_decoding_of_a_batch_is_that_of_each_prompt_alone(max_batch_size: int) -> None:
    """Padding, batching and order change nothing; completions come back in the order of the questions."""
    checkpoint = tiny.checkpoint()
    questions = [*QUESTIONS, "Tom has 3?"]
    groups = TransformersEngine(checkpoint, max_batch_size)(
        questions, num_samples=1, temperature=0.0, max_new_tokens=12, seed=1
    )
    for question, (completion,) in zip(questions, groups, strict=True):
        assert completion.tokens.prompt_ids == checkpoint.prompt_ids(question)
        assert completion.tokens.completion_ids == _greedy(checkpoint, question, 12)


def test_what_is_sampled_is_the_softmax_at_the_temperature() -> None:
    """First tokens of 4,000 completions follow softmax(logits / T), so nothing is cut off or reweighted."""
    checkpoint, temperature = tiny.checkpoint(), 0.5
    with torch.no_grad():  # sharpen the model: an untrained one is almost uniform at any temperature
        checkpoint.model.get_output_embeddings().weight.mul_(3)
    (group,) = TransformersEngine(checkpoint, 4000)(
        QUESTIONS[:1], num_samples=4000, temperature=temperature, max_new_tokens=1, seed=1
    )
    counts = Counter(completion.tokens.completion_ids[0] for completion in group)
    logits_V = checkpoint.model(torch.tensor([checkpoint.prompt_ids(QUESTIONS[0])])).logits[0, -1]
    expected_V = torch.softmax(logits_V.detach().double() / temperature, dim=-1)
    drawn_V = torch.tensor([counts[token] for token in range(len(expected_V))]) / 4000
    assert expected_V.topk(10).values.sum() < 0.9, "the test wants a distribution whose tail shows when it is cut off"
    # The expected total variation of 4,000 draws, with room for twice that.
    noise = float((expected_V * (1 - expected_V) / 4000).sqrt().sum()) * (2 / torch.pi) ** 0.5 / 2
    assert float((drawn_V - expected_V).abs().sum()) / 2 < 2 * noise < 0.2


def test_a_completion_ends_with_its_first_end_token() -> None:
    """The end token is part of the completion, nothing follows it, and without one the completion is unfinished."""
    checkpoint = tiny.checkpoint()
    groups = TransformersEngine(checkpoint, 64)(QUESTIONS, num_samples=16, temperature=3.0, max_new_tokens=60, seed=3)
    completions = [completion for group in groups for completion in group]
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        ids, end = completion.tokens.completion_ids, checkpoint.end_ids[0]
        assert end not in ids[:-1]
        assert completion.finished == (ids[-1] == end)
        assert completion.finished or len(ids) == 60


def test_the_end_token_counts_even_where_it_is_also_the_padding() -> None:
    """A tokenizer whose padding is its end token still gets its end token into the completion."""
    checkpoint = tiny.checkpoint()
    checkpoint.tokenizer.pad_token = checkpoint.tokenizer.eos_token
    assert checkpoint.pad_id in checkpoint.end_ids
    groups = TransformersEngine(checkpoint, 64)(QUESTIONS, num_samples=8, temperature=3.0, max_new_tokens=60, seed=3)
    finished = [completion for group in groups for completion in group if completion.finished]
    assert finished
    assert all(completion.tokens.completion_ids[-1] == checkpoint.pad_id for completion in finished)


def test_sampling_depends_on_the_seed_alone() -> None:
    """The same seed draws the same completions whatever was drawn before, another seed others."""
    generate = TransformersEngine(tiny.checkpoint(), 64)
    drawn = [generate(QUESTIONS, num_samples=2, temperature=1.0, max_new_tokens=8, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


def test_the_sampled_policy_is_the_scored_policy() -> None:
    """Greedy completions have the highest log-probability the scorer sees at every token: both are one model."""
    checkpoint = tiny.checkpoint()
    groups = TransformersEngine(checkpoint, 64)(QUESTIONS, num_samples=1, temperature=0.0, max_new_tokens=8, seed=1)
    (batch,) = tiny.batches([completion.tokens for (completion,) in groups], 10_000)
    scorer = CompletionScorer(checkpoint.model, temperature=1.0)
    greedy_N = scorer(batch).logprobs_N
    for token in range(0, checkpoint.model.config.vocab_size, 7):
        batch.target_N.fill_(token)
        assert bool((scorer(batch).logprobs_N <= greedy_N + 1e-6).all())
