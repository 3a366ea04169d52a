"""The model card: what a registered version is, what it was made from, how good it is and where it must not be used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_NAMES = {"base": "Base", "sft": "SFT", "grpo": "GRPO"}


def render_card(version: Mapping[str, Any], verdict: Any, summary: Any, provenance: Any) -> str:
    """Return the model card in Markdown; equal inputs give equal text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # the card is Markdown: nothing to escape
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    configs = {
        stage: yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100).rstrip()
        for stage, values in provenance["configs"].items()
    }
    return environment.get_template("model_card.md.jinja").render(
        version=version,
        verdict=verdict,
        summary=summary,
        provenance=provenance,
        configs=configs,
        names=_NAMES,
        model=_model(provenance["configs"]),
        parts=[verdict["target"], *verdict["others"]],
    )


def _model(configs: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of the first stage that has one: the base model and the prompt."""
    sections = (config["model"] for config in configs.values() if isinstance(config.get("model"), dict))
    return {"base": "unknown", "prompt": None, **next(sections, {})}
