"""Protocols: the exact words in which models are asked, where answers end, and what is refused before a model loads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.evaluate.config import EvaluateConfig
from components.evaluate.protocols import EXAMPLES_FILE, PROTOCOLS, Example, examples_for, prompt_with
from components.evaluate.questions import load_for_protocol, protocol_facts, read_questions
from components.evaluate.worker import evaluate_model
from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE
from components.shared.problem import Problem, Split, write_problems
from components.shared.tools import ToolsConfig
from tests import tiny
from tests.rollout import vllm_policies

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def gsm8k(split: Split, numbers: range) -> list[Problem]:
    """Sums in the place of GSM8K's problems."""
    return [tiny.problem(number, split=split, source="gsm8k") for number in numbers]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A folder with both splits."""
    write_problems(tmp_path, Split.TRAIN, gsm8k(Split.TRAIN, range(20)))
    write_problems(tmp_path, Split.TEST, gsm8k(Split.TEST, range(20, 25)))
    return tmp_path


def saved(folder: Path, checkpoint: Checkpoint, *, chat_template: str | None = None) -> Path:
    """A Hugging Face folder that no stage wrote."""
    checkpoint.tokenizer.chat_template = chat_template
    checkpoints.save(checkpoint, folder)
    (folder / PIPELINE_FILE).unlink()
    return folder


def _config(protocol: str, **changes: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate({"protocol": protocol, "num_samples": 0, "max_new_tokens": 12, **changes})


def test_examples_come_from_training_whatever_else_is_there(problems: Path) -> None:
    """Removing a problem changes one of eight; a file with other examples replaces all. They precede the question."""
    protocol = PROTOCOLS["gsm8k-8shot"]
    drawn = examples_for(protocol, problems)
    solved = {each.question: each.solution for each in gsm8k(Split.TRAIN, range(20))}
    assert len({*drawn}) == 8
    assert all(solved[each.question] == each.solution for each in drawn)
    others = [each for each in gsm8k(Split.TRAIN, range(20)) if each.question != drawn[0].question]
    write_problems(problems, Split.TRAIN, others)
    assert len({*drawn} & {*examples_for(protocol, problems)}) == 7
    write_problems(problems, Split.TRAIN, others[:7])
    with pytest.raises(PipelineError, match=r"train\.jsonl: has 7 problems from gsm8k, of which 8 are shown"):
        examples_for(protocol, problems)
    jsonl.write_rows(problems / EXAMPLES_FILE, [{"question": "Own?", "solution": "#### 1"}])
    own = examples_for(protocol, problems)
    assert own == [Example("Own?", "#### 1")]
    assert prompt_with(protocol, own) == "Question: Own?\nAnswer: #### 1\n\nQuestion: {question}\nAnswer:"
    shown = prompt_with(PROTOCOLS["math-4shot"], own)
    assert shown == "Problem:\nOwn?\n\nSolution:\n#### 1\n\nProblem:\n{question}\n\nSolution:"
    jsonl.write_rows(problems / EXAMPLES_FILE, [{"question": "Own?", "answer": "1"}])
    with pytest.raises(PipelineError, match=r"examples\.jsonl:1: expected an object with the strings"):
        examples_for(protocol, problems)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_chat_prompt_is_made_by_the_template(tmp_path: Path, problems: Path, system: str | None) -> None:
    """A message of a user, after one of the system if there is any, up to where the assistant speaks."""
    model = saved(tmp_path / "model", tiny.checkpoint(), chat_template=CHAT_TEMPLATE)
    settings = _config("gsm8k-chat", system_prompt=system)
    asked = load_for_protocol(model, settings, read_questions(settings, problems))
    user = "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    expected = (f"<system>{system}\n" if system else "") + f"<user>{user}\n<assistant>"
    # In tokens: this tokenizer has no way back for characters it does not know.
    assert asked.prompt_ids("1+1?") == asked.encode(expected)
    long = _config("gsm8k-chat", system_prompt="Be brief. " * 999)
    with pytest.raises(PipelineError, match="name a protocol with shorter prompts, or a model that reads more tokens"):
        load_for_protocol(model, long, read_questions(long, problems))
    refusal = "{{ raise_exception('System role not supported') }}"  # some take no system prompt
    model = saved(tmp_path / "refusing", tiny.checkpoint(), chat_template=refusal)
    with pytest.raises(PipelineError, match=r"its chat template cannot be used \(System role not supported\)"):
        load_for_protocol(model, settings, read_questions(settings, problems))


@pytest.mark.parametrize(
    ("protocol", "changes", "message"),
    [
        ("gsm8k-chat", {}, "has no chat template; protocols without chat: gsm8k-8shot, gsm8k-deepseekmath"),
        ("pipeline", {}, "has no pipeline.json, which says how it is asked; name a protocol with a prompt: gsm8k-chat"),
        ("gsm8k-deepseekmath", {"max_new_tokens": 512}, r"reads 512 tokens; a prompt of .* lower evaluate.max_new_tok"),
        ("gsm8k-python-deepseekmath", {}, r"its environment answers 768, .*: lower .*evaluate\.tools\.max_obs"),
        (
            "gsm8k-deepseekmath",
            {"tools": {"environment": "calculator", "max_observation_tokens": 13}},
            r"^evaluate\.tools\.max_observation_tokens: is 13, .* takes 14 tokens; set it to 14 or more$",
        ),
        ("math-chat", {}, r"math-chat asks problems from math or math500, and .*test\.jsonl has some from gsm8k"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, problems: Path, protocol: str, changes: dict[str, Any], message: str
) -> None:
    """The weights are not even there."""
    model = saved(tmp_path / "model", tiny.checkpoint())
    (model / "model.safetensors").write_bytes(b"")
    settings = _config(protocol, **changes)
    with pytest.raises(PipelineError, match=message):
        load_for_protocol(model, settings, read_questions(settings, problems))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "gsm8k"}, "no such protocol; accepted: pipeline, gsm8k-chat"),
        ({"protocol": "gsm8k-8shot", "system_prompt": "Hello."}, "system_prompt needs a protocol with chat: gsm8k-ch"),
        ({"split": "train"}, "problems that were trained on measure nothing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, str], message: str) -> None:
    """With what to do instead."""
    with pytest.raises(ValueError, match=message):
        EvaluateConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("protocol", "own", "expected"),
    [
        ("pipeline", None, "calculator"),
        ("gsm8k-deepseekmath", None, None),
        ("pipeline", "search", "search"),
        ("gsm8k-deepseekmath", "calculator", "calculator"),
        ("gsm8k-python-deepseekmath", "calculator", "calculator"),
    ],
)
def test_tools_are_those_of_the_protocol_unless_they_are_set(
    tmp_path: Path, problems: Path, protocol: str, own: str | None, expected: str | None
) -> None:
    """A model that was trained with tools has them by the protocol of its training alone; the facts say which."""
    checkpoint = tiny.checkpoint()
    trained = checkpoint.config.model_copy(update={"tools": ToolsConfig(environment="calculator", timeout_s=3)})
    checkpoints.save(replace(checkpoint, config=trained), tmp_path / "model")
    arguments = {"file": "texts.jsonl"} if own == "search" else {}
    tools = {"environment": own, "arguments": arguments, "max_observation_tokens": 14}
    settings = _config(protocol, tools=tools if own else None)
    questions = read_questions(settings, problems)
    asked = load_for_protocol(tmp_path / "model", settings, questions)
    described = protocol_facts(settings, asked, questions, "float32")["tools"] or {}
    assert described.get("environment") == expected
    assert described.get("call_format", "fenced") == "fenced"
    assert "timeout_s" not in described


def _evaluated(folder: Path, model: Path, problems: Path, settings: EvaluateConfig) -> list[dict[str, Any]]:
    (folder / "work").mkdir(parents=True)
    evaluate_model(settings, model=model, problems=problems, evaluation=folder, work=folder / "work")
    return [row for _, row in jsonl.read_rows(folder / "records.jsonl")]


def test_any_hugging_face_folder_is_measured_in_its_own_type(tmp_path: Path, problems: Path) -> None:
    """Nothing of a run is needed; records and scores say what was asked, and how."""
    model = saved(tmp_path / "model", tiny.checkpoint(dtype=torch.bfloat16))
    records = _evaluated(tmp_path / "one", model, problems, _config("gsm8k-8shot", limit=3, num_samples=2))
    assert len(records) == 3 * 3
    drawn = [read_questions(_config("gsm8k-8shot", limit=3, seed=seed), problems).problems for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert {record["seed"] is None for record in records if record["sample"] == 0} == {True}
    asked = load_for_protocol(model, _config("gsm8k-8shot"), read_questions(_config("gsm8k-8shot"), problems))
    assert all(record["num_prompt_tokens"] == len(asked.prompt_ids(record["question"])) for record in records)
    described = jsonl.read_json(tmp_path / "one/scores.json")["protocol"]
    expected = {"name": "gsm8k-8shot", "dtype": "bfloat16", "shots": 8, "problems": 3, "of": 5, "subset_seed": 1}
    assert described.items() >= {**expected, "answer": "marked", "stop": ["Question:"], "contaminated": None}.items()
    assert described["prompt"].endswith("Question: {question}\nAnswer:")


@pytest.mark.long(minutes=1)
def test_vllm_and_transformers_answer_alike(tmp_path: Path, problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines beside this process, one model: greedy answers are the same to the token, stopped ones too."""
    protocol = replace(PROTOCOLS["gsm8k-8shot"], num_shots=2, stop=("as", "3", "\n"))
    monkeypatch.setitem(PROTOCOLS, "gsm8k-8shot", protocol)
    model = saved(tmp_path / "model", vllm_policies.policy(1))
    engines = {"num_engines": 2, "cache_gib": 0.25, "compile": False, "start_deadline_s": 300}
    settings = {"max_new_tokens": 30, "max_batch_size": 64}
    one = _evaluated(tmp_path / "one", model, problems, _config("gsm8k-8shot", **settings))
    other = _evaluated(tmp_path / "other", model, problems, _config("gsm8k-8shot", vllm=engines, **settings))
    assert one == other
    texts = [record["response"] for record in one]
    assert len({*texts}) > 1
    assert not any(stop in text for text in texts for stop in protocol.stop)
    assert any(record["finished"] and record["num_tokens"] > 1 for record in one)
    assert jsonl.read_json(tmp_path / "other/scores.json")["protocol"]["engine"].startswith("vllm")
