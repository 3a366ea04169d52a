import pytest
import torch
from torch import Tensor

from components.rollout.vllm import verification
from components.rollout.vllm.verification import (
    LoadedWeights,
    Piece,
    StaleWeightsError,
    digest,
    verify_logprobs,
    verify_weights,
)

GENERATOR = torch.Generator().manual_seed(3)
WEIGHT_OI = torch.randn(6, 8, generator=GENERATOR)
NEW_M = -2 * torch.rand(100, dtype=torch.float64, generator=GENERATOR)
STEP_M = 1e-4 * torch.randn(100, dtype=torch.float64, generator=GENERATOR)
NOISE_M = torch.randn(100, dtype=torch.float64, generator=GENERATOR)


def _loaded(tensor: Tensor, offset: int, size: list[int], stride: list[int], dtype: str = "float32") -> LoadedWeights:
    return LoadedWeights(pieces=[Piece("own", "sent", offset, size, stride, dtype, digest(tensor))], unverified=[])


def test_the_digest_depends_on_the_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last bit, place and sign of each, but on no layout, part or type; subnormal numbers count as zero."""
    changed = [WEIGHT_OI.clone() for _ in range(3)]
    changed[0][2, 3] = torch.nextafter(changed[0][2, 3], torch.tensor(9.0))
    changed[1][4, 5], changed[1][4, 6] = WEIGHT_OI[4, 6], WEIGHT_OI[4, 5]
    changed[2][0, 0] *= -1
    assert len({digest(each) for each in (WEIGHT_OI, *changed)}) == 4
    rounded = WEIGHT_OI.bfloat16()
    assert digest(rounded) == digest(rounded.float()) == digest(WEIGHT_OI, torch.bfloat16) != digest(WEIGHT_OI)
    assert digest(WEIGHT_OI.T.contiguous().T) == digest(WEIGHT_OI)
    whole = digest(WEIGHT_OI)
    monkeypatch.setattr(verification, "_CHUNK", 20)
    assert digest(WEIGHT_OI) == whole
    assert digest(torch.tensor(2.0)) == digest(torch.tensor([2.0]))
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0))
    assert digest(torch.tensor([-0.0, 1e-40, -1e-40, 1.0])) == digest(torch.tensor([0.0, 0.0, 0.0, 1.0]))


def test_a_sampler_with_the_weights_that_were_sent_passes() -> None:
    """Its pieces may be rows, columns, or rounded; two processes may hold one each."""
    sent = {"sent": WEIGHT_OI}
    rows = _loaded(WEIGHT_OI[3:], 24, [3, 8], [8, 1])
    columns = _loaded(WEIGHT_OI[:, 4:].contiguous(), 4, [6, 4], [8, 1])
    rounded = _loaded(WEIGHT_OI.bfloat16(), 0, [6, 8], [8, 1], "bfloat16")
    verify_weights(sent, [rows, columns, rounded], name="vLLM")
    verify_weights({"sent": torch.cat([WEIGHT_OI, WEIGHT_OI])[6:]}, [rows], name="vLLM")


def test_other_weights_are_reported_by_name() -> None:
    """So are a step too small for any log-probability to show, a tensor of unknown origin, and no weights at all."""
    sent = {"sent": WEIGHT_OI}
    stale = _loaded(WEIGHT_OI - 1e-7, 0, [6, 8], [8, 1])
    with pytest.raises(StaleWeightsError, match=r"vLLM does not compute with .*: own differs from the sent that"):
        verify_weights(sent, [_loaded(WEIGHT_OI, 0, [6, 8], [8, 1]), stale], name="vLLM")
    unverified = LoadedWeights(pieces=stale["pieces"], unverified=["head.bias is not loaded, or not all of it"])
    with pytest.raises(StaleWeightsError, match=r"head\.bias is not loaded.*; own differs from the sent"):
        verify_weights(sent, [unverified], name="vLLM")
    for held in ([], [LoadedWeights(pieces=[], unverified=[])]):
        with pytest.raises(StaleWeightsError, match="holds no weights at all"):
            verify_weights(sent, held, name="vLLM")


def _verify_logprobs(sampler_M: Tensor, old_M: Tensor | None = None) -> None:
    verify_logprobs(sampler_M, NEW_M, old_M, max_mismatch=0.01, name="vLLM at http://x")


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4, 5e-3, -5e-3])
def test_log_probabilities_of_the_new_weights_pass(noise: float) -> None:
    """Whatever the rounding; the largest lies beyond the old weights one way or the other, but is not correlated."""
    for old_M in (NEW_M + STEP_M, NEW_M, None):
        _verify_logprobs(NEW_M + noise * NOISE_M, old_M)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 5e-5, 1e-4])
def test_other_weights_are_detected_by_their_log_probabilities(noise: float) -> None:
    """Those from before a step differ by a hundredth of the allowed mismatch, and rounding is as large as the step."""
    with pytest.raises(StaleWeightsError, match="http://x still samples from the weights before the last update"):
        _verify_logprobs(NEW_M + STEP_M + noise * NOISE_M, NEW_M + STEP_M)
    for difference in (0.02, float("nan"), float("inf")):
        with pytest.raises(StaleWeightsError, match=r"max_mismatch = 0\.01"):
            _verify_logprobs(NEW_M + difference)
