"""Whether a run would make anew what is registered already, for runs that are to end then: those of a schedule."""

from components.preflight.config import Params
from components.preflight.form import CLUSTER, Form
from components.preflight.storage import is_url
from components.shared import config, lineage
from components.shared.errors import UnchangedRunError
from components.shared.progress import say
from components.shared.versioning import changes_since, newest_version

PARAMETER = "run_skip_if_unchanged"
_MADE_BY = ("prepare_data", "train_sft", "train_grpo")
"""Stages whose config decides what a policy is."""


def comparable(form: Form) -> list[str]:
    """Whether the newest version can be looked at, where that is asked for: this task does not see the volume."""
    if not form[PARAMETER] or is_url(form["registry_repository"]):
        return []
    return [f"{PARAMETER}: needs registry_repository to be a URL; a folder of the volume is not seen before the run"]


def refuse_repetition(form: Form, sections: config.Params) -> None:
    """Go on where a run of these sections is new, or nobody asked.

    UnchangedRunError where it would make the newest version anew, PipelineError where the registry does not answer.
    """
    if not form[PARAMETER]:
        return
    params = Params.model_validate({name: section for name, section in sections.items() if name != CLUSTER})
    promoted = newest_version(form["registry_repository"], params.register.name)
    if promoted is None:
        say("preflight", f"{form['registry_repository']} has no version of {params.register.name} yet")
        return
    configs = {stage: getattr(params, stage) for stage in _MADE_BY}
    found = changes_since(promoted, configs, lineage.code_digest())
    if not found:
        raise UnchangedRunError(f"nothing has changed since {promoted.tag}: code, data and config would make it anew")
    say("preflight", f"changed since {promoted.tag}: {', '.join(found)}")
