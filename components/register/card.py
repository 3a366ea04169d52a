"""The model card of a version: front matter that the Hugging Face hub reads, and text for people.

The front matter follows the hub's model card specification; `model-index` has the strict accuracy of each source with
its interval, as measured here and verified by nobody else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CARD = "model_card.md"

_DATASETS = {
    "gsm8k": "openai/gsm8k",
    "math": "EleutherAI/hendrycks_math",
    "math500": "HuggingFaceH4/MATH-500",
    "mbpp": "google-research-datasets/mbpp",
}
"""The hub's dataset with the problems of a source; generated problems have none."""
_TASK = "text-generation"


def model_card(version: Mapping[str, Any], results: Mapping[str, Any], licence: str | None) -> str:
    """Return the card in Markdown; `version` is a version.json, `results` are the JSON files of the report by stem."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # without autoescape, since the card is Markdown
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    provenance = results["provenance"]
    configs: dict[str, dict[str, Any]] = provenance["configs"]
    models = (config["model"] for config in configs.values() if isinstance(config.get("model"), dict))
    # Without a config, if the artifacts of the report have no lineage.
    unknown: dict[str, Any] = {"base": "unknown", "prompt": None, "chat": None, "thinking": None, "prompts": {}}
    model = unknown | next(models, {})
    material = provenance.get("materials", {}).get(model["base"]) or {}
    hub: dict[str, Any] = {}
    if material.get("repository") == model["base"]:  # otherwise a folder, or a model made from scratch
        hub = {"name": model["base"], "commit": material["commit"]}
    return environment.get_template("model_card.md.jinja").render(
        **results,
        version=version,
        front_matter=_front_matter(version, results, licence, hub.get("name")),
        licence=licence,
        model=model,
        hub=hub,
        training=configs.get("train_grpo", {}),
        is_fine_tuned=bool(configs.get("train_sft", {}).get("num_steps", 1)),
        configs={
            stage: yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).rstrip()
            for stage, values in configs.items()
        },
    )


def _front_matter(
    version: Mapping[str, Any], results: Mapping[str, Any], licence: str | None, base_model: str | None
) -> str:
    """Return the card's metadata as YAML; `base_model` is its name on the hub, None for a model from elsewhere."""
    from huggingface_hub import EvalResult, ModelCardData

    configs: Mapping[str, Any] = results["provenance"]["configs"]
    sources = configs.get("prepare_data", {}).get("sources", [])
    trained_on = [_DATASETS[each["kind"]] for each in sources if each["kind"] in _DATASETS and each.get("train")]
    protocol = results["summary"]["protocol"] or {}
    eval_results = [
        EvalResult(
            task_type=_TASK,
            task_name="Problems with verifiable answers",
            dataset_type=_DATASETS.get(source, source),
            dataset_name=source,
            dataset_split=protocol.get("split", "test"),
            metric_type="accuracy",
            metric_name="Accuracy, strict extraction, greedy",
            metric_value=round(score["accuracy"], 4),
            metric_args={
                "correct": score["correct"],
                "total": score["total"],
                "interval_95": [round(end, 4) for end in score["interval"]],
                **{key: protocol[key] for key in ("name", "shots", "max_new_tokens", "dtype") if key in protocol},
            },
            verified=False,
        )
        for source, score in results["summary"]["models"]["grpo"].items()
    ]
    return str(
        ModelCardData(
            license=licence or "unknown",
            base_model=base_model,
            datasets=list(dict.fromkeys(trained_on)) or None,
            library_name="transformers",
            pipeline_tag=_TASK,
            tags=["grpo", "reasoning"],
            model_name=version["name"],
            eval_results=eval_results,
        )
    )
