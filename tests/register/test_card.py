"""The model card, read as the Hugging Face hub reads it."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from components.register.card import model_card
from components.shared import jsonl

VERSION = {
    **{"name": "grpo-policy", "version": "v0.0.3", "tag": "grpo-policy@v0.0.3"},
    **{"registry": "registry", "path": "policy", "policy_digest": "4f" * 32},
}


def _evidence(report: Path) -> dict[str, Any]:
    return {name: jsonl.read_json(report / f"{name}.json") for name in ("verdict", "summary", "provenance")}


def _read(text: str) -> tuple[ModelCardData, str]:
    card = ModelCard(text)
    assert isinstance(card.data, ModelCardData)
    return card.data, card.text


def test_the_hub_reads_the_accuracies_with_their_intervals(passed: Path) -> None:
    """One result for each source; what nobody knows, such as the licence, is not made up."""
    evidence = _evidence(passed)
    data, text = _read(model_card(VERSION, evidence, None))
    assert (data.license, data.library_name, data.model_name) == ("unknown", "transformers", "grpo-policy")
    assert data.base_model is None
    measured = evidence["summary"]["models"]["grpo"]
    results = {result.dataset_name: result for result in data.eval_results or []}
    assert results.keys() == measured.keys() == {"words", "gsm8k"}
    for source, score in measured.items():
        assert results[source].metric_value == round(score["accuracy"], 4)
        assert (results[source].metric_args or {})["interval_95"] == [round(end, 4) for end in score["interval"]]
        assert results[source].verified is False
    assert results["gsm8k"].dataset_type == "openai/gsm8k"
    assert "Licence: unknown" in text
    assert f"| words | {measured['words']['total']} | flexible |" in text
    assert "Truncated, gsm8k" in text


def test_a_model_of_the_hub_and_its_data_are_named(passed: Path) -> None:
    """With its commit; and the licence is the one that is configured."""
    evidence = _evidence(passed)
    provenance = evidence["provenance"]
    provenance["configs"]["train_sft"]["model"]["base"] = "org/model"
    provenance["materials"] = {"org/model": {"repository": "org/model", "commit": "c0ffee"}}
    provenance["configs"]["prepare_data"]["sources"] = [
        {"kind": "gsm8k", "train": "data/raw/gsm8k_train.jsonl"},
        {"kind": "math500", "train": None, "test": "data/raw/math500.jsonl"},
        {"kind": "word_problems", "num_train": 10},
    ]
    data, text = _read(model_card(VERSION, evidence, "apache-2.0"))
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", "org/model", ["openai/gsm8k"])
    assert "[org/model](https://huggingface.co/org/model) at commit `c0ffee`" in text
    assert "Licence: `apache-2.0`" in text


def test_the_card_counts_the_steps_of_the_policy(passed: Path) -> None:
    """Not those that were planned, where training stopped early or the best policy is an earlier one."""
    evidence = _evidence(passed)
    evidence["provenance"]["configs"]["train_grpo"] |= {"num_steps": 40, "prompts_per_step": 8, "group_size": 16}
    assert "40 steps of GRPO, each" in model_card(VERSION, evidence, None)
    evidence["summary"]["training"] = {"policy_step": 7, "num_steps": 9, "stopped": "patience"}
    text = model_card(VERSION, evidence, None)
    assert "7 steps of GRPO, each" in text
    assert "the best accuracy in validation, of 9 steps done" in text
