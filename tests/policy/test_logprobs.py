from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PreTrainedModel,
    StableLmConfig,
)

from components.policy.compatibility import require_supported_model
from components.policy.logprobs import LogprobModel, completion_logprobs, disable_dropout
from components.policy.packing import TokenSequence, pack
from components.shared.errors import PipelineError
from tests import tiny
from tests.policy import plain

SEQUENCES = plain.sequences()
CPU = torch.device("cpu")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 20, 40, 1000])
def test_scores_and_all_gradients_are_those_of_each_sequence_alone(max_tokens: int, checkpointing: bool) -> None:
    """In float64, packing with shared prompts changes nothing, for any micro-batches and with recomputation or not."""
    model = plain.gpt2()
    expected = plain.alone(model, SEQUENCES, temperature=0.7)
    calls = []
    model.transformer.h[0].attn.register_forward_hook(lambda *_: calls.append(1))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    found = plain.packed(model, SEQUENCES, temperature=0.7, max_tokens=max_tokens)
    assert len(calls) == len(tiny.batches(SEQUENCES, max_tokens)) * (2 if checkpointing else 1)
    plain.assert_equal(found, expected, relative=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_any_temperature_divides_the_logits(temperature: float) -> None:
    """Log-probabilities, entropies and gradients are those of softmax(logits / T), in float64."""
    model = plain.gpt2()
    found = plain.packed(model, SEQUENCES, temperature=temperature, max_tokens=40)
    plain.assert_equal(found, plain.alone(model, SEQUENCES, temperature=temperature), relative=1e-10)


@pytest.mark.parametrize("max_tokens", [30, 1000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_groups_and_of_completions_changes_nothing(seed: int, max_tokens: int) -> None:
    """Groups in another order, their completions too, or all of it mixed up: the same scores and gradients."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(SEQUENCES), generator=generator).tolist()
    rank = {prompt: number for number, prompt in enumerate(dict.fromkeys(SEQUENCES[i].prompt_ids for i in shuffled))}
    by_group = sorted(shuffled, key=lambda index: rank[SEQUENCES[index].prompt_ids])
    model = plain.gpt2()
    expected = plain.alone(model, SEQUENCES, temperature=1.0)
    for order in (by_group, shuffled):
        found = plain.packed(model, [SEQUENCES[i] for i in order], temperature=1.0, max_tokens=max_tokens)
        plain.assert_equal(found, plain.reordered(expected, order), relative=1e-10)


@pytest.mark.parametrize("padding", [0, 1, 17])
def test_it_is_what_a_padded_batch_gives_for_any_padding(padding: int) -> None:
    """One right-padded batch with its mask, through the model's own attention and logits, says the same."""
    model = plain.gpt2()
    expected = plain.padded(model, SEQUENCES, temperature=0.7, padding=padding)
    plain.assert_equal(plain.packed(model, SEQUENCES, temperature=0.7, max_tokens=40), expected, relative=1e-10)


@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
@pytest.mark.parametrize("family", [plain.qwen2, plain.qwen3])
def test_grouped_queries_rotary_positions_and_tied_weights(
    family: Callable[[], PreTrainedModel], max_tokens: int
) -> None:
    """Two Qwens agree to the precision of the float32 that they compute in."""
    model = family()
    found = plain.packed(model, SEQUENCES, temperature=0.7, max_tokens=max_tokens)
    plain.assert_equal(found, plain.alone(model, SEQUENCES, temperature=0.7), relative=5e-6)


def test_bf16_is_finite_and_near() -> None:
    """In bf16 the scores are within its rounding of those in float32, and the gradient has the same direction."""
    model = plain.qwen2()
    expected = plain.alone(model, SEQUENCES, temperature=1.0)
    found = plain.packed(model.bfloat16(), SEQUENCES, temperature=1.0, max_tokens=40)
    for values, exact in ((found.logprobs, expected.logprobs), (found.entropies, expected.entropies)):
        assert all(each.dtype == torch.float32 for each in values)
        error_M = (torch.cat(values) - torch.cat(exact)).abs()
        assert float(error_M.mean()) < 0.03
        assert float(error_M.max()) < 0.2
    one, other = (
        torch.cat([measured.gradients[name].flatten().float() for name in expected.gradients])
        for measured in (found, expected)
    )
    assert bool(one.isfinite().all())
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.99


def test_each_prompt_and_each_completion_goes_through_the_model_once() -> None:
    """Where groups fit there is no padding and no repeated prompt; only completion tokens reach the output layer."""
    scorer = LogprobModel(plain.gpt2(), temperature=1.0)
    embedded, scored = [], []
    scorer.model.get_input_embeddings().register_forward_hook(lambda _, given, out: embedded.append(out.shape[:-1]))
    scorer.head.register_forward_hook(lambda _, given, out: scored.append(len(given[0])))
    batches = tiny.batches(SEQUENCES, 40)
    for batch in batches:
        scorer(batch)
    num_completion_tokens = sum(len(each.completion_ids) for each in SEQUENCES)
    assert len(batches) > 1
    assert sum(shape.numel() for shape in embedded) == sum(length for length, _ in plain.GROUPS) + num_completion_tokens
    assert sum(scored) == num_completion_tokens


def test_log_probabilities_land_in_their_places() -> None:
    """`completion_logprobs` puts each token of the chosen sequences where it is among all, and NaN elsewhere."""
    model = plain.gpt2()
    expected = plain.alone(model, SEQUENCES, temperature=1.0).logprobs
    chosen = [8, 1, 2, 5, 4]
    batches = pack(SEQUENCES, max_tokens=25, device=CPU, indices=chosen)
    scorer = LogprobModel(model, temperature=1.0)
    lengths = [len(each.completion_ids) for each in SEQUENCES]
    found = completion_logprobs(scorer, batches, sum(lengths)).split(lengths)
    for number, (values, exact) in enumerate(zip(found, expected, strict=True)):
        if number in chosen:
            torch.testing.assert_close(values, exact, rtol=1e-10, atol=0)
        else:
            assert bool(values.isnan().all())


def test_dropout_is_off_everywhere() -> None:
    """A model with dropout of every kind scores the same twice in training mode once it is disabled."""
    checkpoint = tiny.checkpoint()
    layer = checkpoint.model.model.layers[0]
    layer.self_attn.attention_dropout = 0.5
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(0.5))
    scorer = LogprobModel(checkpoint.model, temperature=1.0).train()
    (batch,) = tiny.batches([checkpoint.example(tiny.PROBLEMS[3])], 1000)
    assert not torch.equal(scorer(batch).logprobs_N, scorer(batch).logprobs_N)
    disable_dropout(checkpoint.model)
    assert torch.equal(scorer(batch).logprobs_N, scorer(batch).logprobs_N)
    assert layer.self_attn.attention_dropout == 0.0


_SIZE = {
    "vocab_size": plain.VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LONGEST = 13
"""Tokens of the longest sequence on which a model is tried out when it is loaded."""


def _model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SIZE),
        MistralConfig(sliding_window=LONGEST, **_SIZE),
        CohereConfig(logit_scale=1.0, **_SIZE),
        GraniteConfig(attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=3.0, **_SIZE),
    ],
    ids=lambda config: config.model_type,
)
def test_models_of_the_usual_kind_pass(config: Any) -> None:
    """Scales inside of the model are followed, and a window as long as the sequences hides nothing."""
    require_supported_model(_model(config))


ATTENTION = "attends with a soft cap, sinks, a mask of its own or a window"
LOGITS = "does not have the usual attention and output layer"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(head_dim=8, final_logit_softcapping=None, attn_logit_softcapping=50.0, **_SIZE), ATTENTION),
        (Gemma2Config(head_dim=8, final_logit_softcapping=1.0, attn_logit_softcapping=None, **_SIZE), LOGITS),
        (CohereConfig(logit_scale=0.0625, **_SIZE), LOGITS),
        (GraniteConfig(logits_scaling=8.0, **_SIZE), LOGITS),
        (GptOssConfig(head_dim=8, num_local_experts=2, num_experts_per_tok=1, **_SIZE), ATTENTION),
        (MistralConfig(sliding_window=LONGEST - 1, **_SIZE), ATTENTION),
        (PhimoeConfig(sliding_window=LONGEST - 1, num_local_experts=2, **_SIZE), ATTENTION),
        (DogeConfig(**_SIZE), ATTENTION),
        (StableLmConfig(**_SIZE), "does not pass the layout"),
    ],
    ids=[
        "attention-cap",
        "logit-cap",
        "logit-scale",
        "logits-scaling",
        "sinks",
        "window",
        "window-of-the-config",
        "own-mask",
        "keeps-to-itself",
    ],
)
def test_models_that_attend_or_answer_otherwise_are_refused(config: Any, message: str) -> None:
    """What would be trained on is not what they sample: capped or rescaled logits, sinks, a window too short."""
    with pytest.raises(PipelineError, match=message):
        require_supported_model(_model(config))


def test_a_window_shorter_than_a_sequence_is_refused_at_the_lengths_of_training() -> None:
    """One that was long enough when the model was loaded is followed up to its length, and is an error beyond it."""
    model = _model(MistralConfig(sliding_window=LONGEST, **_SIZE))
    require_supported_model(model)
    prompt = (7, 3, 5, 3)
    fitting = [TokenSequence(prompt, tuple(range(LONGEST - 4))), TokenSequence(prompt, (1,))]
    expected = plain.alone(_model(MistralConfig(sliding_window=LONGEST, **_SIZE)), fitting, temperature=1.0)
    plain.assert_equal(plain.packed(model, fitting, temperature=1.0, max_tokens=100), expected, relative=5e-6)
    too_long = TokenSequence(prompt, tuple(range(LONGEST - 3)))
    with pytest.raises(PipelineError, match="a window shorter than the sequences"):
        plain.packed(model, [*fitting, too_long], temperature=1.0, max_tokens=100)
