"""Decoders of the usual kind compute what transformers computes, to train and, with packed weights, to sample."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.attention import use_packed_attention
from components.policy.config import LoraConfig
from components.policy.decoder import Decoder, is_supported_in_training
from components.policy.engine import recompute_layers
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters
from components.policy.output_layer import use_float32_logits
from components.policy.packed_weights import packed_weights
from components.policy.packing import MicroBatch, TokenSequence, pack

_SHAPE: dict[str, Any] = {
    **{"vocab_size": 600, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
_ROUNDING = 2e-5
"""Of logits of about one, in float32, after three layers."""
_MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}, True),
    "llama with long heads": ("Llama", {"head_dim": 128}, True),
    "mistral": ("Mistral", {"sliding_window": None}, True),
    "mistral with a window": ("Mistral", {"sliding_window": 4096}, False),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, True),
    "qwen3": ("Qwen3", {"head_dim": 64}, True),
    "qwen3 with gelu": ("Qwen3", {"head_dim": 64, "hidden_act": "gelu"}, True),
    "gemma": ("Gemma", {"head_dim": 64}, False),
}
"""The family, its settings, and whether the decoder is supported."""


@pytest.fixture(params=_MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a model."""
    name: str = request.param
    return name


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("kind", [kind for kind, (_, _, is_supported) in _MODELS.items() if is_supported])
def test_outputs_and_gradients_are_those_of_transformers(kind: str, places: bool) -> None:
    """In float64, of all tokens or of some; whatever is random in weights, biases and norms."""
    model, batch = _model(kind).double(), _batch()
    places_U = batch.source_N.unique() if places else torch.arange(len(batch.input_ids_T))
    _norm_exactly(model)
    expected_UM = _hidden(model, batch)[places_U]
    ids_T, positions_T = batch.input_ids_T, batch.position_ids_T
    hidden_UM = Decoder(model.get_decoder())(ids_T, positions_T, batch.layout, places_U if places else None)
    torch.testing.assert_close(hidden_UM, expected_UM, rtol=1e-10, atol=1e-10)
    factors_UM = torch.randn(expected_UM.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = list(model.get_decoder().parameters())
    exact, computed = (torch.autograd.grad((factors_UM * each).sum(), parameters) for each in (expected_UM, hidden_UM))
    assert all(each.abs().max() > 0 for each in exact)
    torch.testing.assert_close(computed, exact, rtol=1e-9, atol=1e-10)


def test_gradients_of_float32_are_those_of_float64_up_to_rounding(kind: str) -> None:
    """Through the model that is trained, whichever way it computes."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        model = _model(kind).to(dtype)
        assert is_supported_in_training(model.get_decoder()) == _MODELS[kind][2]
        LogprobModel(model, temperature=0.8)(_batch()).logprobs_N.sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    for name, exact in gradients[1].items():
        assert exact is not None
        assert (gradients[0][name] - exact).abs().max() < _ROUNDING * exact.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_layer_in_half_precision_is_converted_once(dtype: torch.dtype) -> None:
    """Its logits are those that the trainer computes, in float32, up to the order of sums."""
    model = _model("qwen2").to(dtype)
    use_float32_logits(model.get_output_embeddings())
    with torch.no_grad():
        expected = _logits(model)
        with packed_weights(model):
            own = vars(model.get_output_embeddings())["forward"]
            computed = _logits(model)
    assert own != vars(model.get_output_embeddings())["forward"]
    assert computed.dtype == torch.float32
    assert (computed - expected).abs().max() < _ROUNDING


@pytest.mark.parametrize(
    "change", [recompute_layers, nn.Module.bfloat16, lambda decoder: setattr(decoder.embed_tokens.weight, "ds_id", 0)]
)
def test_a_decoder_that_trains_in_another_way_computes_by_itself(change: Callable[[Any], object]) -> None:
    """Recomputation and shards of weights are matters of the module itself."""
    decoder = _model("qwen3").train().get_decoder()
    assert is_supported_in_training(decoder)
    change(decoder)
    assert not is_supported_in_training(decoder)


def test_logits_are_those_of_float64_up_to_rounding(kind: str) -> None:
    """Of prompts that completions share, whatever is random in weights, biases and norms."""
    model = _model(kind)
    with torch.no_grad():
        expected = _logits(model.double())
        model.float()
        with packed_weights(model):
            computed = _logits(model)
            assert ("forward" in vars(model.get_decoder())) == _MODELS[kind][2], "it is replaced where it is usual"
            assert ("forward" in vars(model.get_decoder().layers[0].mlp.up_proj)) != _MODELS[kind][2]
    assert not [name for name, module in model.get_decoder().named_modules() if "forward" in vars(module)]
    assert (computed.double() - expected).abs().max() < _ROUNDING


def _adapt(model: PreTrainedModel, layer: Any) -> None:
    add_adapters(model, LoraConfig(rank=4, alpha=8, targets=["all-linear"]), seed=0)
    nn.init.normal_(layer.mlp.up_proj.lora_B["default"].weight)


@pytest.mark.parametrize(
    "change",
    [
        _adapt,
        lambda _, layer: layer.register_forward_hook(lambda _module, _inputs, output: 2 * output),
        lambda _, layer: setattr(layer.mlp.up_proj, "forward", lambda rows: 2 * rows @ layer.mlp.up_proj.weight.T),
        lambda model, _: setattr(model.config, "num_hidden_layers", 2),
        lambda _, layer: setattr(layer, "input_layernorm", nn.LayerNorm(256)),
        lambda _, layer: setattr(layer.input_layernorm.weight, "data", torch.full((256,), 2, dtype=torch.bfloat16)),
        lambda _, layer: setattr(layer.self_attn.k_norm, "variance_epsilon", 1.0),
        lambda _, layer: setattr(layer.self_attn, "q_norm", nn.LayerNorm(64)),
    ],
)
def test_a_decoder_that_was_changed_computes_by_itself(change: Callable[[PreTrainedModel, Any], object]) -> None:
    """Whatever was put into it, or in place of a part of it, takes effect."""
    model = _model("qwen3")
    plain = _logits(model)
    change(model, model.get_decoder().layers[1])
    assert not is_supported_in_training(model.get_decoder())
    with torch.no_grad():
        expected = _logits(model)
        with packed_weights(model):
            computed = _logits(model)
    assert (computed - expected).abs().max() < _ROUNDING
    assert (expected - plain).abs().max() > 1e-3


def _model(kind: str) -> PreTrainedModel:
    """Return a model in which no weight, bias or norm is what it is by default."""
    torch.manual_seed(0)
    family, settings, _ = _MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **settings})
    model: PreTrainedModel = use_packed_attention(getattr(transformers, f"{family}ForCausalLM")(config))
    use_float32_logits(model.get_output_embeddings())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (1 if parameter.dim() == 1 else 0.1))
    return model.eval()


def _norm_exactly(model: PreTrainedModel) -> None:
    """Have the norms compute in the type of the model, where transformers computes them in float32."""

    def norm(module: Any, x: Tensor) -> Tensor:
        scaled: Tensor = module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
        return scaled

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(norm, module)


def _batch() -> MicroBatch:
    """Return a row in which three completions share a prompt and one has its own."""
    sequences = [TokenSequence((5, 9, 2, 7), tuple(range(10 * n, 10 * n + 6 + n))) for n in range(1, 4)]
    sequences.append(TokenSequence((1, 2, 3), tuple(range(400, 420))))
    (batch,) = pack(sequences, max_tokens=1000, device=torch.device("cpu"))
    return batch


def _hidden(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the hidden states that the model's own decoder computes, (T, M)."""
    hidden_1TM: Tensor = model.get_decoder()(
        input_ids=batch.input_ids_T[None], position_ids=batch.position_ids_T[None], layout=batch.layout, use_cache=False
    ).last_hidden_state
    return hidden_1TM[0]


def _logits(model: PreTrainedModel) -> Tensor:
    logits_TV: Tensor = model.get_output_embeddings()(_hidden(model, _batch()))
    return logits_TV
