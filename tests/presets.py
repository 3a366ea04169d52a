"""The params files that are shipped."""

from pathlib import Path
from typing import Any

from components.preflight.config import load_params

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]


def preset(name: str = "smoke") -> dict[str, Any]:
    """Return a preset in full, as it is before anything is validated: with what it extends, all defaults and nulls."""
    return load_params(ROOT / f"params/{name}.yaml").model_dump(mode="json")
