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
    dependencies = metadata["dependencies"]
    assert {"kubeflow"} <= set(dependencies) <= {"kubeflow", "external_services"}
    for dependency in (each for kind in dependencies.values() for each in kind):
        assert set(dependency) == {"name", "version"}
        assert re.fullmatch(r"(==|>=|<=|~=)?\d+\.\d+\.\d+", dependency["version"])
    assert metadata["lastVerified"] <= datetime.datetime.now(datetime.UTC)
    assert (ROOT / metadata["links"]["documentation"]).is_file()
