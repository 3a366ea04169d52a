"""Which families of causal language models are accepted, and that those are scored correctly."""

import copy
import inspect
import re
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

from components.policy.checkpoint import Checkpoint, create, load
from components.policy.compatibility import require_supported_model
from components.policy.engine import recompute_layers
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.shared import jsonl
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


def _scale(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Make matrices larger: attention that hardly looks anywhere in particular would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
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


@pytest.mark.parametrize("family", ACCEPTED)
def test_an_accepted_family_is_scored_as_one_sequence_at_a_time(family: str, tmp_path: Path, tokenizer: Any) -> None:
    """A folder of each accepted family loads, and packed log-probabilities are the plain ones, however large.

    So they are in training, where layers recompute, of models with dropout and noise wherever their config has any.
    """
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
        require_supported_model(scaled)
        _assert_scored_as_alone(scaled, model)


def _assert_scored_as_alone(model: PreTrainedModel, own: PreTrainedModel) -> None:
    with torch.no_grad():
        expected_M = plain.scores_alone(own, SEQUENCES, temperature=1.0)[:, 0].double()
    batches, scored = tiny.batches(SEQUENCES, 40), LogprobModel(model, temperature=1.0)
    found_M = torch.zeros_like(expected_M)
    for batch in batches:  # with gradients, as in training
        found_M[batch.token_N] = scored(batch).logprobs_N.detach().double()
    torch.testing.assert_close(found_M, expected_M, rtol=0, atol=5e-5)


REFUSED = {
    "bamba": "linear_attention",
    "deepseek_v32": "indexed_attention",
    "falcon_h1": "hybrid",
    "falcon_mamba": "linear_attention",
    "jamba": "linear_attention",
    "kimi_linear": "linear_attention",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "llama4_text": "chunked_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "minimax": "linear_attention",
    "nemotron_h": "linear_attention, mlp, moe",
    "olmo_hybrid": "linear_attention",
    "qwen3_5": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "recurrent",
    "zamba2": "hybrid, linear_attention",
}
"""Families with layers that are not attention, and what their configs call them."""


@pytest.mark.parametrize("family", REFUSED)
def test_layers_other_than_attention_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """As soon as the config can be read, one line names the folder and the types, for fine-tuning and for GRPO."""
    layers = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if family.startswith("lfm2") else {}
    CONFIG_MAPPING[family](**layers).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # no weights are read
    jsonl.write_json(tmp_path / "pipeline.json", {"prompt": "{question}", "answer": "declared"})
    for read in (_create, lambda folder: load(folder, dtype=torch.float32)):
        with pytest.raises(PipelineError) as caught:
            read(tmp_path)
        message = str(caught.value)
        assert message.startswith(f"model {tmp_path}: has layers of type {REFUSED[family]};")
        assert "\n" not in message


LONGEST = 13
"""Tokens of the longest sequence on which a model is tried out when it is loaded."""
WITHOUT_LAYOUT = "do not attend exactly once each"
CONTACT = "mixes tokens outside attention"
ATTENTION = "attends with a soft cap, sinks, a mask of its own, a window"
LOGITS = "has no standard attention and output layer"
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "qk_rope_head_dim": 8}
UNUSUAL: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("bloom", {}, rf"\(BloomBlock\) that {WITHOUT_LAYOUT}"),
    ("cohere", {"logit_scale": 0.0625}, LOGITS),
    ("deepseek_v3", LATENT, f"DeepseekV3Attention {ATTENTION}"),
    ("diffllama", {}, rf"\(DiffLlamaDecoderLayer\) that {WITHOUT_LAYOUT}"),
    ("doge", {}, f"DogeAttention {ATTENTION}"),
    ("falcon", {}, WITHOUT_LAYOUT),
    ("falcon_h1", {}, CONTACT),
    ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 50.0}, f"Gemma2Attention {ATTENTION}"),
    ("gemma2", {"final_logit_softcapping": 1.0, "attn_logit_softcapping": None}, f"Gemma2ForCausalLM {LOGITS}"),
    ("gpt_oss", {}, ATTENTION),
    ("granite", {"logits_scaling": 8.0}, LOGITS),
    ("hrm_text", {}, WITHOUT_LAYOUT),
    (
        "lfm2",
        {"layer_types": ["full_attention", "conv", "full_attention"]},
        rf"\(Lfm2DecoderLayer\) that {WITHOUT_LAYOUT}",
    ),
    ("mistral", {"sliding_window": LONGEST - 1}, ATTENTION),
    ("mpt", {}, WITHOUT_LAYOUT),
    ("nanochat", {}, LOGITS),
    ("nemotron_h", {}, WITHOUT_LAYOUT),
    ("phimoe", {"sliding_window": LONGEST - 1}, ATTENTION),  # which does not pass its window on
    ("qwen3_5_text", {}, WITHOUT_LAYOUT),
    ("qwen3_next", {}, WITHOUT_LAYOUT),
    ("rwkv", {}, rf"\(RwkvBlock\) that {WITHOUT_LAYOUT}"),
    ("stablelm", {}, "does not forward the layout"),
)


@pytest.mark.parametrize(("family", "changes", "message"), UNUSUAL, ids=[family for family, *_ in UNUSUAL])
def test_a_model_that_attends_or_answers_otherwise_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    """By trying it out, without a look at the config, with weights of any size.

    What would be trained is not what it samples: capped or rescaled logits, sinks, a window that is too short.
    """
    model = _model(_config(family, **changes))
    for factor in (1, 5, 3):
        _scale(model, factor)
        with pytest.raises(PipelineError, match=message):
            require_supported_model(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    ],
)
def test_scales_inside_of_a_model_are_supported(family: str, changes: dict[str, Any]) -> None:
    """They change nothing between the output layer and the logits."""
    require_supported_model(_model(_config(family, **changes)))


def test_a_window_shorter_than_a_sequence_is_refused_at_the_lengths_of_training() -> None:
    """One that was long enough when the model was loaded is fine up to its length, and an error beyond it."""
    model = _model(_config("mistral", sliding_window=LONGEST))
    require_supported_model(copy.deepcopy(model))
    prompt = (7, 3, 5, 3)
    fitting = [TokenSequence(prompt, tuple(range(LONGEST - 4))), TokenSequence(prompt, (1,))]
    expected = plain.alone(model, fitting, temperature=1.0)
    plain.assert_equal(plain.packed(model, fitting, temperature=1.0, max_tokens=100), expected, relative=5e-6)
    too_long = TokenSequence(prompt, tuple(range(LONGEST - 3)))
    with pytest.raises(PipelineError, match="a window shorter than the sequences"):
        plain.packed(model, [*fitting, too_long], temperature=1.0, max_tokens=100)


class _ShortConvolution(nn.Module):
    """Adds a little of the token before."""

    def __init__(self, layer: nn.Module, weight: float) -> None:
        super().__init__()
        self.layer = layer
        self.weight = weight

    def forward(self, hidden_1TD: Tensor) -> Tensor:
        before_1TD = nn.functional.pad(hidden_1TD, (0, 0, 1, -1))
        out_1TD: Tensor = self.layer(hidden_1TD + self.weight * before_1TD)
        return out_1TD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_inside_of_an_attention_layer_is_refused(dtype: torch.dtype) -> None:
    """However small its weight, and in bfloat16 too: the layer's name and its attention are those of a Llama."""
    model: Any = _model(_config("llama")).to(dtype)
    require_supported_model(copy.deepcopy(model))
    model.model.layers[1].mlp = _ShortConvolution(model.model.layers[1].mlp, 1e-9)
    with pytest.raises(PipelineError, match=CONTACT):
        require_supported_model(model)
