"""One name per stage, in every place that has one; and imports that stay where they may be."""

import datetime
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from components.preflight.config import STAGES
from components.prepare_data.config import Source
from components.shared.images import GPU
from components.train_grpo.config import AdvantageEstimator, Aggregation, KLEstimator, PolicyLoss
from components.train_grpo.rewards import BUILT_IN
from pipelines.run.stages import load_stage
from tests.pipelines.compiled import graph
from tests.presets import FILES, PAGES, ROOT


def test_stages_have_their_folders_and_can_run_in_their_order() -> None:
    """No stage is missing from the params model; what each reads is made by one before it."""
    assert {path.parent.name for path in ROOT.glob("components/*/component.py")} == {*STAGES, "preflight"}
    made: set[str] = set()
    for name in STAGES:
        stage = load_stage(name)
        assert stage.name == name
        assert set(stage.inputs.values()) <= made
        made |= {f"{name}/{output}" for output in stage.outputs}


@pytest.mark.slow
def test_what_stages_are_forked_from_has_their_imports() -> None:
    """Where one could not be imported, stages would import everything themselves."""
    code = "import pipelines.run.preloaded, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    stages = [name for name in STAGES if load_stage(name).image == GPU]
    modules = {f"components.{name}.{part}" for name in stages for part in ("__main__", "worker")}
    assert {*modules, "torch", "deepspeed"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", [*STAGES, "preflight"])
def test_metadata_keep_to_the_schema_and_speak_of_what_is_there(name: str) -> None:
    """Catalogues refuse unknown keys, another stability, and a version that is none; names and pages exist."""
    metadata = yaml.safe_load((ROOT / "components" / name / "metadata.yaml").read_text())
    required = {"name", "stability", "dependencies", "lastVerified"}
    assert required <= set(metadata) <= {*required, "tags", "links"}
    assert metadata["name"] == name
    assert metadata["stability"] in {"alpha", "beta", "stable"}
    dependencies = metadata["dependencies"]
    assert {"kubeflow"} <= set(dependencies) <= {"kubeflow", "external_services"}
    for dependency in (each for kind in dependencies.values() for each in kind):
        assert set(dependency) == {"name", "version"}
        assert re.fullmatch(r"(==|>=|<=|~=)?\d+\.\d+\.\d+", dependency["version"])
    assert metadata["lastVerified"] <= datetime.datetime.now(datetime.UTC)
    assert (ROOT / metadata["links"]["documentation"]).is_file()


def test_dvc_runs_the_default_job_of_a_clone_and_can_override_its_keys() -> None:
    """`-S train_grpo.num_steps=...` needs every section in params.yaml, as DVC knows nothing of defaults."""
    assert yaml.safe_load((ROOT / "repro.yaml").read_text()) == {"params": "params.yaml"}
    text = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert tuple(text) == STAGES
    assert "num_steps" in text["train_grpo"]


def test_nothing_is_trained_measured_or_registered_before_validation() -> None:
    """Every other task of Kubeflow's graph depends on validation."""
    tasks = graph().tasks

    def upstream(name: str) -> set[str]:
        before = set(tasks[name].get("dependentTasks", []))
        return before.union(*map(upstream, before))

    for name in tasks.keys() - {"preflight", "prepare-data", "validate-data"}:
        assert "validate-data" in upstream(name), name


def test_the_makefile_offers_the_presets_that_exist() -> None:
    """Each preset in the Makefile's help is a params file, and each params file is offered."""
    offered = re.search(r"PRESET=([a-z0-9.|-]+)\)", (ROOT / "Makefile").read_text())
    assert offered is not None
    assert set(offered[1].split("|")) == {"laptop", *(path.stem for path in FILES[1:])}


def test_actions_are_pinned_by_commit() -> None:
    """Whoever moves the tag of an action changes nothing here; the tag is a comment, which Dependabot keeps."""
    text = "".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)] == []


def test_kfp_is_only_in_components_and_pipelines() -> None:
    """A stage's logic knows nothing of the runner: only component.py files and pipelines/ import kfp."""
    importing = {
        path
        for path in ROOT.glob("components/**/*.py")
        if re.search(r"^\s*(from|import) kfp\b", path.read_text(), re.M)
    }
    assert importing == set(ROOT.glob("components/*/component.py"))


def test_help_answers_at_once() -> None:
    """The parser of all commands imports no library of weight: their modules come when they run."""
    code = "import sys; from pipelines.cli import parser; parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"torch", "transformers", "deepspeed", "kfp", "kubernetes", "pandas", "numpy", "great_expectations"}
    assert not {*heavy, "pydantic", "yaml"} & set(done.stdout.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_nowhere(page: Path) -> None:
    """To a file that exists, and to a heading that it has."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
        names = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in names, f"{target}#{anchor}"


_CHOICES = (AdvantageEstimator, KLEstimator, Aggregation, PolicyLoss)
_SOURCES = [source.model_fields["kind"].annotation for source in get_args(get_args(Source)[0])]
_LISTED: dict[str, set[str]] = {
    "how-to/objectives-and-rewards.md": {*BUILT_IN, *(str(value) for kind in _CHOICES for value in get_args(kind))},
    "how-to/models-and-data.md": {str(value) for kind in _SOURCES for value in get_args(kind)},
}
"""What a page lists by hand."""


@pytest.mark.parametrize("page", _LISTED)
def test_a_page_that_lists_values_has_all_of_them(page: str) -> None:
    """A new estimator, reward or kind of data is found in the page that people look it up in."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert sorted(value for value in _LISTED[page] if f"`{value}`" not in text and f"| {value} |" not in text) == []
