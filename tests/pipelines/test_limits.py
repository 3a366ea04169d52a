"""What is known before anything runs: limits that fit, and the disk space that a run takes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.preflight.config import Params, contradictions, load_params
from components.shared.errors import PipelineError
from components.shared.problem import Split
from pipelines.limits import Lengths, first_prompt, lengths_by_source, limits, overlay, proposals, table
from pipelines.requirements import missing_here, short_of_disk
from tests import chat_model, tiny
from tests.presets import ROOT, preset, write_params


def _params(*, model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Params:
    values = preset()
    del values["validate_data"]["model"]
    values["train_sft"]["model"] = model or values["train_sft"]["model"]
    for section, changes in sections.items():
        values[section] |= changes
    return Params.model_validate(values)


def test_lengths_are_measured_by_source_with_the_chat_template(tmp_path: Path) -> None:
    """Solutions and examples are those of training; an example is a prompt, its solution and the end."""
    folder = chat_model.write(tmp_path)
    params = _params(model={"base": str(folder), "chat": {"system": "Add."}, "prompts": {"code": "Code: {question}"}})
    problems = [tiny.problem(1), tiny.problem(2, source="code", solution=""), tiny.problem(3, split=Split.TEST)]
    lengths = lengths_by_source(params, problems)
    user = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    encode = chat_model.tokenizer().encode
    assert lengths["code"] == Lengths([len(encode(user.format(f"Code: {problems[1].question}")))], [], [])
    (solution,) = lengths["sums"].solutions
    assert solution == len(encode(problems[0].solution))
    assert lengths["sums"].examples == [lengths["sums"].prompts[0] + solution + 1]
    assert [line.replace(" + ", "+").split()[:4] for line in table(lengths).splitlines()[1:]] == [
        ["code", "prompt", "1", str(lengths["code"].prompts[0])],
        ["sums", "prompt", "2", str(min(lengths["sums"].prompts))],
        ["sums", "solution", "1", str(solution)],
        ["sums", "both+EOS", "1", str(lengths["sums"].examples[0])],
    ]


def test_a_prompt_is_shown_as_the_model_reads_it(tmp_path: Path) -> None:
    """With the marks of its template, and nothing that a terminal would obey."""
    folder = chat_model.write(tmp_path)
    params = _params(model={"base": str(folder), "chat": {"system": "Add."}})
    problems = [tiny.problem(1, split=Split.TEST), tiny.problem(2, question="1 + 1?\x1b[2J")]
    assert first_prompt(params, problems).splitlines() == [
        f"the prompt of {problems[1].id}, as the model reads it:",
        "",
        "    <|im_start|>system",
        "    Add.<|im_end|>",
        "    <|im_start|>user",
        "    1 + 1? [2J<|im_end|>",
        "    <|im_start|>assistant",
        "",
        f"and the expected answer: {problems[1].answer}",
    ]


def _lengths(*, solutions: bool = True) -> dict[str, Lengths]:
    texts = list(range(1, 101)) if solutions else []
    return {"sums": Lengths([100, 150], texts, [151 + tokens for tokens in texts])}


@pytest.mark.parametrize(
    ("changes", "solutions", "context", "expected"),
    [
        ({}, True, 2048, (160, 112, 256, 224)),
        ({}, True, 300, (160, 112, 256, 140)),  # what the model leaves
        ({}, False, 2048, (160, None, None, 1024)),
        ({"train_sft": {"num_steps": 0}}, True, 2048, (160, 112, None, 224)),
    ],
)
def test_limits_fit_every_problem_and_the_model(changes: Any, solutions: bool, context: int, expected: Any) -> None:
    """Completions have twice the room of nearly all solutions, as far as the model has it."""
    values = proposals(_params(**changes), _lengths(solutions=solutions), context)
    keys = ("validate_data.max_prompt_tokens", "validate_data.max_solution_tokens", "train_sft.max_tokens")
    assert tuple(map(values.get, (*keys, "train_grpo.sampling.max_new_tokens"))) == expected
    assert values["evaluate.max_new_tokens"] == values["train_grpo.sampling.max_new_tokens"]
    with pytest.raises(PipelineError, match=r"reads 170 tokens, and the longest prompt .* it has 160"):
        proposals(_params(**changes), _lengths(), 170)


def test_conversations_and_thoughts_have_more_room(tmp_path: Path) -> None:
    """Who was trained to chat explains more than a textbook, and thinks at length; an engine reads both together."""
    for thinking, expected in ((None, 1024), (True, 4096)):
        model: dict[str, Any] = {"base": str(tmp_path), "chat": {}, "thinking": thinking}
        values = proposals(_params(model=model, train_grpo={"sampler": {"vllm": {}}}), _lengths(), 100_000)
        assert values["evaluate.max_new_tokens"] == expected
        assert values["train_grpo.sampler.vllm.max_tokens"] == 160 + expected


def test_a_missing_base_model_has_the_command_that_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `limits`, with its place, and in the checks before a run."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / "params/smollm2.yaml"
    (line,) = (line for line in missing_here(load_params(path)) if "model.base" in line)
    assert line.endswith("135m-instruct: no such folder; `grpo-pipeline base smollm2-135m-instruct` fetches it")
    with pytest.raises(PipelineError, match=rf"^{path}:\d+: {line}$"):
        limits(path)


def test_what_is_printed_is_a_part_of_a_params_file_that_removes_every_complaint(tmp_path: Path) -> None:
    """All limits are complained about at once; with the proposals pasted nothing is left."""
    changes: dict[str, Any] = {
        **{"validate_data": {"max_prompt_tokens": 8}, "train_sft": {"max_tokens": 513}},
        **{"train_grpo": {"sampling": {"max_new_tokens": 510}}, "evaluate": {"max_new_tokens": 511}},
    }
    model = {"base": str(chat_model.write(tmp_path / "model")), "chat": {}, "prompt": "{question}"}
    params = _params(model=model, **changes)
    complaints = missing_here(params)
    limits = ("train_grpo.sampling.max_new_tokens", "evaluate.max_new_tokens", "train_sft.max_tokens")
    assert [line.split(":")[0] for line in complaints] == [*limits, "validate_data.max_prompt_tokens"]
    assert "is 8, and 20 of the first 20 prompts have up to" in complaints[-1]
    problems = [problem for source in params.prepare_data.sources for problem in source.problems(1)]  # type: ignore[union-attr]
    text = overlay(params, proposals(params, lengths_by_source(params, problems), 512), tmp_path)
    assert "# instead of 8" in text
    write_params(tmp_path / "base.yaml", params.model_dump(mode="json"))
    (tmp_path / "own.yaml").write_text(f"extends: base.yaml\n{text}")
    fitting = load_params(tmp_path / "own.yaml")
    assert missing_here(fitting) + contradictions(fitting) == []


@pytest.mark.parametrize(
    ("sft", "engine", "needed"),
    [
        # 7.6 billion parameters: policy and reference in bf16; three checkpoints of weights, moments and the model.
        ({}, {}, "350.3 GB there (30.5 GB for models, 319.9 GB for checkpoints)"),
        ({"num_steps": 0}, {}, "335.1 GB there (15.2 GB for models, 319.9 GB for checkpoints)"),
        ({}, {"lora": {}}, "30.5 GB there (30.5 GB for models, 0 bytes for checkpoints)"),
    ],
)
def test_what_a_run_takes_and_what_is_free_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sft: dict[str, Any], engine: dict[str, Any], needed: str
) -> None:
    """With the folder that is too full; a run that fits is let through."""
    values = preset()
    values["train_sft"] |= {"model": {"base": "Qwen/Qwen2.5-7B"}, **sft}
    values["validate_data"].pop("model", None)
    for stage in ("train_sft", "train_grpo"):
        checkpoint = {"keep_last": 1, "keep_best": True}
        values[stage] |= {"engine": {"precision": "bf16", **engine}, "checkpoint": checkpoint}
    params = Params.model_validate(values)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 * 10**9))
    line = short_of_disk(params, tmp_path / "outputs") or ""
    assert line.startswith(f"{tmp_path}: 10.0 GB are free, and a run takes about {needed}; make room")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    assert short_of_disk(params, tmp_path) is None
