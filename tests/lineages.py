"""Lineages of made-up stages."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from components.shared.execution import Environment, Revision, Run
from components.shared.lineage import Input, Lineage, Work, joined, value_digest

_TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def made(
    stage: str,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Lineage | None] | None = None,
    *,
    code: str = value_digest("code"),
    digests: Mapping[str, str] | None = None,
    packages: Mapping[str, str] | None = None,
    revision: Revision | None = None,
) -> Lineage:
    """The lineage of what a stage makes; inputs have the digests of their names where `digests` has no other.

    It has a run where packages or a revision are given.
    """
    behind = inputs or {}
    known = {name: value_digest(name) for name in behind} | dict(digests or {})
    sources = {name: Input(digest=known[name], made_by=each and each.made_by) for name, each in behind.items()}
    work = Work(stage=stage, config=dict(config or {}), inputs=sources, code=code)
    others = [each for each in behind.values() if each]
    if packages is None and revision is None:
        return joined(work, others)
    ran_in = environment() if packages is None else environment(packages=packages)
    return joined(work, [*others, _with_run(work, ran_in, revision or Revision(commit="c0ffee" + 34 * "0"))])


def environment(**changed: Any) -> Environment:
    """An environment that differs from others as is said."""
    values = {
        "python": "3.13.1",
        "packages": {"torch": "2.13.0"},
        "lock": None,
        "image": None,
        "system": "Linux",
        "machine": "x86_64",
        "cpu": "AMD EPYC",
        "num_cores": 2,
        "gpus": (),
        "gpu_driver": None,
        "variables": {},
    }
    return Environment.model_validate({**values, **changed})


def _with_run(work: Work, ran_in: Environment, revision: Revision) -> Lineage:
    """The lineage of a stage that read nothing, as it ran in an environment with some code."""
    key, place, state = (value_digest(each.model_dump(mode="json")) for each in (work, ran_in, revision))
    run = Run(
        of=key,
        by="somebody@somewhere",
        run_id=None,
        run_name=None,
        started=_TIME,
        finished=_TIME,
        threads=None,
        environment=place,
        revision=state,
    )
    return Lineage(
        made_by=key, stages={key: work}, runs=(run,), environments={place: ran_in}, revisions={state: revision}
    )
