"""The commands that talk to a cluster: submit, status, logs, stop, schedule."""

import argparse
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run.screen import Screen, Style

PARAMS = Path(__file__).parents[2] / "params.yaml"
"""What a run does if no other params file is named."""

if TYPE_CHECKING:
    from pipelines.cluster.kubeflow import Kubeflow, Settings

_RUN = "id, beginning of an id, or name"


def add_commands(commands: Any) -> None:
    """Add the commands to those of `grpo-pipeline`."""
    command = _add(commands, "submit", _submit, "start a run on a cluster", starts_runs=True)
    command.add_argument("--name", help="name of the run (default: the params file's and the time)")
    command.add_argument("--wait", action="store_true", help="show the run until it has ended")

    command = _add(commands, "status", _status, "list runs on a cluster, or the stages of one")
    command.add_argument("run", nargs="?", metavar="RUN", help=_RUN)

    command = _add(commands, "logs", _logs, "print what the stages of a run have printed")
    command.add_argument("run", metavar="RUN", help=_RUN)
    command.add_argument("--stage", metavar="STAGE", help="of this stage only, such as train_grpo or `evaluate sft`")
    command.add_argument("-f", "--follow", action="store_true", help="until the run has ended")

    command = _add(commands, "stop", _stop, "end a run and remove its training jobs")
    command.add_argument("run", metavar="RUN", help=_RUN)

    schedule = commands.add_parser("schedule", help="start runs at set times")
    actions = schedule.add_subparsers(required=True, metavar="ACTION")
    command = _add(actions, "apply", _apply, "create or update the named schedule", starts_runs=True)
    command.add_argument("name", metavar="NAME")
    command.add_argument("--cron", required=True, help='six fields, UTC: "0 0 2 * * 1" is Monday at 02:00')
    _add(actions, "list", _list, "list schedules and when they fire next")
    command = _add(actions, "remove", _remove, "remove a schedule once all of its runs have ended")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--now", action="store_true", help="end its unfinished runs, and remove them with it")


def _add(commands: Any, name: str, run: Any, summary: str, *, starts_runs: bool = False) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary)
    command.set_defaults(command=run)
    if starts_runs:
        option = command.add_argument
        option("--params", type=Path, metavar="FILE", help="params file (default: the pipeline's own values)")
        settings = "a parameter, or a key of the params file"
        option("--set", action="append", default=[], metavar="NAME=VALUE", help=settings)
        option("--pipeline", type=Path, metavar="FILE", help="compiled pipeline (default: compile it now)")
        option("--experiment", default="grpo-pipeline", help="experiment of the runs (default: %(default)s)")
        option("--service-account", metavar="NAME", help="that runs the steps (default: Kubeflow's own)")
    group = command.add_argument_group("connection", "each also from the environment; see docs/how-to/kubernetes.md")
    group.add_argument("--endpoint", metavar="URL", help="address of Kubeflow Pipelines")
    group.add_argument("--namespace", help="of a profile, where Kubeflow has several users")
    group.add_argument("--token-file", type=Path, metavar="FILE", help="file that holds a token")
    group.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates to trust, in PEM")
    return command


def _settings(options: argparse.Namespace) -> "Settings":
    from pipelines.cluster.kubeflow import settings

    names = ("endpoint", "namespace", "token_file", "ca_file")
    return settings(os.environ, **{name: getattr(options, name) for name in names})


def _connect(options: argparse.Namespace) -> "Kubeflow":
    from pipelines.cluster.kubeflow import connect

    return connect(_settings(options))


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0


def _submit(options: argparse.Namespace) -> int:
    from pipelines.cluster import runs
    from pipelines.cluster.parameters import parameters
    from pipelines.cluster.status import wait

    screen = Screen(sys.stdout, sys.stderr)
    _settings(options)  # fails before half a minute of compiling if there is no address
    with runs.package(options.pipeline, options.params or PARAMS) as compiled:
        values = parameters(compiled, options.params, options.set)
        _warn_of_images(compiled.images)
        kubeflow = _connect(options)
        name = options.name or runs.run_name(options.params.stem if options.params else "params")
        of_run = {"name": name, "experiment": options.experiment, "service_account": options.service_account}
        run = runs.submit(kubeflow, compiled, values, **of_run)
    screen.show(f"{name}  {run.run_id}")
    screen.show(kubeflow.url(run.run_id), Style.DIM)
    if not options.wait:
        return 0
    try:
        return wait(kubeflow, run.run_id, screen)
    except KeyboardInterrupt:
        screen.show(f"the run goes on; `grpo-pipeline stop {run.run_id}` ends it")
        return 130


def _warn_of_images(images: Iterable[str]) -> None:
    """Warn if only this machine can have the images of a run: its first task would not begin."""
    local = [image for image in images if image.endswith(":dev")]
    if local:
        print(
            f"note: no registry has {local[0]}; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints",
            file=sys.stderr,
        )


def _status(options: argparse.Namespace) -> int:
    from pipelines.cluster.status import of_run, of_runs

    kubeflow = _connect(options)
    return _print(of_run(kubeflow, kubeflow.find(options.run)) if options.run else of_runs(kubeflow))


def _logs(options: argparse.Namespace) -> int:
    from pipelines.cluster.logs import follow, logs

    kubeflow = _connect(options)
    run = kubeflow.find(options.run)
    try:
        if options.follow:
            return _print(follow(kubeflow, run.run_id, options.stage))
        return _print(logs(kubeflow, run, options.stage))
    except KeyboardInterrupt:
        return 130


def _stop(options: argparse.Namespace) -> int:
    from pipelines.cluster.runs import stop

    kubeflow = _connect(options)
    return _print(stop(kubeflow, kubeflow.find(options.run)))


def _apply(options: argparse.Namespace) -> int:
    from pipelines.cluster import cron, runs, schedules
    from pipelines.cluster.parameters import parameters, skipping_repetition

    cron.check(options.cron)
    _settings(options)
    with runs.package(options.pipeline, options.params or PARAMS) as compiled:
        values = skipping_repetition(parameters(compiled, options.params, options.set), options.set)
        _warn_of_images(compiled.images)
        account = options.service_account
        schedule = schedules.Schedule(options.name, options.cron, compiled, values, options.experiment, account)
        outcome, unfinished = schedules.apply(_connect(options), schedule)
    print(f"{options.name}  {outcome}: {cron.describe(options.cron)}")
    if outcome == schedules.ENABLED_AGAIN:
        print("    at once, if a time passed while it was disabled")
    for time in cron.next_times(options.cron, datetime.now(UTC)):
        print(f"    {time}")
    for run in unfinished:
        print(
            f"note: {run.display_name} ({run.run_id}) is unfinished; its schedule is disabled, and removed by the "
            "next `schedule apply` or `schedule remove`",
            file=sys.stderr,
        )
    return 0


def _list(options: argparse.Namespace) -> int:
    from pipelines.cluster.status import of_schedules

    return _print(of_schedules(_connect(options)))


def _remove(options: argparse.Namespace) -> int:
    from pipelines.cluster.schedules import remove

    return _print(remove(_connect(options), options.name, now=options.now))
