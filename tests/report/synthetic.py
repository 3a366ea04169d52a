"""Made-up outputs of the stages before the report, from a seed: SFT answers bare, GRPO shows its work."""

import random
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from components.evaluate.scores import scores
from components.prepare_data.word_problems import WordProblems
from components.shared import jsonl, lineage
from components.shared.lineage import Lineage
from components.shared.problem import Problem
from tests.lineages import made

SKILL = {
    "base": {"words": 0.02, "gsm8k": 0.01},
    "sft": {"words": 0.55, "gsm8k": 0.24},
    "grpo": {"words": 0.86, "gsm8k": 0.26},
}
_TOKENIZER = {"tokenizer.json": b"{}", "pipeline.json": b'{"prompt": "{question}", "answer": "declared"}'}
ARTIFACTS: dict[str, dict[str, bytes]] = {
    "reference": {**_TOKENIZER, "model.safetensors": b"fine-tuned" * 1000},
    "base_model": {**_TOKENIZER, "model.safetensors": b"untrained" * 1000},
    "problems": {"train.jsonl": b'{"id": "train/0"}\n', "test.jsonl": b'{"id": "test/0"}\n', "manifest.json": b"{}"},
    "evaluation": {f"{model}/{name}": model.encode() for model in SKILL for name in ("records.jsonl", "scores.json")},
    "grpo_training": {"curves.csv": b"step,reward\n1,0.5\n", "completions.jsonl": b"{}\n"},
    "sft_training": {"curves.csv": b"step,loss\n1,0.5\n"},
}
"""What is registered with a policy, but for its lineage: files by their paths in each folder."""
WORKED = {"base": 0.0, "sft": 0.15, "grpo": 0.97}
TOOLS = {"environment": "calculator", "arguments": {}, "call_format": "fenced", "max_turns": 8}
Row = dict[str, Any]


def make_run(
    folder: Path,
    *,
    skill: Mapping[str, Mapping[str, float]] = SKILL,
    problems: int = 200,
    seed: int = 7,
    tools: bool = False,
) -> dict[str, Path]:
    """Write the inputs of the report stage; returns their folders by name. With `tools` models use a calculator."""
    sizes = {"num_train": 0, "num_test": problems, "min_operands": 3, "max_operands": 6}
    config = {"kind": "word_problems", "worked_fraction": 1, "families": ["total", "shared", "leftovers"], **sizes}
    generated = WordProblems.model_validate(config).problems(seed)
    questions = [_moved(problem, "words" if index % 4 else "gsm8k") for index, problem in enumerate(generated)]
    lineages = _lineages()
    folders = {name: folder / name for name in lineages}
    for name, made_by in lineages.items():
        folders[name].mkdir(parents=True)
        lineage.write(folders[name], made_by)
    for model in skill:
        evaluation, rng = folders["evaluation"] / model, random.Random(f"{seed} {model}")
        evaluation.mkdir()
        records = [_record(model, each, sample, skill[model], rng) for each in questions for sample in range(3)]
        if tools:
            records = [_in_turns(record) for record in records]
        jsonl.write_rows(evaluation / "records.jsonl", records)
        protocol = {"protocol": {"name": "pipeline", "split": "test", "tools": TOOLS if tools else None}}
        jsonl.write_json(evaluation / "scores.json", scores(records, num_samples=2, temperature=1.0) | protocol)
    rng = random.Random(seed)
    losses = [{"step": step, "loss": 0.3 + 3.2 / (1 + 0.06 * step)} for step in range(300)]
    jsonl.write_rows(folders["sft_training"] / "steps.jsonl", losses)
    steps = [_grpo_step(step, rng) for step in range(60)]
    if tools:
        steps = [{**row, **_tool_columns(row)} for row in steps]
    jsonl.write_rows(folders["grpo_training"] / "steps.jsonl", steps)
    jsonl.write_json(folders["validation"] / "result.json", _validation(problems))
    return folders


def _in_turns(record: Row) -> Row:
    """The record with a call of the calculator for each step of a worked answer; a few with a failed environment."""
    *steps, last = record["response"].splitlines() if record["worked"] else [record["response"]]
    calls = [(step.partition("=")[0], step.partition("=")[2]) for step in steps]
    turns = [
        {"text": f"```calculator\n{call}\n```\n", "observation": f"```output\n{result}\n```\n", "rewards": {}}
        for call, result in calls
    ]
    failed = record["verdict"] == "unscorable" and bool(turns)
    return {
        **record,
        "response": last,
        "finished": record["finished"] and not failed,
        "turns": [*turns, {"text": last, "observation": "", "rewards": {}}],
        "num_environment_tokens": 6 * len(turns),
        "failure": "no answer within 10 s" if failed else None,
    }


def _tool_columns(row: Row) -> Row:
    used = row["worked_fraction"]
    counts = {"turns": 1 + 3 * used, "tool_calls": 3 * used, "environment_tokens": 18 * used}
    return {**counts, "tool_use_fraction": used, "environment_failures": int(row["step"] % 20 == 7)}


def _moved(problem: Problem, source: str) -> Problem:
    """The problem as one of another source; those of gsm8k have no subject and no level."""
    changes: Row = {"id": f"{source}/{problem.id.partition('/')[2]}", "source": source}
    return problem.model_copy(update=changes if source == "words" else {**changes, "subject": "", "level": None})


def _record(model: str, question: Problem, sample: int, skill: Mapping[str, float], rng: random.Random) -> Row:
    """One of the greedy (sample 0) and sampled answers to a question."""
    right = rng.random() < skill[question.source]
    answer = question.answer if right else str(int(question.answer) + rng.choice((-10, -1, 1, 2, 10)))
    worked = rng.random() < WORKED[model]
    steps = question.solution.splitlines()[:-1] if worked else []
    response = "has has 4 has\n" * 8 if model == "base" and not right else "\n".join([*steps, f"#### {answer}"])
    unscorable = not right and rng.random() < 0.02
    verdict = "unscorable" if unscorable else ("right" if right else "wrong")
    extracted = answer if "####" in response else None
    return {
        **question.model_dump(mode="json", exclude={"split", "solution"}),
        "sample": sample,
        "response": response,
        "extracted": extracted,
        "verdict": verdict,
        "flexible": {"extracted": extracted or "4", "verdict": verdict},
        "num_steps": question.num_steps,
        "reason": "same number" if right else "time" if unscorable else "different number",
        "num_tokens": len(response),
        "finished": "####" in response,
        "worked": worked,
    }


def _grpo_step(step: int, rng: random.Random) -> Row:
    """The worked share, the length and the reward rise together."""
    worked = 0.2 + 0.012 * step + rng.uniform(0, 0.04)
    accuracy = 0.5 + 0.4 * worked + rng.uniform(0, 0.04)
    clipped = dict.fromkeys(("clip_high_fraction", "clip_low_fraction", "truncated_fraction"), 0.01)
    return {
        "step": step,
        "reward": accuracy,
        "accuracy": accuracy,
        "worked_fraction": worked,
        "completion_length_tokens": 10 + 28 * worked,
        "kl": 0.001 * step,
        "entropy": 0.5 - 0.005 * step,
        "sampler_mismatch": 3e-7,
        "sampler_mismatch_max": 2e-6,
        "gradient_norm": 0.6,
        "groups_without_spread_fraction": 0.1 + 0.008 * step,
        "unscorable_fraction": 0.0,
        **clipped,
    }


def _validation(problems: int) -> Row:
    """The result of a data validation that passed with one warning."""
    missed = {"title": "Lengths", "severity": "warning", "success": False, "unexpected": 3, "checked": 4000 + problems}
    expectations = [{**missed, "title": "Own ids", "severity": "critical", "success": True, "unexpected": 0}, missed]
    return {"success": True, "rows": {"train": 4000, "test": problems}, "expectations": expectations}


def made_by_grpo(reference: str | None = None) -> Lineage:
    """The lineage of the evaluated policy, which was trained from the model with this digest, or the usual one."""
    config = {"model": _MODEL, "prompts": 16, "group_size": 8, "steps": 60, "kl_coefficient": 0.02}
    inputs = {"problems": _PROBLEMS, "reference": _SFT}
    digests = {"reference": reference or artifact_digest("reference")}
    return made("train_grpo", config, inputs, digests=digests, packages=_PACKAGES)


def report_lineage(policy: Path, config: Mapping[str, Any], **digests: str) -> Lineage:
    """The lineage of a report on a policy; `digests` has those of evaluated models that are not the usual ones."""
    inputs = _lineages(lineage.read(policy), {"policy": lineage.digest(policy), **digests})
    return made("report", config, inputs, digests=_reported())


def report_on(report: Path, policy: Path) -> Path:
    """Copy a report beside a policy, with the policy's digest in place of the made-up one."""
    folder = policy.with_name(f"{policy.name}-{report.name}-report")
    shutil.copytree(report, folder, dirs_exist_ok=True)
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(lineage.value_digest("grpo"), lineage.digest(policy)), encoding="utf-8")
    made_by = lineage.parse(jsonl.read_json(report / lineage.FILE_NAME), name="report")
    lineage.write(folder, report_lineage(policy, made_by.work.config))
    return folder


def write_artifacts(policy: Path) -> dict[str, Path]:
    """Write what is registered with a policy beside it, as `report_on` says; returns the folders by their names."""
    made_by = _lineages(lineage.read(policy), {"policy": lineage.digest(policy)})
    made_by |= {"reference": _SFT, "base_model": _SFT, "problems": _PROBLEMS}
    folders = {name: policy.with_name(f"{policy.name}-{name}") for name in ARTIFACTS}
    for name, folder in folders.items():
        for path, content in ARTIFACTS[name].items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        lineage.write(folder, made_by[name])
    return folders


def artifact_digest(name: str) -> str:
    """The digest of one of ARTIFACTS."""
    return lineage.folder_digest({path: sha256(content).hexdigest() for path, content in ARTIFACTS[name].items()})


def _reported() -> dict[str, str]:
    """The digests of the inputs of a report."""
    return {name: artifact_digest(name) for name in ("evaluation", "grpo_training", "sft_training")}


def _lineages(policy: Lineage | None = None, digests: Mapping[str, str] | None = None) -> dict[str, Lineage]:
    """The lineage of each input of the report stage, with digests of evaluated models."""
    policy = policy or made_by_grpo()
    models = {"base_model": _SFT, "reference": _SFT, "policy": policy}
    usual = {name: artifact_digest(name) for name in ("base_model", "reference", "problems")}
    usual["policy"] = lineage.value_digest("grpo")
    inputs = {**models, "problems": _PROBLEMS}
    config = {"num_samples": 2, "temperature": 1.0}
    return {
        "evaluation": made("evaluate", config, inputs, digests={**usual, **(digests or {})}, packages=_PACKAGES),
        "sft_training": _SFT,
        "grpo_training": policy,
        "validation": made("validate_data", {"min_rows": 100}, {"problems": _PROBLEMS}, packages=_PACKAGES),
    }


_MODEL = {"base": "scratch:words", "prompt": "{question}\n", "answer": "declared"}
_PACKAGES = {"torch": "2.13.0", "transformers": "5.19.0"}
_PROBLEMS = made("prepare_data", {"num_train": 4000, "seed": 1}, packages=_PACKAGES)
_SFT_CONFIG = {"model": _MODEL, "epochs": 2, "learning_rate": 1e-3}
_SFT = made("train_sft", _SFT_CONFIG, {"problems": _PROBLEMS}, packages=_PACKAGES)
