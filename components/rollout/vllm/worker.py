"""An extension of vLLM's worker processes: it loads weights, and reports with which weights they compute.

vLLM's own loading runs once more on tensors without memory (device `meta`), and the copies that it makes are recorded.
So this follows vLLM for fused, sharded and tied tensors of any model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_refs, to_meta_tensor

from components.policy.lora import SAVED_PREFIX
from components.rollout.vllm.verification import LoadedWeights, Piece, digest

_PACKED = "cpu_linear"
"""Attribute of layers on CPUs: a function that multiplies by a packed copy of the layer's weights."""
_INPUTS_AT_ONCE = 1024
"""Rows of the unit matrix in one product with a packed copy; bounds memory."""


class WeightLoading:
    """Mixed into vLLM's worker class; clients call its methods by name (`collective_rpc`)."""

    weights_version = ""

    def load_folder(self, folder: str, version: str) -> None:
        """Load the weights of a Hugging Face folder, unless another client has loaded that version."""
        if self.weights_version == version:
            return
        worker: Any = self
        self.weights_version = ""  # until all are loaded: an error may leave weights of two versions
        worker.reload_weights(weights_path=folder)
        renew_output_layer(worker.model_runner.get_model())
        self.weights_version = version

    def loaded_weights(self, shapes: dict[str, list[int]]) -> LoadedWeights:
        """Return the weights that this process computes with, given the shapes of the tensors that it was sent."""
        worker: Any = self
        runner, dtype = worker.model_runner, worker.vllm_config.model_config.dtype
        adapters = {name: shape for name, shape in shapes.items() if name.startswith(SAVED_PREFIX)}
        weights = {name: shape for name, shape in shapes.items() if name not in adapters}
        parts = []
        with set_current_vllm_config(worker.vllm_config):
            if weights:
                parts.append(loaded_weights(runner.get_model(), weights, dtype))
            if adapters:
                parts.append(loaded_adapters(runner.lora_manager._adapter_manager, adapters))
        return LoadedWeights(
            pieces=[piece for part in parts for piece in part["pieces"]],
            unverified=[reason for part in parts for reason in part["unverified"]],
        )


class _View(NamedTuple):
    """Some elements of a tensor's storage, as `torch.as_strided` takes them."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        """Return the elements of a tensor."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def within(self, tensor: Tensor) -> Tensor:
        """Return these elements; the offset counts from the first element of `tensor`."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


_Origin = tuple[str | int | None, _View]
"""The origin of elements: the name of a sent tensor, a number that fills them, or None if they are computed; and the
elements of that tensor."""


def loaded_weights(model: nn.Module, shapes: Mapping[str, list[int]], dtype: torch.dtype) -> LoadedWeights:
    """Return where each parameter of the model comes from, given the shapes of the tensors that it is sent.

    A parameter is unverified if a part of it is not loaded from a sent tensor, or is changed on the way. Buffers are
    skipped: they are not trained.
    """
    loaded = LoadedWeights(pieces=[], unverified=[])
    layouts = _loading_layouts(model)
    try:
        copies = _recorded_copies(model, layouts, shapes, dtype)
    except Exception as error:  # the loading code of any model, which may not support tensors without memory
        loaded["unverified"].append(f"vLLM's loading of {type(model).__name__} cannot be traced: {error}")
        return loaded
    for name, module, attribute, parameter in _parameters(model):
        layout = layouts[id(parameter)]
        origins = copies.get(_storage_id(layout), {})
        num_loaded = sum(torch.Size(view.size).numel() for view in origins)
        if num_loaded != layout.numel():
            loaded["unverified"].append(f"{name} is not loaded, or only in part")
            continue
        held = list(_held_values(module, attribute, parameter, layout))
        if not held:
            loaded["unverified"].append(f"{name} has a form that cannot be compared")
        for values in held:
            _add_pieces(loaded, name, values, layout.dtype, origins)
    return loaded


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each parameter's full name, module, name in the module, and itself; twice if two modules share it."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, module, name, parameter


def _loading_layouts(model: nn.Module) -> dict[int, Tensor]:
    """Return by the id of each parameter a tensor without memory in the layout that it had when it was loaded."""
    layouts: dict[int, Tensor] = {}
    for _, module, name, parameter in _parameters(model):
        if id(parameter) not in layouts:
            originals, _ = get_layerwise_info(module).restore_metadata
            layout: Any = restore_layer_refs(to_meta_tensor(originals.get(name, parameter)), module)
            layout.weight_loader = _get_original_loader(layout)  # without the wrapper of vLLM's reloading
            layouts[id(parameter)] = layout
    return layouts


def _recorded_copies(
    model: nn.Module, layouts: Mapping[int, Any], shapes: Mapping[str, list[int]], dtype: torch.dtype
) -> dict[int, dict[_View, _Origin]]:
    """Load weights of these shapes into the layouts instead of the parameters; return `_Recorder.copies`."""
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    originals = [(module, name, parameter) for _, module, name, parameter in _parameters(model)]
    vllm_model: Any = model
    recorder = _Recorder(weights)
    try:
        for module, name, parameter in originals:
            module._parameters[name] = layouts[id(parameter)]
        with recorder:
            vllm_model.load_weights(iter(weights.items()))
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter
    return recorder.copies


class _Recorder(TorchDispatchMode):
    """Records what is copied into tensors, from the named `sources` or from elsewhere."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage_id(tensor): name for name, tensor in sources.items()}
        self.copies: dict[int, dict[_View, _Origin]] = {}
        """The origin of each part of a tensor, by the id of the tensor's storage; the last write to a part counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation that writes into a tensor, and do it; PyTorch calls this for every operation."""
        if func is torch.ops.aten.copy_.default:
            source = args[1].expand(args[0].shape)
            self._record(args[0], (self._sources.get(_storage_id(source)), _View.of(source)))
        elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            value = args[1] if len(args) > 1 else 0
            self._record(args[0], (value, _View.of(args[0])))
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, origin: _Origin) -> None:
        if target.numel():
            self.copies.setdefault(_storage_id(target), {})[_View.of(target)] = origin


def _storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which all views of the tensor share."""
    return int(tensor.untyped_storage()._cdata)


def _held_values(module: nn.Module, attribute: str, parameter: nn.Parameter, layout: Tensor) -> Iterator[Tensor]:
    """Yield each copy of a parameter that the module may compute with, in the layout for loading."""
    if parameter.shape == layout.shape:
        has_layout = parameter.stride() == layout.stride()
        yield parameter.detach() if has_layout else _empty_like(layout).copy_(parameter.detach())
    if attribute == "weight" and hasattr(module, _PACKED) and layout.ndim == 2:
        # Products with the unit vectors give the packed matrix itself, exactly.
        unpacked_OI, num_inputs = _empty_like(layout), layout.shape[1]
        for first in range(0, num_inputs, _INPUTS_AT_ONCE):
            count = min(_INPUTS_AT_ONCE, num_inputs - first)
            units_UI = torch.eye(count, num_inputs, dtype=layout.dtype).roll(first, 1)
            unpacked_OI[:, first : first + count] = getattr(module, _PACKED)(units_UI, parameter, None).T
        yield unpacked_OI


def _empty_like(layout: Tensor) -> Tensor:
    """Return a tensor with memory in this layout."""
    return torch.empty_strided(tuple(layout.shape), layout.stride(), dtype=layout.dtype)


def _add_pieces(
    loaded: LoadedWeights, name: str, values: Tensor, dtype: torch.dtype, origins: Mapping[_View, _Origin]
) -> None:
    """Add a piece for each part of a parameter that is copied from a sent tensor, or why the part is unverified.

    A part that is filled with one number, as padding is, needs neither if it has that number.
    """
    for view, (source, source_view) in origins.items():
        part = view.within(values)
        if isinstance(source, str):
            offset, size, stride = source_view.offset, list(source_view.size), list(source_view.stride)
            rounded_to = str(dtype).removeprefix("torch.")
            loaded["pieces"].append(Piece(name, source, offset, size, stride, rounded_to, digest(part)))
        elif source is None:
            loaded["unverified"].append(f"{name} is computed from what was sent, in an unknown way")
        elif bool((part != source).any()):
            loaded["unverified"].append(f"{name} is not {source} where it is padded")


def loaded_adapters(manager: Any, shapes: Mapping[str, list[int]]) -> LoadedWeights:
    """Return where the adapters of each layer come from, given vLLM's manager and the shapes of the sent tensors.

    A sent tensor that no layer holds is unverified, and so is a layer that holds elements that were not sent.
    """
    loaded = LoadedWeights(pieces=[], unverified=[])
    sent = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    # There is memory for one set of adapters (see `engine_arguments`): at most one slot is filled.
    slot = next((slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None), None)
    layers = manager.modules if slot is not None else {}
    for name, layer in layers.items():
        try:
            copies = _adapter_copies(layer, slot, name, manager.packed_modules.get(name), sent)
        except Exception as error:  # as in `loaded_weights`
            loaded["unverified"].append(f"vLLM's loading of adapters into {name} cannot be traced: {error}")
            continue
        for matrix, origins in copies:
            num_sent = sum(int(view.within(matrix).count_nonzero()) for view in origins)
            if int(matrix[slot].count_nonzero()) != num_sent:
                loaded["unverified"].append(f"the adapter of {name} has elements that were not sent")
            _add_pieces(loaded, f"the adapter of {name}", matrix, matrix.dtype, origins)
    missing = sent.keys() - {piece.sent_as for piece in loaded["pieces"]}
    loaded["unverified"] += [f"{name} is not loaded" for name in sorted(missing)]
    return loaded


def _adapter_copies(
    layer: Any, slot: int | None, name: str, packed: Sequence[str] | None, sent: Mapping[str, Tensor]
) -> list[tuple[Tensor, dict[_View, _Origin]]]:
    """Return each matrix of a layer, with the parts of it that vLLM's own loading copies from sent tensors."""
    names = packed or [name]  # the layers that vLLM has fused into this one, such as q_proj, k_proj and v_proj
    a = [sent.get(f"{SAVED_PREFIX}{each}.lora_A.weight") for each in names]
    b = [sent.get(f"{SAVED_PREFIX}{each}.lora_B.weight") for each in names]
    stacked_a, stacked_b = layer.lora_a_stacked, layer.lora_b_stacked
    recorder = _Recorder(sent)
    try:
        layer.lora_a_stacked = tuple(torch.empty_like(each, device="meta") for each in stacked_a)
        layer.lora_b_stacked = tuple(torch.empty_like(each, device="meta") for each in stacked_b)
        layouts = (*layer.lora_a_stacked, *layer.lora_b_stacked)
        with recorder:
            if any(each is not None for each in a):
                layer.set_lora(slot, a if packed else a[0], b if packed else b[0])  # a fused layer takes lists
    finally:
        layer.lora_a_stacked, layer.lora_b_stacked = stacked_a, stacked_b
    copies = []
    for matrix, layout in zip((*stacked_a, *stacked_b), layouts, strict=True):
        origins = recorder.copies.get(_storage_id(layout), {})
        copies.append((matrix, {view: origin for view, origin in origins.items() if isinstance(origin[0], str)}))
    return copies


def renew_output_layer(model: Any) -> None:
    """Renew an output layer's packed copy, on CPUs, of weights that it shares with the embeddings: loading does not.

    Some models, such as Gemma, have no separate output layer; loading renews the copy of their embeddings.
    """
    head = getattr(model, "lm_head", None)
    if model.config.tie_word_embeddings and head is not None:
        head.quant_method.process_weights_after_loading(head)
