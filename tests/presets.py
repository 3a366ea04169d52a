"""The params files and the pages that are shipped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.preflight.config import load_params

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")])


def preset(name: str = "smoke") -> dict[str, Any]:
    """Return a preset in full, as it is before anything is validated: with what it extends, all defaults and nulls."""
    return load_params(ROOT / f"params/{name}.yaml").model_dump(mode="json")


def write_params(path: Path, values: Mapping[str, Any]) -> None:
    """Write a params file."""
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False))
