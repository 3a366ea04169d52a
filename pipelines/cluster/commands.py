"""The commands that talk to a cluster: publish, submit, status, logs, stop, schedule."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.environment import CA_VARIABLE, ENDPOINT_VARIABLES, NAMESPACE_VARIABLE, TOKEN_FILE_VARIABLES
from components.shared.errors import raise_all
from pipelines.cluster import logs, runs, schedules
from pipelines.cluster.kubeflow import Kubeflow
from pipelines.run.screen import Screen, Style

if TYPE_CHECKING:
    from pipelines.cluster.submission import Package

PARAMS = Path(__file__).parents[2] / "params.yaml"
"""The default params file."""
Command = Callable[[Kubeflow, argparse.Namespace], "int | Iterable[str]"]
"""Returns the exit code, or the lines to print."""
_INTERRUPTED = 130


def add_commands(commands: Any) -> None:
    """Add the commands to the parsers of `grpo-pipeline`."""
    run_help = "id or name of a run, or the beginning of either; or the name of a schedule, for its newest run"
    run: dict[str, Any] = {"metavar": "RUN", "help": run_help}
    command = _add(commands, "publish", _publish, "upload the graph, to start runs in Kubeflow's UI")
    command.add_argument(
        "--params", type=Path, metavar="FILE", default=PARAMS, help="initial values of the form in Kubeflow"
    )
    command.add_argument("--local-images", action="store_true", help="accept images that no registry has")
    group = command.add_argument_group("images", "those of the params file, or of IMAGE_REGISTRY and IMAGE_TAG; or:")
    group.add_argument("--build", action="store_true", help="build them and push them, as `make images` does")
    group.add_argument("--base", default="", metavar="IMAGE", help="with --build: Debian with Python, by its digest")
    group.add_argument("--variant", choices=["cuda", "cpu"], default="cuda", help="with --build: build of torch")
    registry = "with --build: where to push (default: $IMAGE_REGISTRY)"
    group.add_argument("--registry", default=_variable("IMAGE_REGISTRY"), metavar="PREFIX", help=registry)

    command = _add(commands, "submit", _submit, "start a run on a cluster", starts_runs=True)
    command.add_argument("--name", help="name of the run (default: name of the params file, and the time)")
    command.add_argument("--wait", action="store_true", help="show the run until it has ended")

    command = _add(commands, "status", _status, "list the runs of a cluster, or the stages of a run")
    command.add_argument("run", nargs="?", **run)

    command = _add(commands, "logs", _logs, "print what the stages of a run have printed")
    command.add_argument("run", **run)
    command.add_argument("--stage", metavar="STAGE", help="print only this stage, such as train_grpo")
    command.add_argument("-f", "--follow", action="store_true", help="follow the log until the run has ended")

    command = _add(commands, "stop", _stop, "end a run and remove its training jobs")
    command.add_argument("run", **run)

    schedule = commands.add_parser("schedule", help="start runs at set times")
    actions = schedule.add_subparsers(required=True, metavar="ACTION")
    command = _add(actions, "apply", _apply, "create or update the named schedule", starts_runs=True)
    command.add_argument("name", metavar="NAME")
    command.add_argument("--cron", required=True, help='six fields, UTC: "0 0 2 * * 1" is Monday at 02:00')
    _add(actions, "list", lambda kubeflow, _: schedules.listed(kubeflow), "list schedules and when they fire next")
    command = _add(actions, "remove", _remove, "remove a schedule that has no unfinished run")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--now", action="store_true", help="end its unfinished runs, and remove them with it")


def _add(commands: Any, name: str, run: Command, summary: str, *, starts_runs: bool = False) -> argparse.ArgumentParser:
    """Add a command that connects to Kubeflow and calls `run`, with the options that all such commands share."""

    def connect_and_run(options: argparse.Namespace) -> int:
        result = run(Kubeflow(options.endpoint, options.namespace, options.token_file, options.ca_file), options)
        try:
            for line in [] if isinstance(result, int) else result:
                print(line, flush=True)
        except KeyboardInterrupt:
            return _INTERRUPTED
        return result if isinstance(result, int) else 0

    command: argparse.ArgumentParser = commands.add_parser(name, help=summary)
    command.set_defaults(command=connect_and_run)
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    if starts_runs:
        option, settings = command.add_argument, "set a field of the form in Kubeflow, or a key of the params file"
        option("--params", help="params file (default: the pipeline's own values)", **file)
        option("--set", action="append", default=[], metavar="NAME=VALUE", help=settings)
        option("--pipeline", help="compiled pipeline (default: compile it now)", **file)
        option("--experiment", default="grpo-pipeline", help="experiment of the run (default: %(default)s)")
        option("--service-account", metavar="NAME", help="service account of the steps (default: Kubeflow's own)")
    about = "each can also come from the environment; see docs/how-to/kubernetes.md"
    option = command.add_argument_group("connection", about).add_argument
    profile = "namespace of your profile, if Kubeflow has several users"
    option("--endpoint", metavar="URL", default=_variable(*ENDPOINT_VARIABLES), help="address of Kubeflow Pipelines")
    option("--namespace", default=_variable(NAMESPACE_VARIABLE), help=profile)
    option("--token-file", default=_variable(*TOKEN_FILE_VARIABLES), help="file that holds a token", **file)
    option("--ca-file", default=_variable(CA_VARIABLE), help="certificates to trust, in PEM", **file)
    return command


def _variable(*names: str) -> str | None:
    """Return the first of these environment variables that is set and not empty."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _publish(kubeflow: Kubeflow, options: argparse.Namespace) -> Iterator[str]:
    from pipelines.cluster.submission import build, compiled, images_of_this_machine, publish, read

    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as folder:
        images = None
        if options.build:
            kubeflow.client.get_kfp_healthz()  # fails now rather than after the minutes that a build takes
            images = build(options.base, options.variant, options.registry)
        package = read(compiled(Path(folder), options.params, images))
        if not options.local_images:
            raise_all(images_of_this_machine(package.images))
        yield from publish(kubeflow, package, options.params)


def _submit(kubeflow: Kubeflow, options: argparse.Namespace) -> int:
    from pipelines.cluster.submission import start

    screen = Screen(sys.stdout, sys.stderr)
    name = options.name or f"{(options.params or PARAMS).stem}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"
    with _prepared(options) as (package, values, about):
        experiment, account = options.experiment, options.service_account
        run_id = start(kubeflow, package, values, about, name=name, experiment=experiment, account=account)
    screen.show(f"{name}  {run_id}")
    screen.show(kubeflow.url(run_id), Style.DIM)
    if not options.wait:
        return 0
    try:
        return runs.wait(kubeflow, run_id, screen)
    except KeyboardInterrupt:
        screen.show(f"the run continues; `grpo-pipeline stop {run_id}` ends it")
        return _INTERRUPTED


def _status(kubeflow: Kubeflow, options: argparse.Namespace) -> list[str]:
    return runs.show(kubeflow, kubeflow.find(options.run)) if options.run else runs.listed(kubeflow)


def _logs(kubeflow: Kubeflow, options: argparse.Namespace) -> Iterator[str]:
    run = kubeflow.find(options.run)
    return logs.logs(kubeflow, logs.poll(kubeflow, run.run_id) if options.follow else [run], options.stage)


def _stop(kubeflow: Kubeflow, options: argparse.Namespace) -> Iterator[str]:
    return runs.stop(kubeflow, kubeflow.find(options.run))


def _remove(kubeflow: Kubeflow, options: argparse.Namespace) -> Iterator[str]:
    return schedules.remove(kubeflow, options.name, now=options.now)


def _apply(kubeflow: Kubeflow, options: argparse.Namespace) -> list[str]:
    schedules.check_cron(options.cron)
    with _prepared(options, scheduled=True) as prepared:
        experiment, account = options.experiment, options.service_account
        outcome, unfinished = schedules.apply(kubeflow, options.name, options.cron, *prepared, experiment, account)
    for run in unfinished:
        state = "is unfinished; its schedule is disabled, and removed by the next `schedule apply` or `schedule remove`"
        print(f"note: {run.display_name} ({run.run_id}) {state}", file=sys.stderr)
    times = [f"    {time}" for time in schedules.next_times(options.cron, datetime.now(UTC))]
    return [f"{options.name}  {outcome}: {schedules.describe_cron(options.cron)}", *times]


@contextmanager
def _prepared(
    options: argparse.Namespace, *, scheduled: bool = False
) -> Iterator[tuple["Package", dict[str, Any], str]]:
    """Yield the pipeline to submit, a value for each parameter, and the description; make no request."""
    from pipelines.cluster.submission import compiled, description, images_of_this_machine, parameters, read

    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-") as folder:
        package = read(options.pipeline or compiled(Path(folder), options.params or PARAMS))
        values = parameters(package, options.params, options.set, scheduled=scheduled)
        for note in images_of_this_machine(package.images):  # no error, as they may have been loaded onto all nodes
            print(f"note: {note}", file=sys.stderr)
        sources = [path for path in (options.params, options.pipeline) if path] or [PARAMS]
        yield package, values, description(package, sources, values)
