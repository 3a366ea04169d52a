"""Asking a model questions: turns with an environment, what is shown of them, and what is remembered."""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from components.environments.environment import Observation
from components.environments.pool import Answer, Environments
from components.policy.checkpoint import load_without_weights
from components.rollout.sampler import StopTexts
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from pipelines.chat import Model, chat
from tests import chat_model

CALL = "```calculator\n37*48\n```\n"


class _Calculator(Environments):
    """Answers each call with 1776, and ends with a turn that calls nothing; it fails where it is asked to."""

    text = "1776\nexactly"

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> Any:
        return self

    def step(self, text: str) -> "Future[Answer]":
        answered: Future[Answer] = Future()
        failure = "no answer within 30 s" if "fail" in text else None
        is_over = failure is not None or not text.endswith(("```\n", "</tool_call>"))
        answered.set_result(Answer(Observation("" if is_over else self.text, done=is_over), failure))
        return answered

    def close(self) -> None:
        pass


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """Makes a model that writes given turns, one after the other."""

    def make(turns: Sequence[str], template: str | None = None, **tools: object) -> Model:
        folder = chat_model.write(tmp_path / "model", template, max_tokens=2048)
        asked = {"prompt": "{question}\n", "answer": "declared", "tools": {"environment": "calculator", **tools}}
        if template:
            asked["chat"] = {"system": "Be exact."}
        (folder / "pipeline.json").write_text(json.dumps(asked))
        checkpoint = load_without_weights(folder)
        written = iter([checkpoint.encode(turn) for turn in turns])
        monkeypatch.setattr(Model, "generate", lambda *_: list(next(written)))
        assert checkpoint.format.tools is not None
        return Model(checkpoint, folder, 0.0, 100, _Calculator(checkpoint.format.tools))

    return make


def test_nothing_is_printed_that_a_terminal_takes_for_a_command(
    ask: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of what the model writes nor of what its environment answers, of which each line is set apart."""
    monkeypatch.setattr(_Calculator, "text", "1776\n\x1bexactly")
    model = ask([CALL, CALL, f"#### 1776{chat_model.TEXT_END}"])
    capsys.readouterr()
    model.answer("37*48?")
    assert capsys.readouterr().out == "  | 1776\n  |  exactly\n" * 2
    model._streamer().on_finalized_text("#### \x1b]0;1776\x07\n", stream_end=True)
    assert capsys.readouterr().out == "####  ]0;1776 \n\n"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([CALL] * 2, "(truncated after 2 turns, as in training)"),
        ([CALL, "and so on " * 60], "(truncated after 100 tokens; --max-new-tokens sets the limit)"),
        ([f"fail{chat_model.TEXT_END}"], "(its environment failed: no answer within 30 s)"),
    ],
)
def test_a_truncated_answer_names_the_limit(
    ask: Callable[..., Model], capsys: pytest.CaptureFixture[str], turns: list[str], message: str
) -> None:
    """A limit of training, one of the command, or the environment."""
    ask(turns, max_turns=2).answer("37*48?")
    assert capsys.readouterr().out.splitlines()[-1] == message


def test_a_conversation_remembers_calls_and_their_answers(ask: Callable[..., Model]) -> None:
    """The second prompt begins as the first one with its answer; tools are shown in both."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>'
    model = ask([f"{call}{chat_model.END}", f"#### 1776{chat_model.END}"], chat_model.CALLING)
    decode: Callable[..., str] = model.checkpoint.tokenizer.decode
    first = decode(model.prompt_ids("37*48?"))
    model.conversation.clear()
    model.answer("37*48?")
    second = decode(model.prompt_ids("And 3?"))
    assert second.startswith(first + call)
    assert second.index("1776\nexactly") < second.index("#### 1776") < second.index("And 3?")
    assert second.count("Computes an arithmetic expression exactly.") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_only_a_terminal_gets_the_question(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets the answer alone; a question without room for an answer is an error."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    folder = str(chat_model.write(tmp_path / "model", None))
    chat(folder, "registry", question="37*48?", temperature=0.0, max_new_tokens=4)
    assert ("> 37*48?\n" in capsys.readouterr().out) is is_terminal
    with pytest.raises(PipelineError, match=r"the question has [\d,]+ tokens, and the model reads 512 with"):
        chat(folder, "registry", question=900 * "37*48?", temperature=0.0, max_new_tokens=4)


def test_generation_stops_where_a_turn_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the first token with which the text is there."""
    folder = chat_model.write(tmp_path / "model", None)
    (folder / "pipeline.json").write_text(json.dumps({"prompt": "{question}\n", "answer": "declared"}))
    checkpoint = load_without_weights(folder)
    model = Model(checkpoint, folder, 0.0, 40, None)
    ids = model.generate(checkpoint.prompt_ids("37*48?"), 40)
    assert len(ids) == 40
    whole = capsys.readouterr().out
    text = checkpoint.decode(ids[9:12])
    model.rollout.turn_stop = StopTexts([text], checkpoint.decode)
    stopped = model.generate(checkpoint.prompt_ids("37*48?"), 40)
    assert stopped == ids[: len(stopped)][:12]
    assert text in checkpoint.decode(stopped)
    assert text not in checkpoint.decode(stopped[:-1])
    assert whole.startswith(capsys.readouterr().out.rstrip("\n"))
