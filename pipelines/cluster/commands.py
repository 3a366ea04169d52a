"""The commands that talk to a cluster: submit, status, logs, stop, schedule."""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run.screen import Screen, Style

if TYPE_CHECKING:
    from pipelines.cluster.connection import Settings
    from pipelines.cluster.runs import Cluster


def add_commands(commands: Any) -> None:
    """Add the commands to those of `grpo-pipeline`."""
    command = commands.add_parser("submit", help="start a run on a cluster")
    _add_run(command)
    command.add_argument("--name", help="name of the run (default: the params file's and the time)")
    command.add_argument("--wait", action="store_true", help="show the run until it has ended")
    command.set_defaults(command=_submit)

    command = commands.add_parser("status", help="list runs on a cluster, or the stages of one")
    command.add_argument("run", nargs="?", metavar="RUN", help="id, beginning of an id, or name")
    command.set_defaults(command=_status)
    _add_connection(command)

    command = commands.add_parser("logs", help="print what the stages of a run have printed")
    command.add_argument("run", metavar="RUN", help="id, beginning of an id, or name")
    command.add_argument("--stage", metavar="STAGE", help="of this stage only, such as train_grpo or `evaluate sft`")
    command.add_argument("-f", "--follow", action="store_true", help="until the run has ended")
    command.set_defaults(command=_logs)
    _add_connection(command)

    command = commands.add_parser("stop", help="end a run and remove its training jobs")
    command.add_argument("run", metavar="RUN", help="id, beginning of an id, or name")
    command.set_defaults(command=_stop)
    _add_connection(command)

    _add_schedule(commands.add_parser("schedule", help="start runs at set times"))


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    command = actions.add_parser("apply", help="make a schedule, or bring the one of this name to what is asked for")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--cron", required=True, help='six fields, UTC: "0 0 2 * * 1" is Monday at 02:00')
    _add_run(command)
    command.set_defaults(command=_apply)
    command = actions.add_parser("list", help="list schedules and when they fire next")
    command.set_defaults(command=_list)
    _add_connection(command)
    command = actions.add_parser("remove", help="remove a schedule once none of its runs goes on")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--now", action="store_true", help="end runs of it that go on, and remove them with it")
    command.set_defaults(command=_remove)
    _add_connection(command)


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--params", type=Path, metavar="FILE", help="params file (default: the pipeline's own values)")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter, or a key of the params file"
    )
    command.add_argument("--pipeline", type=Path, metavar="FILE", help="compiled pipeline (default: compile it now)")
    command.add_argument("--experiment", default="grpo-pipeline", help="where runs are kept (default: %(default)s)")
    command.add_argument("--service-account", metavar="NAME", help="that runs the steps (default: Kubeflow's own)")
    _add_connection(command)


def _add_connection(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("connection", "each also from the environment; see docs/how-to/kubernetes.md")
    group.add_argument("--endpoint", metavar="URL", help="address of Kubeflow Pipelines")
    group.add_argument("--namespace", help="of a profile, where Kubeflow has several users")
    group.add_argument("--token-file", type=Path, metavar="FILE", help="file that holds a token")
    group.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates to trust, in PEM")


def _settings(options: argparse.Namespace) -> "Settings":
    from pipelines.cluster.connection import settings

    return settings(
        os.environ,
        endpoint=options.endpoint,
        namespace=options.namespace,
        token_file=options.token_file,
        ca_file=options.ca_file,
    )


def _cluster(options: argparse.Namespace) -> "Cluster":
    from pipelines.cluster.connection import connect
    from pipelines.cluster.runs import Cluster

    to = _settings(options)
    client = connect(to)
    return Cluster(client, to.endpoint, to.namespace or client.get_user_namespace() or None)


def _submit(options: argparse.Namespace) -> int:
    from pipelines.cluster import runs
    from pipelines.cluster.package import package
    from pipelines.cluster.parameters import parameters
    from pipelines.cluster.wait import wait

    screen = Screen(sys.stdout, sys.stderr)
    _settings(options)  # before half a minute of compiling: is there an address at all?
    with package(options.pipeline) as compiled:
        values = parameters(compiled, options.params, options.set)
        _warn_of_images(values)
        cluster = _cluster(options)
        name = options.name or runs.run_name(options.params.stem if options.params else "params")
        run = runs.submit(
            cluster, compiled, values, name=name, experiment=options.experiment, account=options.service_account
        )
    screen.show(f"{name}  {run.run_id}")
    screen.show(cluster.url(run.run_id), Style.DIM)
    if not options.wait:
        return 0
    try:
        return wait(cluster, run.run_id, screen)
    except KeyboardInterrupt:
        screen.show(f"the run goes on; `grpo-pipeline stop {run.run_id}` ends it")
        return 130


def _warn_of_images(values: dict[str, Any]) -> None:
    """Say so where a run would start from images that only this machine can have: its first task would not begin."""
    local = [
        value for name, value in sorted(values.items()) if name.startswith("image_") and str(value).endswith(":dev")
    ]
    if local:
        print(
            f"note: no registry has {local[0]}; set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints",
            file=sys.stderr,
        )


def _status(options: argparse.Namespace) -> int:
    from pipelines.cluster.status import of_run, of_runs

    cluster = _cluster(options)
    for line in of_run(cluster, cluster.find(options.run)) if options.run else of_runs(cluster):
        print(line)
    return 0


def _logs(options: argparse.Namespace) -> int:
    from pipelines.cluster.logs import follow, logs

    cluster = _cluster(options)
    run = cluster.find(options.run)
    lines = follow(cluster, run.run_id, options.stage) if options.follow else logs(cluster, run, options.stage)
    try:
        for line in lines:
            print(line, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


def _stop(options: argparse.Namespace) -> int:
    from pipelines.cluster.runs import stop

    cluster = _cluster(options)
    run = cluster.find(options.run)
    for line in stop(cluster, run):
        print(line)
    return 0


def _apply(options: argparse.Namespace) -> int:
    from pipelines.cluster import cron, schedules
    from pipelines.cluster.cron_words import next_times, words
    from pipelines.cluster.package import package
    from pipelines.cluster.parameters import parameters, skipping_repetition

    when = cron.parse(options.cron)
    _settings(options)
    with package(options.pipeline) as compiled:
        values = skipping_repetition(parameters(compiled, options.params, options.set), options.set)
        _warn_of_images(values)
        schedule = schedules.Schedule(options.name, when, compiled, values, options.experiment, options.service_account)
        done, going = schedules.apply(_cluster(options), schedule)
    print(f"{options.name}  {done}: {words(when)}")
    if done == schedules.ENABLED_AGAIN:
        print("    at once, if a time passed while it was disabled")
    for time in next_times(when, datetime.now(UTC)):
        print(f"    {time}")
    for run in going:
        print(
            f"note: {run.display_name} ({run.run_id}) goes on; the schedule that started it is disabled, and goes with "
            "the next `schedule apply` or `schedule remove`",
            file=sys.stderr,
        )
    return 0


def _list(options: argparse.Namespace) -> int:
    from pipelines.cluster.status import of_schedules

    for line in of_schedules(_cluster(options)):
        print(line)
    return 0


def _remove(options: argparse.Namespace) -> int:
    from pipelines.cluster.schedules import remove

    for line in remove(_cluster(options), options.name, now=options.now):
        print(line)
    return 0
