"""Talking to a model and serving it, with real models and a real vLLM server."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3

from components.policy import checkpoint as checkpoints
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.chat import ChatTemplate, Message
from components.shared.errors import PipelineError
from components.shared.jsonl import write_rows
from pipelines.run.screen import printable
from pipelines.use import model_folder, problems_of, write_template
from tests import chat_model, tiny
from tests.cluster.processes import free_port
from tests.rollout.vllm_policies import QUESTIONS, policy

_COMMAND = Path(sys.executable).with_name("grpo-pipeline")
_START_S = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is asked in a prompt of its own."""
    folder = tmp_path_factory.mktemp("use") / "model"
    checkpoints.save(policy(1), folder)
    described = json.loads((folder / "pipeline.json").read_text())
    (folder / "pipeline.json").write_text(json.dumps({**described, "prompt": 'Q: "{question}"\nA:\t'}))
    return folder


def _answers(model: Path, max_new_tokens: int) -> list[str]:
    """What the model answers in evaluation, without the token that ends it."""
    checkpoint = checkpoints.load(model, dtype=torch.float32)
    sampling = Sampling(num_samples=1, temperature=0.0, max_new_tokens=max_new_tokens, seed=1)
    groups = TransformersSampler(checkpoint, 64).generate(tiny.asked(QUESTIONS), sampling)
    answers = (group[0].tokens.completion_ids for group in groups)
    return [checkpoint.decode(ids[:-1] if ids[-1] in checkpoint.end_ids else ids) for ids in answers]


@pytest.mark.slow
def test_chat_answers_as_the_evaluation_does(model: Path) -> None:
    """Lines of a pipe are questions, put in the prompt of training; answers are greedy."""
    command = [str(_COMMAND), "chat", str(model), "--max-new-tokens", "24"]
    ask = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=_START_S)
    asked = ask(command, input="\n".join(QUESTIONS)).stdout
    for answer in _answers(model, 24):
        assert printable(answer).strip() in asked
    assert asked.startswith(ask([*command, "--question", QUESTIONS[0]]).stdout.rstrip("\n"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "thinking"), [(chat_model.CHATML, None), (chat_model.THINKING, False), (chat_model.HEADERS, None)]
)
def test_a_server_renders_the_prompt_of_training(template: str, thinking: bool | None, tmp_path: Path) -> None:
    """With the message of the system and the text around the question that training had; a client may send its own."""
    folder = chat_model.write(tmp_path / "model", template)
    described = {"prompt": 'Solve "{question}"\n', "answer": "declared", "chat": {"system": 'Be "brief"'}}
    (folder / "pipeline.json").write_text(json.dumps({**described, "thinking": thinking}))
    assert write_template(folder, tmp_path / "served.jinja")
    checkpoint = checkpoints.load_without_weights(folder)
    served = ChatTemplate("served", (tmp_path / "served.jinja").read_text(), checkpoint.tokenizer.special_tokens_map)
    asked: Message = {"role": "user", "content": "1 + 1?"}
    assert served.render([asked], is_prompt=True) == checkpoint.format.prompt("1 + 1?")
    own = served.render([{"role": "system", "content": "Be kind"}, asked], is_prompt=True)
    assert own == checkpoint.format.prompt("1 + 1?").replace('Be "brief"', "Be kind")


@contextmanager
def served(model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Serve a model as people do, and yield the process."""
    command = [str(_COMMAND), "serve", str(model), f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.long(minutes=0.6)
def test_a_served_model_is_asked_as_in_training(model: Path) -> None:
    """The chat endpoint puts the message into the prompt of the model; nothing is left when the command is stopped."""
    port = free_port()
    with served(model, port) as server:
        wait_for(port, server)
        body: dict[str, Any] = {"model": str(model), "temperature": 0, "max_tokens": 24}
        for question, expected in zip(QUESTIONS, _answers(model, 24), strict=True):
            message = {"role": "user", "content": question}
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = urllib3.request("POST", url, json={**body, "messages": [message]})
            assert answer.json()["choices"][0]["message"]["content"] == expected
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
    assert not _listens(port)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    for _ in range(10 * _START_S):
        if _listens(port):
            return
        assert server.poll() is None
        time.sleep(0.1)
    raise AssertionError("no answer")


def _listens(port: int) -> bool:
    try:
        return urllib3.request("GET", f"http://127.0.0.1:{port}/health", retries=False, timeout=1).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def test_the_policy_of_a_run_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the path, the name or the time of the run, whose problems it can be asked; what is no model is refused."""
    monkeypatch.chdir(tmp_path)
    run = Path("outputs/runs/20261123T120000Z-params")
    policy_folder = run / "artifacts" / "policy"
    policy_folder.mkdir(parents=True)
    outputs = {"train_grpo": {"policy": str(policy_folder)}, "prepare_data": {"problems": str(run / "problems")}}
    started = [{"stage": stage, "event": "started", "outputs": made} for stage, made in outputs.items()]
    write_rows(run / "journal.jsonl", started)
    assert problems_of(run.name) is None
    for name, message in (
        (str(run), "has not trained a policy"),
        ("./nowhere", "./nowhere: no such folder; accepted: a folder, a run"),
        ("champion", "champion: no folder, and no version in the registry"),
    ):
        with pytest.raises(PipelineError, match=message), model_folder(name, "registry"):
            pass
    write_rows(run / "journal.jsonl", [*started, *({"stage": stage, "event": "finished"} for stage in outputs)])
    for name in (str(run), run.name, "20261123T12"):
        with model_folder(name, "registry") as folder:
            assert folder == policy_folder
        assert problems_of(name) == run / "problems"
