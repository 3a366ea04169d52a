"""Each component says what it is and needs, in the form that catalogues of Kubeflow components read."""

import datetime
import re

import pytest
import yaml

from tests.presets import ROOT

COMPONENTS = sorted(path.parent.name for path in ROOT.glob("components/*/component.py"))
REQUIRED, OPTIONAL = {"name", "stability", "dependencies", "lastVerified"}, {"tags", "links"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_metadata_keep_to_the_schema_and_speak_of_what_is_there(name: str) -> None:
    """Catalogues refuse unknown keys, another stability, and a version that is none; names and pages exist."""
    metadata = yaml.safe_load((ROOT / "components" / name / "metadata.yaml").read_text())
    assert REQUIRED <= set(metadata) <= REQUIRED | OPTIONAL
    assert metadata["name"] == name
    assert metadata["stability"] in {"alpha", "beta", "stable"}
    assert "kubeflow" in metadata["dependencies"]
    assert set(metadata["dependencies"]) <= {"kubeflow", "external_services"}
    assert "Pipelines" in {each["name"] for each in metadata["dependencies"]["kubeflow"]}
    for dependency in (each for kind in metadata["dependencies"].values() for each in kind):
        assert set(dependency) == {"name", "version"}
        assert re.fullmatch(r"(==|>=|<=|~=)?\d+\.\d+\.\d+", dependency["version"])
    assert len(set(metadata.get("tags", []))) == len(metadata.get("tags", []))
    verified = metadata["lastVerified"]
    assert verified.tzinfo is not None
    assert verified <= datetime.datetime.now(datetime.UTC)
    assert (ROOT / metadata["links"]["documentation"]).is_file()
    assert list((ROOT / "tests" / name).glob("test_*.py"))
