from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from components.rollout.vllm import verification
from components.rollout.vllm.verification import (
    LoadedWeights,
    Piece,
    StaleWeightsError,
    digest,
    verify_weights,
    weights_in,
)

GENERATOR = torch.Generator().manual_seed(3)
WEIGHT_OI = torch.randn(6, 8, generator=GENERATOR)


def _held(tensor: Tensor, offset: int, size: list[int], stride: list[int], dtype: str = "float32") -> LoadedWeights:
    return LoadedWeights(pieces=[Piece("own", "sent", offset, size, stride, dtype, digest(tensor))], unverified=[])


def test_the_smallest_change_of_one_element_changes_the_digest() -> None:
    """Another last bit, two elements that have changed places, another sign: each has a digest of its own."""
    changed = [WEIGHT_OI.clone() for _ in range(3)]
    changed[0][2, 3] = torch.nextafter(changed[0][2, 3], torch.tensor(9.0))
    changed[1][4, 5], changed[1][4, 6] = WEIGHT_OI[4, 6], WEIGHT_OI[4, 5]
    changed[2][0, 0] *= -1
    assert len({digest(each) for each in (WEIGHT_OI, *changed)}) == 4


def test_the_digest_is_that_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their layout, in however many parts they are digested, and of whichever type that holds them."""
    rounded = WEIGHT_OI.bfloat16()
    assert digest(rounded) == digest(rounded.float()) == digest(WEIGHT_OI, torch.bfloat16) != digest(WEIGHT_OI)
    assert digest(WEIGHT_OI.T.contiguous().T) == digest(WEIGHT_OI)
    whole = digest(WEIGHT_OI)
    monkeypatch.setattr(verification, "_CHUNK", 20)
    assert digest(WEIGHT_OI) == whole
    assert digest(torch.tensor(2.0)) == digest(torch.tensor([2.0]))
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0))


def test_what_matrix_units_take_for_zero_counts_as_zero() -> None:
    """A negative zero and a number too small to be normal are no other weights than 0."""
    assert digest(torch.tensor([-0.0, 1e-40, -1e-40, 1.0])) == digest(torch.tensor([0.0, 0.0, 0.0, 1.0]))


def test_a_sampler_that_holds_what_was_sent_passes() -> None:
    """Its pieces may be rows, columns, or rounded; two processes may hold one each."""
    sent = {"sent": WEIGHT_OI}
    rows = _held(WEIGHT_OI[3:], 24, [3, 8], [8, 1])
    columns = _held(WEIGHT_OI[:, 4:].contiguous(), 4, [6, 4], [8, 1])
    rounded = _held(WEIGHT_OI.bfloat16(), 0, [6, 8], [8, 1], "bfloat16")
    verify_weights(sent, [rows, columns, rounded], name="vLLM")
    verify_weights({"sent": torch.cat([WEIGHT_OI, WEIGHT_OI])[6:]}, [rows], name="vLLM")


def test_other_weights_are_refused_by_name() -> None:
    """A step too small for any log-probability to show is found, and so is what is not known of a tensor."""
    sent = {"sent": WEIGHT_OI}
    stale = _held(WEIGHT_OI - 1e-7, 0, [6, 8], [8, 1])
    with pytest.raises(StaleWeightsError, match=r"vLLM does not compute with .*: own differs from the sent that"):
        verify_weights(sent, [_held(WEIGHT_OI, 0, [6, 8], [8, 1]), stale], name="vLLM")
    unverified = LoadedWeights(pieces=stale["pieces"], unverified=["head.bias is not loaded, or not all of it"])
    with pytest.raises(StaleWeightsError, match=r"head\.bias is not loaded.*; own differs from the sent"):
        verify_weights(sent, [unverified], name="vLLM")


@pytest.mark.parametrize("held", [[], [LoadedWeights(pieces=[], unverified=[])]])
def test_a_sampler_that_says_nothing_of_its_weights_is_refused(held: list[LoadedWeights]) -> None:
    """Nothing verified is not the same as nothing wrong."""
    with pytest.raises(StaleWeightsError, match="holds no weights at all"):
        verify_weights({"sent": WEIGHT_OI}, held, name="vLLM")


def test_the_tensors_of_a_folder_are_those_of_all_its_files(tmp_path: Path) -> None:
    """Large models are saved in several."""
    for name in ("a", "b"):
        safetensors.torch.save_file({name: WEIGHT_OI}, tmp_path / f"model-{name}.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights_in(tmp_path).items()} == dict.fromkeys(
        "ab", WEIGHT_OI.tolist()
    )
