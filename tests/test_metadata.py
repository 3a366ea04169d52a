"""Each component says what it is and needs, in the form that catalogues of Kubeflow components read."""

import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
COMPONENTS = sorted(path.parent.name for path in ROOT.glob("components/*/component.py"))
DEPENDENCY = {
    "type": "object",
    "required": ["name", "version"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string", "pattern": r"^(==|>=|<=|~=)?\d+\.\d+\.\d+$"},
    },
}
SCHEMA = {
    "type": "object",
    "required": ["name", "stability", "dependencies", "lastVerified"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "stability": {"enum": ["alpha", "beta", "stable"]},
        "dependencies": {
            "type": "object",
            "required": ["kubeflow"],
            "additionalProperties": False,
            "properties": {
                "kubeflow": {
                    "type": "array",
                    "items": DEPENDENCY,
                    "contains": {"properties": {"name": {"const": "Pipelines"}}},
                },
                "external_services": {"type": "array", "items": DEPENDENCY},
            },
        },
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "lastVerified": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\+00:00$"},
        "links": {"type": "object"},
    },
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_metadata_keep_to_the_schema(name: str) -> None:
    """Unknown keys, another stability or a version that is none are refused by the catalogues."""
    jsonschema.validate(_metadata(name), SCHEMA)


@pytest.mark.parametrize("name", COMPONENTS)
def test_metadata_speak_of_what_is_there(name: str) -> None:
    """The name is the folder's, the date is not in the future, the page exists, and there are tests."""
    metadata = _metadata(name)
    assert metadata["name"] == name
    assert datetime.datetime.fromisoformat(metadata["lastVerified"]) <= datetime.datetime.now(datetime.UTC)
    assert (ROOT / metadata["links"]["documentation"]).is_file()
    assert list((ROOT / "tests" / name).glob("test_*.py"))


def _metadata(name: str) -> dict[str, Any]:
    """The file as JSON has it: YAML reads a time as a time."""
    metadata: dict[str, Any] = yaml.safe_load((ROOT / "components" / name / "metadata.yaml").read_text())
    return {**metadata, "lastVerified": metadata["lastVerified"].isoformat()}
