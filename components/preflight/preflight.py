"""The first task of a run on a cluster: find everything that is wrong before anything is spent."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.cluster.kube import Clock, SystemClock, UnavailableError
from components.preflight.checks import REVISION, checks
from components.preflight.form import CLUSTER, Form, sections_of
from components.preflight.repetition import comparable, refuse_repetition
from components.preflight.sections import complete, contradicting, without_files, wrong_sections
from components.preflight.side_by_side import side_by_side
from components.preflight.storage import credentials, images, training_secrets
from components.preflight.summary import summary
from components.shared import config
from components.shared.errors import PipelineError, RetryableError, raise_all
from components.shared.progress import say
from components.shared.stage import exit_on_error

DEADLINE_S = 90.0
"""Time for all checks together: for a minute the cluster is asked again where it is busy."""
_PRODUCT_LABEL = "nvidia.com/gpu.product"
_NO_COMMIT = "0" * 40
"""In the place of a commit that is not known yet."""


@dataclass(frozen=True)
class Ready:
    """What a run goes on with when nothing is wrong."""

    sections: config.Params
    """Of every stage, and `cluster`."""
    summary: str
    """Markdown, for people."""

    @property
    def values(self) -> dict[str, Any]:
        """What the tasks that follow take, by the names of preflight's outputs."""
        cluster = self.sections[CLUSTER]
        product = cluster.get("gpu_type")
        selector = {**cluster["node_selector"], **({_PRODUCT_LABEL: product} if product else {})}
        return {
            **{f"{name}_config": section for name, section in self.sections.items()},
            # Text: Kubeflow reads how many accelerators a task wants from text alone.
            "evaluate_gpus": str(min(1, cluster["gpus_per_node"])),
            "evaluate_node_selector": selector,
        }


def preflight(form: Form, *, deadline_s: float = DEADLINE_S, clock: Clock | None = None) -> Ready:
    """Return the sections that the run form means, with the data's revision as a commit.

    Raises:
        PipelineError: Something is wrong; all of it is named, a line each.
        RetryableError: Nothing is known to be wrong, but the cluster or one of its webhooks does not answer.
        NothingNewError: Nothing is wrong, and the run was told to end where it is not new.
    """
    # Before all else, so that no other line repeats it.
    raise_all(credentials(form))
    sections, wrong = sections_of(form, _NO_COMMIT, training_secrets(form))
    wrong += wrong_sections(sections) + images(form) + comparable(form)
    if not wrong:
        wrong += without_files(form, sections) + contradicting(sections)
    found = side_by_side(checks(form, sections, valid=not wrong, clock=clock or SystemClock()), deadline_s)
    unanswered = [f"{name}: {answer}" for name, answer in found.items() if isinstance(answer, UnavailableError)]
    for name, answer in found.items():
        if isinstance(answer, PipelineError):
            wrong += [] if isinstance(answer, UnavailableError) else [f"{name}: {answer}"]
        elif name != REVISION:
            wrong += answer
    raise_all(wrong + unanswered if wrong else [])
    if unanswered:
        trouble = "the cluster cannot be asked now, so nothing is known to be wrong with this run; start it again later"
        raise RetryableError("\n".join([trouble, *unanswered]))
    commit = found.get(REVISION, "")
    sections = complete(sections_of(form, commit, training_secrets(form))[0])
    say("preflight", f"{len(found)} checks passed" + (f"; data at commit {commit}" if commit else ""))
    refuse_repetition(form, sections)
    return Ready(sections, summary(form, sections, {"data at commit": commit} if commit else {}))


def run(given: dict[str, Any]) -> None:
    """Do preflight as a Kubeflow task, which is given the form, and paths for what is handed on."""
    page, sections = given.pop("configuration"), [name for name in given if name.endswith("_config")]
    paths = {name: Path(given.pop(name)) for name in (*sections, "evaluate_gpus", "evaluate_node_selector")}
    with exit_on_error("preflight"):
        ready = preflight(given)
        for name, path in paths.items():
            value = ready.values[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        Path(page.path).write_text(ready.summary, encoding="utf-8")
