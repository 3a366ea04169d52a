"""The commands `grpo-pipeline runs list`, `show`, `watch`, `compare`, `note`, `open` and `rm`, and `gc`."""

import argparse
from typing import Any

from components.shared.errors import PipelineError

_RUN = "`latest` (the one started last), its name, or a part of that"


def add_runs_commands(commands: Any) -> Any:
    """Add `runs` to the commands of `grpo-pipeline`, and return what its own commands are added to."""
    parser = commands.add_parser("runs", help="list, show, compare and remove the runs of this machine")
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("run", metavar="RUN", nargs="?", default="latest", help=f"{_RUN} (default: %(default)s)")

    command = actions.add_parser("list", help="state, accuracies, gate, version and size of each", parents=[as_json])
    what = "only those of which name, params file, state, gate, version, note or a `#tag` has this text"
    command.add_argument("text", metavar="TEXT", nargs="?", default="", help=what)
    command.set_defaults(command=_list)
    what = "stages with their times, what was reused, keys that were set, files and unfinished work"
    command = actions.add_parser("show", help=what, parents=[run, as_json])
    command.set_defaults(command=_show)
    command = actions.add_parser("watch", help="curves and completions of a training as it goes on", parents=[run])
    command.add_argument("--plain", action="store_true", help="print a line per step, as it is done without a terminal")
    command.add_argument("--completions", action="store_true", help="print each sampled completion with its rewards")
    command.set_defaults(command=_watch)
    what = "how the params, accuracies and times of runs differ, and a curve of each in one plot"
    command = actions.add_parser("compare", help=what, parents=[as_json])
    command.add_argument("runs", metavar="RUN", nargs="+", help=_RUN)
    what = "figure of the GRPO steps that is drawn, such as kl (default: %(default)s)"
    command.add_argument("--curve", metavar="NAME", default="accuracy", help=what)
    command.set_defaults(command=_compare)
    command = actions.add_parser("note", help="replace the note and the tags of a run")
    command.add_argument("run", metavar="RUN", help=_RUN)
    command.add_argument("note", metavar="TEXT", help="the note; '' for none")
    command.add_argument("--tag", action="append", default=[], help="may be given several times")
    command.set_defaults(command=_note)
    command = actions.add_parser("open", help="open the report in a browser, or print where it is", parents=[run])
    command.set_defaults(command=_open)
    command = actions.add_parser("rm", help="remove runs; what other runs reuse stays with them")
    command.add_argument("runs", metavar="RUN", nargs="+", help=_RUN)
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.set_defaults(command=_remove)

    command = commands.add_parser(
        "gc", help="remove what no run needs any more: unfinished work, failed runs, old runs"
    )
    command.add_argument("--keep", type=int, metavar="N", help="remove all runs but the newest N (default: no run)")
    command.add_argument("--dry-run", action="store_true", help="print what would be removed")
    command.set_defaults(command=_gc)
    return actions


def _list(options: argparse.Namespace) -> int:
    from pipelines.run.listing import list_runs

    return list_runs(options)


def _show(options: argparse.Namespace) -> int:
    from pipelines.run.listing import show

    return show(options)


def _watch(options: argparse.Namespace) -> int:
    from pipelines.run.watch import watch

    return watch(options.run, plain=options.plain, completions=options.completions)


def _compare(options: argparse.Namespace) -> int:
    from pipelines.run.listing import compare

    return compare(options)


def _note(options: argparse.Namespace) -> int:
    from pipelines.run.listing import note

    return note(options)


def _open(options: argparse.Namespace) -> int:
    from pipelines.run.listing import open_report

    return open_report(options)


def _remove(options: argparse.Namespace) -> int:
    from pipelines.run.listing import remove

    return remove(options)


def _gc(options: argparse.Namespace) -> int:
    from pipelines.run.garbage import collect

    if options.keep is not None and options.keep < 1:
        raise PipelineError(f"--keep {options.keep}: the run started last always stays; accepted: 1 or more")
    collect(keep=options.keep, dry=options.dry_run)
    return 0
