"""The extension of vLLM's worker, in vLLM's own processes: loading weights, and reporting which are computed with.

How vLLM maps tensors is not repeated here: its own loading is run once more on tensors without memory, and the copies
it makes are recorded. So fused, sharded and tied tensors are handled as vLLM does, for any model.
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


class WeightLoading:
    """Mixed into vLLM's worker, which calls its methods by name (`collective_rpc`)."""

    weights_version = ""

    def load_folder(self, folder: str, version: str) -> None:
        """Load the weights of a Hugging Face folder, unless that version is loaded: several clients may ask for it."""
        if self.weights_version == version:
            return
        worker: Any = self
        self.weights_version = ""
        worker.reload_weights(weights_path=folder)
        renew_output_layer(worker.model_runner.get_model())
        self.weights_version = version

    def loaded_weights(self, shapes: dict[str, list[int]]) -> LoadedWeights:
        """Return the weights that this process computes with, given the shapes of the tensors that it was sent."""
        worker: Any = self
        runner, dtype = worker.model_runner, worker.vllm_config.model_config.dtype
        adapters = {name: shape for name, shape in shapes.items() if name.startswith(SAVED_PREFIX)}
        weights = {name: shape for name, shape in shapes.items() if name not in adapters}
        loaded = LoadedWeights(pieces=[], unverified=[])
        with set_current_vllm_config(worker.vllm_config):
            parts = [loaded_weights(runner.get_model(), weights, dtype)] if weights else []
            if adapters:
                parts.append(loaded_adapters(runner.lora_manager._adapter_manager, adapters))
        for part in parts:
            loaded["pieces"] += part["pieces"]
            loaded["unverified"] += part["unverified"]
        return loaded


class _View(NamedTuple):
    """Elements of a tensor, as in `torch.as_strided`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


_Origin = tuple[str | int | None, _View]
"""Where elements of a parameter come from: a tensor by name, None for a computed one, or a number."""


def loaded_weights(model: nn.Module, shapes: Mapping[str, list[int]], dtype: torch.dtype) -> LoadedWeights:
    """Return the weights of each parameter of the model, given the shapes of the tensors that it is sent.

    A parameter is unverified if a part of it is loaded from no tensor, or changed on the way. Buffers are skipped: they
    are not trained.
    """
    loaded = LoadedWeights(pieces=[], unverified=[])
    layouts = _layouts(model)
    try:
        copies = _recorded_copies(model, layouts, shapes, dtype)
    except Exception as error:  # any model's way of loading may fail, in any way, on tensors without memory
        loaded["unverified"].append(f"vLLM's loading of {type(model).__name__} cannot be traced: {error}")
        return loaded
    for name, module, own_name, parameter in _parameters(model):
        layout = layouts[id(parameter)]
        parts = copies.get(_storage(layout), {})
        if sum(torch.Size(each.size).numel() for each in parts) != layout.numel():
            loaded["unverified"].append(f"{name} is not loaded, or only in part")
            continue
        forms = list(_forms(module, own_name, parameter, layout))
        if not forms:
            loaded["unverified"].append(f"{name} has a form that cannot be compared")
        for form in forms:
            _add(loaded, name, form, layout.dtype, parts)
    return loaded


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each parameter of each module: one that two modules share, twice."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, module, name, parameter


def _layouts(model: nn.Module) -> dict[int, Tensor]:
    """Return, by the id of each parameter, a tensor without memory of the form in which it is loaded."""
    layouts: dict[int, Tensor] = {}
    for _, module, name, parameter in _parameters(model):
        if id(parameter) not in layouts:
            originals, _ = get_layerwise_info(module).restore_metadata
            layout: Any = restore_layer_refs(to_meta_tensor(originals.get(name, parameter)), module)
            layout.weight_loader = _get_original_loader(layout)  # not one that reloading has wrapped around it
            layouts[id(parameter)] = layout
    return layouts


def _recorded_copies(
    model: nn.Module, layouts: Mapping[int, Any], shapes: Mapping[str, list[int]], dtype: torch.dtype
) -> dict[int, dict[_View, _Origin]]:
    """Return what loading the tensors writes into each layout, by its storage; the last write to a place counts."""
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    originals = [(module, name, parameter) for _, module, name, parameter in _parameters(model)]
    loading: Any = model
    recorder = _Recorder(weights)
    try:
        for module, name, parameter in originals:
            module._parameters[name] = layouts[id(parameter)]
        with recorder:
            loading.load_weights(iter(weights.items()))
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter
    return recorder.copies


class _Recorder(TorchDispatchMode):
    """Records from which tensor each element of another is copied."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(tensor): name for name, tensor in sources.items()}
        self.copies: dict[int, dict[_View, _Origin]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            source = args[1].expand(args[0].shape)
            self._write(args[0], (self._sources.get(_storage(source)), _View.of(source)))
        elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            value = args[1] if len(args) > 1 else 0
            self._write(args[0], (value, _View.of(args[0])))
        return func(*args, **(kwargs or {}))

    def _write(self, target: Tensor, origin: _Origin) -> None:
        if target.numel():
            self.copies.setdefault(_storage(target), {})[_View.of(target)] = origin


def _storage(tensor: Tensor) -> int:
    """Return an id that all views of a tensor share."""
    return int(tensor.untyped_storage()._cdata)


def _forms(module: nn.Module, name: str, parameter: nn.Parameter, layout: Tensor) -> Iterator[Tensor]:
    """Yield all copies of a parameter that a module computes with, in the layout in which it is loaded."""
    if parameter.shape == layout.shape:
        same = parameter.stride() == layout.stride()
        yield parameter.detach() if same else _like(layout).copy_(parameter.detach())
    if name == "weight" and hasattr(module, _PACKED) and layout.ndim == 2:
        # The matrix by which a layer multiplies: its products with the unit vectors, which are exact.
        unpacked_OI, num_inputs = _like(layout), layout.shape[1]
        for first in range(0, num_inputs, _INPUTS_AT_ONCE):
            count = min(_INPUTS_AT_ONCE, num_inputs - first)
            units_UI = torch.eye(count, num_inputs, dtype=layout.dtype).roll(first, 1)
            unpacked_OI[:, first : first + count] = getattr(module, _PACKED)(units_UI, parameter, None).T
        yield unpacked_OI


def _like(layout: Tensor) -> Tensor:
    return torch.empty_strided(tuple(layout.shape), layout.stride(), dtype=layout.dtype)


def _add(loaded: LoadedWeights, name: str, form: Tensor, dtype: torch.dtype, parts: Mapping[_View, _Origin]) -> None:
    """Add the places of a parameter that tensors were copied to."""
    for (offset, size, stride), (source, view) in parts.items():
        elements = form.as_strided(size, stride, form.storage_offset() + offset)
        if isinstance(source, str):
            place = (view.offset, list(view.size), list(view.stride))
            loaded["pieces"].append(Piece(name, source, *place, str(dtype).removeprefix("torch."), digest(elements)))
        elif source is None:
            loaded["unverified"].append(f"{name} is computed from what was sent, in an unknown way")
        elif bool((elements != source).any()):
            loaded["unverified"].append(f"{name} is not {source} where it is padded")


def loaded_adapters(manager: Any, shapes: Mapping[str, list[int]]) -> LoadedWeights:
    """Return the adapters of each layer, given vLLM's manager of them and the shapes of the tensors that were sent.

    A tensor that no layer holds is unverified, and so is a layer that holds anything else.
    """
    loaded = LoadedWeights(pieces=[], unverified=[])
    sent = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    slots = [slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None]
    for name, layer in manager.modules.items() if slots else ():
        names = manager.packed_modules.get(name)
        try:
            copies = _adapter_copies(layer, slots[0], name, names, sent)
        except Exception as error:  # as in `loaded_weights`
            loaded["unverified"].append(f"vLLM's loading of adapters into {name} cannot be traced: {error}")
            continue
        for matrix, parts in copies:
            elements = [
                matrix.as_strided(view.size, view.stride, matrix.storage_offset() + view.offset) for view in parts
            ]
            if int(matrix[slots[0]].count_nonzero()) != sum(int(each.count_nonzero()) for each in elements):
                loaded["unverified"].append(f"the adapter of {name} has elements that were not sent")
            _add(loaded, f"the adapter of {name}", matrix, matrix.dtype, parts)
    missing = sent.keys() - {piece.sent_as for piece in loaded["pieces"]}
    loaded["unverified"] += [f"{name} is not loaded" for name in sorted(missing)]
    return loaded


def _adapter_copies(
    layer: Any, slot: int, name: str, packed: Sequence[str] | None, sent: Mapping[str, Tensor]
) -> list[tuple[Tensor, dict[_View, _Origin]]]:
    """Return each matrix of a layer, with what vLLM's own loading copies into it, on tensors without memory."""
    a, b = ([sent.get(f"{SAVED_PREFIX}{each}.lora_{key}.weight") for each in packed or [name]] for key in "AB")
    matrices = (layer.lora_a_stacked, layer.lora_b_stacked)
    layouts = tuple(tuple(torch.empty_like(each, device="meta") for each in kind) for kind in matrices)
    recorder = _Recorder(sent)
    try:
        layer.lora_a_stacked, layer.lora_b_stacked = layouts
        with recorder:
            if any(each is not None for each in a):
                layer.set_lora(slot, a if packed else a[0], b if packed else b[0])
    finally:
        layer.lora_a_stacked, layer.lora_b_stacked = matrices
    pairs = [pair for kinds in zip(matrices, layouts, strict=True) for pair in zip(*kinds, strict=True)]
    copies = [(matrix, recorder.copies.get(_storage(layout), {})) for matrix, layout in pairs]
    return [
        (matrix, {view: each for view, each in parts.items() if isinstance(each[0], str)}) for matrix, parts in copies
    ]


def renew_output_layer(model: Any) -> None:
    """Make an output layer that shares the weights of the embeddings compute with the new ones.

    On CPUs it keeps a repacked copy of them, which loading weights does not renew. Some models, such as Gemma, have no
    output layer beside the embeddings, whose copy is renewed.
    """
    head = getattr(model, "lm_head", None)
    if model.config.tie_word_embeddings and head is not None:
        head.quant_method.process_weights_after_loading(head)
