"""Losses and gradients beside those of TRL: what is equal and, by design, what is not (docs/reference/trl.md)."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.update import Experience
from tests.presets import ROOT
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_update import EXACT_SEQUENCES, exact_experience, gradients_of, loss_of_step

pytestmark = [pytest.mark.long(minutes=0.1), pytest.mark.timeout(1800)]

_VOCABULARY, _PAD = 19, 0
_PYTHON_OF_TRL = "from environments import python_of; print(python_of('trl'))"
_BETA, _MAX_NEW_TOKENS, _MAX_WEIGHT = 0.04, 16, 1.2
_KL = {"beta": _BETA, "use_bias_correction_kl": False}
_CORRECTED_KL = {"beta": _BETA, "use_bias_correction_kl": True}
_OWN_KL = {"loss__kl__coefficient": _BETA}
_OWN_CORRECTED_KL = {**_OWN_KL, "loss__kl__estimator": "k3_corrected"}
_CLIPS: dict[str, Any] = {"epsilon": 0.1, "epsilon_high": 0.3}
_OWN_CLIPS: dict[str, Any] = {"loss__clip": {"low": 0.1, "high": 0.3}}
_OWN_WEIGHTS: dict[str, Any] = {"sampler__correction__weight": {"level": "token", "max": _MAX_WEIGHT}}
_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
_OWN_GSPO = {"loss__ratio": "sequence"}
_CONSTANT = {"loss__aggregation": "constant"}
_TOKENS = {"loss__aggregation": "token_mean"}
_CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
_OWN_CISPO = {"loss__policy_loss": "cispo", **_TOKENS}

Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "grpo, KL": ({"loss_type": "grpo", **_KL}, _OWN_KL),
    "grpo, corrected KL": ({"loss_type": "grpo", **_CORRECTED_KL}, _OWN_CORRECTED_KL),
    "grpo, asymmetric clips": ({"loss_type": "grpo", **_CLIPS}, _OWN_CLIPS),
    "dr_grpo": ({"loss_type": "dr_grpo"}, _CONSTANT),
    "dr_grpo, KL": ({"loss_type": "dr_grpo", **_KL}, {**_CONSTANT, **_OWN_KL}),
    "bnpo": ({"loss_type": "bnpo"}, _TOKENS),
    "bnpo, KL": ({"loss_type": "bnpo", **_KL}, {**_TOKENS, **_OWN_KL}),
    "dapo, asymmetric clips": ({"loss_type": "dapo", **_CLIPS}, {**_TOKENS, **_OWN_CLIPS}),
    "dapo, KL, importance weights": ({"loss_type": "dapo", **_KL}, {**_TOKENS, **_OWN_KL, **_OWN_WEIGHTS}),
    "gspo": (_GSPO, _OWN_GSPO),
    "gspo, KL, importance weights": ({**_GSPO, **_KL}, {**_OWN_GSPO, **_OWN_KL, **_OWN_WEIGHTS}),
    "sapo": (  # with a temperature that float32 holds: TRL rounds the default to it
        {"loss_type": "sapo", "sapo_temperature_neg": 1.0625},
        {"loss__policy_loss": "sapo", "loss__soft_clip": {"negative": 1.0625}},
    ),
    "cispo": (_CISPO, {**_OWN_CISPO, "loss__clip": {"low": 0.999, "high": 0.3}}),
}
"""By name, the keys of TRL and ours that say the same."""
DIFFERENT: dict[str, tuple[Case, float]] = {
    # Shares by which gradients differ; the reasons are in docs/reference/trl.md.
    "default KL": (({"loss_type": "grpo", "beta": _BETA}, _OWN_KL), 1e-3),
    "gspo, corrected KL": (({**_GSPO, "beta": _BETA}, {**_OWN_GSPO, **_OWN_CORRECTED_KL}), 1e-3),
    "cispo with a lower bound": ((_CISPO, {**_OWN_CISPO, "loss__clip": {"low": 0.2, "high": 0.3}}), 1e-2),
}


def _config(settings: dict[str, Any], *, max_tokens: int) -> TrainGRPOConfig:
    sizes = {"prompts_per_step": 2, "group_size": 3, "sampling__max_new_tokens": _MAX_NEW_TOKENS}
    others = {"sampler__max_mismatch": 1.0, "engine__micro_batch_tokens": max_tokens, "loss__kl__coefficient": 0.0}
    return grpo_config(**{**sizes, **others, **settings})


class _Both:
    """The same model and completions here and in TRL, and what TRL has computed."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(4)
        sizes = {"vocab_size": _VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": _PAD}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, initializer_range=0.3)).double().eval()
        self.model.set_attn_implementation("sdpa")
        self.experience = exact_experience("the paper's", EXACT_SEQUENCES, self.model)
        self.model.save_pretrained(folder / "model")
        words = {"a": 1, "<pad>": _PAD, **{f"w{number}": number for number in range(2, _VOCABULARY)}}
        tokenizer, special = Tokenizer(WordLevel(words, unk_token="a")), {"pad_token": "<pad>", "eos_token": "<pad>"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
        save_file(_padded(self.experience), folder / "inputs.safetensors")
        fixed = {"num_generations": 3, "max_completion_length": _MAX_NEW_TOKENS, "temperature": 1.0}
        cases: dict[str, Any] = {}
        for name, (theirs, _) in {**CASES, **{name: case for name, (case, _) in DIFFERENT.items()}}.items():
            weights = "weights" if "importance" in name else None
            cases[name] = {"config": {**fixed, **theirs}, "importance_weights": weights}
        (folder / "cases.json").write_text(json.dumps(cases))
        self.results = self._computed(folder)

    def _computed(self, folder: Path) -> dict[str, Tensor]:
        command = [sys.executable, "-c", _PYTHON_OF_TRL]
        found = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.skip(f"needs TRL's environment, which a package index serves: {found.stderr.strip()[-200:]}")
        script = ROOT / "benchmarks/trl_losses.py"
        subprocess.run([found.stdout.split()[-1], script, folder], check=True, timeout=900)
        return load_file(folder / "results.safetensors")

    def ours(self, settings: dict[str, Any], *, max_tokens: int) -> tuple[float, dict[str, Tensor]]:
        """Return our loss and its gradient."""
        model = copy.deepcopy(self.model)
        loss, _ = loss_of_step(_config(settings, max_tokens=max_tokens), self.experience, model)
        loss.backward()
        return float(loss.detach()), gradients_of(model)

    def difference(self, name: str, gradients: dict[str, Tensor]) -> float:
        """Return by how much our gradient differs from TRL's, as a share of that."""
        ours = torch.cat([each.flatten() for each in gradients.values()])
        wanted = torch.cat([self.results[f"{name}/{weight}"].flatten() for weight in gradients])
        return float((ours - wanted).norm() / wanted.norm())


def _padded(experience: Experience) -> dict[str, Tensor]:
    """Return the completions as TRL has them: prompts padded on their left, completions on their right."""
    prompts = [each.prompt_ids for each in experience.sequences_B]
    completions = [each.completion_ids for each in experience.sequences_B]
    longest_prompt, longest = max(map(len, prompts)), max(map(len, completions))
    lengths = experience.num_tokens_B

    def in_rows(values_M: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values_M.split(lengths)), batch_first=True)

    weights_M = (experience.old_logprobs_M - experience.sampler_logprobs_M).exp().clamp(max=_MAX_WEIGHT)
    assert experience.reference_logprobs_M is not None
    return {
        "prompt_ids": torch.tensor([[_PAD] * (longest_prompt - len(ids)) + list(ids) for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest_prompt - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([list(ids) + [_PAD] * (longest - len(ids)) for ids in completions]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in completions]),
        "advantages": torch.stack([part[0] for part in experience.advantages_M.split(lengths)]),
        "old_per_token_logps": in_rows(experience.old_logprobs_M),
        "ref_per_token_logps": in_rows(experience.reference_logprobs_M),
        "weights": in_rows(weights_M),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> _Both:
    """Computed once, for all cases: importing TRL takes longer than they do."""
    return _Both(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("max_tokens", [14, 10_000], ids=["micro-batches", "one batch"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(both: _Both, name: str, max_tokens: int) -> None:
    """In float64, but for norms and rotary angles, which transformers computes in float32."""
    loss, gradients = both.ours(CASES[name][1], max_tokens=max_tokens)
    assert loss == pytest.approx(float(both.results[f"{name}/loss"]), rel=1e-6, abs=1e-8)
    assert both.difference(name, gradients) < 5e-6


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_by_design_differs(both: _Both, name: str) -> None:
    """The documented differences are still there, and are not rounding."""
    (_, ours), at_least = DIFFERENT[name]
    _, gradients = both.ours(ours, max_tokens=10_000)
    assert both.difference(name, gradients) > at_least
