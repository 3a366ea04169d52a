from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from components.environments.pool import Environments
from components.evaluate.config import EvaluateConfig
from components.evaluate.evaluate import MODEL_STAGE
from components.evaluate.scores import scores
from components.evaluate.worker import Evaluator, evaluate
from components.grading.verifier import Verifier
from components.policy.checkpoint import load, save
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Sampling, Turn
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, write_problems
from components.shared.stage import run
from components.shared.tools import ToolsConfig
from tests import tiny

PROBLEMS = [tiny.problem(number, split=Split.TEST) for number in (9, 12, 2, 7, 123)]


def _evaluate(folder: Path, *, reference_seed: int = 2, **changes: Any) -> Path:
    """Evaluate untrained tiny models, base and policy alike; return the folder of the policy's evaluation."""
    models = {name: folder / name for name in ("base_model", "reference", "policy")}
    data, evaluation = folder / "problems", folder / "evaluation"
    for path in (*models.values(), data, evaluation):
        path.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        save(tiny.checkpoint(seed=reference_seed if name == "reference" else 1), model)
    write_problems(data, Split.TEST, PROBLEMS)
    settings = {"seed": 1, "num_samples": 2, "temperature": 1.0, "max_new_tokens": 6, "max_batch_size": 4}
    config = EvaluateConfig.model_validate(settings | changes)
    metrics = evaluate(config, **models, problems=data, evaluation=evaluation, work=folder / "work")
    scores = jsonl.read_json(evaluation / "grpo" / "scores.json")
    assert metrics["grpo_accuracy_sums"] == scores["greedy"]["all"]["accuracy"]
    assert scores["protocol"]["records_digest"] == lineage.digest(evaluation / "grpo" / "records.jsonl")
    return evaluation / "grpo"


def _records(evaluation: Path) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_rows(evaluation / "records.jsonl")]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evaluation of the policy, with two samples."""
    return _evaluate(tmp_path_factory.mktemp("evaluated"))


def test_there_is_a_record_for_every_problem_and_sample(evaluated: Path) -> None:
    """In the order of the problems, the greedy answer first, regardless of the order they were answered in."""
    rows = _records(evaluated)
    expected = [(problem.id, sample, problem.question) for problem in PROBLEMS for sample in range(1 + 2)]
    assert [(row["id"], row["sample"], row["question"]) for row in rows] == expected
    assert all(row["num_tokens"] <= 6 for row in rows)
    base, sft = evaluated.parent / "base", evaluated.parent / "sft"
    assert lineage.digest(base) == lineage.digest(evaluated) != lineage.digest(sft), "as if each were alone"


def test_answers_that_do_not_fit_into_memory_are_an_error_of_one_line(tmp_path: Path) -> None:
    """It says how much was asked for, and which keys lower it."""
    with pytest.raises(PipelineError, match=r"^not enough memory for answers to 4 problems at once: .* GiB") as error:
        _evaluate(tmp_path, max_new_tokens=10**12)
    assert "lower evaluate.max_batch_size (it is 4), or lower evaluate.max_new_tokens" in str(error.value)


def _die_after(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> list[int]:
    """Let the sampler die once, after some calls; return the list to which each call adds its number of problems."""
    calls, generate = list[int](), TransformersSampler.generate

    def dies(sampler: TransformersSampler, problems: Sequence[Problem], sampling: Sampling) -> Any:
        if len(calls) == num_calls:
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(len(problems))
        return generate(sampler, problems, sampling)

    monkeypatch.setattr(TransformersSampler, "generate", dies)
    return calls


def test_killed_evaluation_goes_on(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered is not answered again, and a finished model is not loaded; half a batch counts as none."""
    calls = _die_after(monkeypatch, 7)  # in the second model
    with pytest.raises(KeyboardInterrupt):
        _evaluate(tmp_path)
    for batches in (tmp_path / "work").glob("*/batches"):
        (batches / ".00001.jsonl.partial").write_text('{"id": ')
    _evaluate(tmp_path)
    assert lineage.digest(tmp_path / "evaluation") == lineage.digest(evaluated.parent)
    model = [4, 1, 2, 2, 1, len(PROBLEMS)]  # greedy, sampled, and the probes
    assert calls == [*model, 4, 0, *model[1:], *model]


def test_a_reference_that_is_the_base_model_is_not_asked_again(tmp_path: Path) -> None:
    """As without fine-tuning: its evaluation is a copy, whatever the lineages of the two say."""
    for name in ("base_model", "reference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / lineage.FILE_NAME).write_text(f'"{name}"')
    evaluation = _evaluate(tmp_path, reference_seed=1).parent
    assert lineage.digest(evaluation / "base") == lineage.digest(evaluation / "sft")
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"base", "grpo"}


@pytest.mark.parametrize("policy", [AnswerPolicy.MARKED, AnswerPolicy.BOXED])
def test_each_completion_is_graded_against_its_own_problem(tmp_path: Path, policy: AnswerPolicy) -> None:
    """By the policy of the model's prompt; one that was truncated is wrong."""
    texts = ("so\n#### {}", r"\boxed{{{}}}", "#### {}", r"so \boxed{{{}1}} or #### {}1")

    def generate(problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        tokens = TokenSequence((1,), (2,))
        return [
            [
                Completion(tokens, (-1.0,), text.format(*[problem.answer] * 2), finished=number != 2)
                for number, text in enumerate(texts[: sampling.num_samples])
            ]
            for problem in problems
        ]

    config = EvaluateConfig(seed=1, num_samples=4, temperature=1.0, max_new_tokens=6, max_batch_size=8)
    with Verifier() as verify:
        records = Evaluator("base", config, generate, verify, policy)(PROBLEMS, tmp_path)
    is_marked = policy is AnswerPolicy.MARKED
    for problem in PROBLEMS:
        own = [record for record in records if record["id"] == problem.id]
        assert [record["verdict"] == "right" for record in own] == [is_marked, is_marked, not is_marked, False, False]
        assert own[3]["reason"] == "truncated at the length limit"
        assert own[1]["worked"] is is_marked
        # In the other form an answer counts flexibly, also where the length limit cut off what follows it.
        assert [record["flexible"]["verdict"] == "right" for record in own] == [True, True, True, True, False]


def _trajectory(problem: Problem, kind: str) -> Completion:
    """An answer in turns: right after two calls, bare, cut off after a call, or with an environment that fails."""
    call, end = Turn(1, "1+1", "2"), Turn(3, f"#### {problem.answer}")
    turns = {"right": (call, call, end), "bare": (end,), "cut": (call, Turn(2, "3+")), "failed": (call, end)}[kind]
    text = "".join(turn.text + turn.observation + "\n" for turn in turns)
    tokens = TokenSequence((1,), (2, 3, 4, 5, 6), ((1, 2), (3, 4)))
    failure = "no answer within 10 s" if kind == "failed" else None
    return Completion(tokens, (-1.0,) * 3, text, finished=kind in {"right", "bare"}, turns=turns, failure=failure)


def test_answers_in_turns_are_graded_by_the_last_and_recorded_with_all(tmp_path: Path) -> None:
    """Work is looked for in all turns; a failed environment is counted, and right by no reading."""
    environments = Mock(Environments)
    kinds = ("right", "bare", "cut", "failed")

    def generate(problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        assert sampling.environments is environments
        return [[_trajectory(problem, kinds[PROBLEMS.index(problem)])] for problem in problems]

    config = EvaluateConfig(seed=1, num_samples=0, max_new_tokens=6, max_batch_size=8)
    with Verifier() as verify:
        evaluator = Evaluator("grpo", config, generate, verify, AnswerPolicy.MARKED, environments)
        records = evaluator(PROBLEMS[:4], tmp_path)
    assert [row["flexible"]["verdict"] for row in records] == ["right", "right", "wrong", "unscorable"]
    told = ("verdict", "reason", "worked", "finished", "failure")
    assert [tuple(row[key] for key in told) for row in records] == [
        ("right", "same text", True, True, None),
        ("right", "same text", False, True, None),
        ("wrong", "truncated at the length limit", False, False, None),
        ("unscorable", "environment", True, False, "no answer within 10 s"),
    ]
    assert [turn["observation"] for turn in records[0]["turns"]] == ["2", "2", ""]
    assert records[0]["response"] == records[0]["turns"][-1]["text"] == f"#### {PROBLEMS[0].answer}"
    assert {(row["num_tokens"], row["num_environment_tokens"]) for row in records} == {(3, 2)}
    summary = scores(records, num_samples=0, temperature=1.0)
    assert [summary[key]["all"]["count"] for key in ("truncated", "unanswered", "unscorable")] == [1, 0, 1]
    assert summary["truncated_fraction"] == 0.25
    tools = summary["tools"]
    assert (tools["with_call"]["all"]["count"], tools["failed"]["by_source"]["sums"]["count"]) == (3, 1)
    assert tools["calls_per_answer"] == {"all": 1.0, "by_source": {"sums": 1.0}}
    assert tools["turns_per_answer"]["all"] == 2.0
    assert tools["environment_tokens_per_answer"]["all"] == 2.0


@pytest.mark.parametrize("is_own", [False, True])
def test_changed_documents_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool) -> None:
    """What was answered with the old ones is answered again, whether the config or the model names them."""
    documents, calls = tmp_path / "documents.jsonl", _die_after(monkeypatch, 1)
    search = {"environment": "search", "arguments": {"file": str(documents)}}
    tools = ToolsConfig.model_validate({**search, "num_workers": 1, "max_observation_tokens": 16})
    model = tiny.checkpoint()
    own = model.config.model_copy(update={"tools": tools if is_own else None})
    save(replace(model, config=own), tmp_path / "model")
    (tmp_path / "problems").mkdir()
    write_problems(tmp_path / "problems", Split.TEST, PROBLEMS)
    config = EvaluateConfig(tools=None if is_own else tools, num_samples=0, max_new_tokens=6, max_batch_size=4)
    folders = {name: tmp_path / name for name in ("model", "problems", "evaluation")}
    for text in ("apples", "pears"):
        documents.write_text(f'{{"title": "Fruit", "text": "{text}"}}\n')
        with suppress(KeyboardInterrupt):
            run(MODEL_STAGE, config, folders, work_root=tmp_path / "work")
    assert calls == [4, 0, 4, 1, len(PROBLEMS)]
    made_by = lineage.read(tmp_path / "evaluation")
    assert made_by
    assert made_by.work.materials[str(documents)].sha256 == lineage.file_digest(documents)


def test_probes_hold_the_log_probabilities_of_greedy_answers(evaluated: Path) -> None:
    """Those that the model itself computes for the tokens of its greedy answers, by which a server is checked."""
    made = jsonl.read_json(evaluated / "probes.json")
    assert made["dtype"] == "float32"
    greedy = {row["id"]: row["response"] for row in _records(evaluated) if row["sample"] == 0}
    assert sorted(probe["id"] for probe in made["probes"]) == sorted(greedy)
    checkpoint = load(evaluated.parents[1] / "policy", dtype=torch.float32)
    questions = {problem.id: problem.question for problem in PROBLEMS}
    for probe in made["probes"]:
        tokens = TokenSequence(tuple(probe["prompt_ids"]), tuple(probe["completion_ids"]))
        assert tokens.prompt_ids == checkpoint.prompt_ids(questions[probe["id"]])
        assert checkpoint.decode(tokens.completion_ids) == greedy[probe["id"]]
        model, batches = LogprobModel(checkpoint.model, temperature=1.0), tiny.batches([tokens], 1000)
        logprobs_M = completion_logprobs(model, batches, len(tokens.completion_ids))
        assert probe["logprobs"] == pytest.approx(logprobs_M.tolist(), abs=1e-5)
