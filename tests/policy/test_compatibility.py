"""Which families of causal language models are trained in which rows, and that they are scored correctly."""

import copy
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from components.policy.checkpoint import Checkpoint, create
from components.policy.compatibility import prepare_model, require_packed_rows
from components.policy.engine import recompute_layers
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from tests import tiny
from tests.policy import plain

SEQUENCES = plain.sequences()
_NAMES_OF_SIZES = {
    0: "bos_token_id eos_token_id pad_token_id",
    1: "n_shared_experts n_group topk_group first_k_dense_replace",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads",
    3: "num_hidden_layers num_layers",
    4: "num_attention_heads num_heads num_local_experts num_experts moe_num_experts n_routed_experts "
    "linear_num_value_heads",
    8: "head_dim global_head_dim hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim ssm_state_size "
    "mamba_num_heads mamba_head_dim mamba_n_heads mamba_d_head",
    32: "hidden_size word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size",
    plain.VOCABULARY_SIZE: "vocab_size vocab_size_per_layer_input",
    64: "intermediate_size ffn_dim mamba_d_ssm",
    128: "max_position_embeddings",
}
_SIZE = {name: size for size, names in _NAMES_OF_SIZES.items() for name in names.split()}
"""Passed to a family as far as its config has these."""

ACCEPTED = (
    "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "ctrl", "cwm", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "fuyu", "gemma", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "laguna", "llama",
    "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "starcoder2",
)  # fmt: skip
_USUAL = ("gpt2", "mixtral", "qwen3")
"""Families that the fast tests try."""


def _config(family: str, **changes: Any) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[family]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    renamed: dict[str, str] = kind.attribute_map
    size = {name: value for name, value in _SIZE.items() if name in known or name in renamed}
    config: PreTrainedConfig = kind(**{**size, **changes})
    return config


def _noisy(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set all that a config has of dropout, jitter and noise to 0.3."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and re.search("dropout|drop$|pdrop|jitter|noise", name):
            setattr(config, name, 0.3)
    return config


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # gains that are all one and biases that are zero would hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def _scale(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Make matrices larger: attention that hardly looks anywhere in particular would hide mistakes."""
    for parameter in model.parameters():
        parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model


def _create(folder: Path) -> Checkpoint:
    config = ModelConfig(base=str(folder), prompt="{question}", answer=AnswerPolicy.DECLARED)
    return create(config, tiny.PROBLEMS, seed=1, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One with as many tokens as the models have rows."""
    words = {f"w{number}": number for number in range(plain.VOCABULARY_SIZE)}
    built = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="w0", eos_token="w1", pad_token="w2")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in _USUAL else [pytest.mark.slow]) for each in ACCEPTED]
)
def test_an_accepted_family_is_scored_as_one_sequence_at_a_time(family: str, tmp_path: Path, tokenizer: Any) -> None:
    """Packed log-probabilities are the plain ones, with weights of any size, recomputation, dropout and noise."""
    model = _model(_noisy(_config(family)))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trained = _create(tmp_path).model
    if family != "ctrl":  # whose layers cannot
        recompute_layers(trained)
    _assert_scored_as_alone(trained, model)
    for factor in (5, 3):
        _scale(model, factor)
        scaled = copy.deepcopy(model)
        require_packed_rows(scaled)
        _assert_scored_as_alone(scaled, model)


def _assert_scored_as_alone(model: PreTrainedModel, own: PreTrainedModel) -> None:
    with torch.no_grad():
        expected_M = plain.scores_alone(own, SEQUENCES, temperature=1.0)[:, 0].double()
    batches, scored = tiny.batches(SEQUENCES, 40), LogprobModel(model, temperature=1.0)
    found_M = torch.zeros_like(expected_M)
    for batch in batches:  # with gradients, as in training
        found_M[batch.token_N] = scored(batch).logprobs_N.detach().double()
    torch.testing.assert_close(found_M, expected_M, rtol=0, atol=5e-5)


LONGEST = 13
"""Tokens of the longest sequence on which a model is tried out when it is loaded."""
WITHOUT_LAYOUT = "do not attend exactly once each"
CONTACT = "mixes tokens outside attention"
ATTENTION = "attends with a soft cap, sinks, a mask of its own, a window"
LOGITS = "rescales or caps its logits"
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "qk_rope_head_dim": 8}
_TRIED = ("gemma2", "lfm2")
"""Each time; the others among the slow tests."""
PADDED = (
    *_TRIED,
    *("axk1", "bamba", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "deepseek_v4", "diffllama", "falcon", "falcon_h1", "falcon_mamba", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa"),
    *("granitemoehybrid", "hrm_text", "inkling_text", "jamba", "llama4_text", "mamba", "mamba2", "mimo_v2_flash"),
    *("minicpm3", "minimax", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo_hybrid", "openai-gpt"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "stablelm", "vaultgemma", "xglm", "youtu"),
)
"""Families that take padded rows alone."""
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    **{family: {"num_hidden_layers": 4} for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
"""What a config needs to be that small."""
UNUSUAL: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("bloom", {}, rf"\(BloomBlock\) that {WITHOUT_LAYOUT}"),
    ("cohere", {"logit_scale": 0.0625}, LOGITS),
    ("deepseek_v3", LATENT, f"DeepseekV3Attention {ATTENTION}"),
    ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 50.0}, f"Gemma2Attention {ATTENTION}"),
    ("gemma2", {"final_logit_softcapping": 1.0, "attn_logit_softcapping": None}, f"Gemma2ForCausalLM {LOGITS}"),
    ("gpt_oss", {}, ATTENTION),
    ("lfm2", {"layer_types": ["full_attention", "conv", "full_attention"]}, "layers of type conv"),
    ("mistral", {"sliding_window": LONGEST - 1}, ATTENTION),
    ("phimoe", {"sliding_window": LONGEST - 1}, ATTENTION),  # which does not pass its window on
    ("stablelm", {}, "does not forward the layout"),
)
"""One for each reason; the families themselves are in PADDED."""


@pytest.mark.parametrize(("family", "changes", "message"), UNUSUAL, ids=[family for family, *_ in UNUSUAL])
def test_unusual_attention_or_logits_take_no_packed_rows(family: str, changes: dict[str, Any], message: str) -> None:
    """Found by trying it out, with weights of any size: what would be trained is not what it samples."""
    model = _model(_config(family, **changes))
    for factor in (1, 15):
        _scale(model, factor)
        with pytest.raises(PipelineError, match=message):
            require_packed_rows(copy.deepcopy(model))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in _TRIED else [pytest.mark.slow]) for each in PADDED]
)
def test_another_family_is_trained_in_padded_rows(family: str, tmp_path: Path, tokenizer: Any) -> None:
    """Its log-probabilities and their gradients are those of one sequence at a time, and those that it samples with."""
    model = _model(_config(family, **_CHANGES.get(family, {})))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    checkpoint = replace(_create(tmp_path), tokenizer=tokenizer)  # some families replace its splitting rules
    assert checkpoint.is_padded
    for factor in (1, 4):
        trained = _scale(checkpoint.model, factor)
        expected = plain.alone(_scale(model, factor), SEQUENCES, temperature=0.7)
        found = plain.packed(trained, SEQUENCES, temperature=0.7, max_tokens=40)
        torch.testing.assert_close(found.scores_M2, expected.scores_M2, rtol=0, atol=1e-3)
        # Some gradients, such as those of a bias of keys, are zero but for rounding.
        largest = max(float(each.abs().max()) for each in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            error = float((found.gradients[name] - gradient).abs().max())
            assert error <= 1e-3 * max(float(gradient.abs().max()), 1e-3 * largest), name
    questions = ("w3 w4 w5", "w6", "w7")
    problems = [tiny.PROBLEMS[0].model_copy(update={"question": each}) for each in questions]
    sampling = Sampling(num_samples=3, temperature=0.7, max_new_tokens=7, seed=1)
    sampled = [each for group in TransformersSampler(checkpoint, 64).generate(problems, sampling) for each in group]
    tokens = [each.tokens for each in sampled]
    assert len(set(tokens)) > len(questions)
    expected_M = plain.scores_alone(model, tokens, temperature=0.7)[:, 0].detach()
    logprobs_M = torch.tensor([value for each in sampled for value in each.logprobs])
    torch.testing.assert_close(logprobs_M, expected_M, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bert", {}, "what it computes of a text depends on what follows it"),
        ("rwkv", {"rescale_every": 2}, "it changes its weights as it reads"),
        ("xlstm", {}, "has wrong shape"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    """No log-probability that is trained on would be that of sampling, or no weights those that were loaded."""
    with pytest.raises(PipelineError, match=f"cannot be trained here: .*{reason}"):
        prepare_model(_model(_config(family, **changes)))


def test_a_window_shorter_than_a_sequence_is_refused_at_the_lengths_of_training() -> None:
    """One that was long enough when the model was loaded is an error beyond its length."""
    model = _model(_config("mistral", sliding_window=LONGEST))
    require_packed_rows(copy.deepcopy(model))
    prompt = (7, 3, 5, 3)
    plain.packed(model, [TokenSequence(prompt, tuple(range(LONGEST - 4)))], temperature=1.0, max_tokens=100)
    with pytest.raises(PipelineError, match="a window shorter than the sequences"):
        plain.packed(model, [TokenSequence(prompt, tuple(range(LONGEST - 3)))], temperature=1.0, max_tokens=100)


class _ShortConvolution(nn.Sequential):
    """Adds a little of the token before."""

    def forward(self, hidden_1TD: Tensor) -> Tensor:
        out_1TD: Tensor = self[0](hidden_1TD + 1e-9 * nn.functional.pad(hidden_1TD, (0, 0, 1, -1)))
        return out_1TD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_inside_of_an_attention_layer_is_refused(dtype: torch.dtype) -> None:
    """However small its weight, and in bfloat16 too: the layer's name and its attention are those of a Llama."""
    model: Any = _model(_config("llama")).to(dtype)
    require_packed_rows(copy.deepcopy(model))
    model.model.layers[1].mlp = _ShortConvolution(model.model.layers[1].mlp)
    with pytest.raises(PipelineError, match=CONTACT):
        require_packed_rows(model)
