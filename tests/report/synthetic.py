"""Folders as the stages before the report leave them, made up with a seed: SFT answers bare, GRPO works it out."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from components.shared import jsonl, lineage
from components.shared.statistics import mean_interval, score

SKILL = {
    "base": {"words": 0.02, "gsm8k": 0.01},
    "sft": {"words": 0.55, "gsm8k": 0.24},
    "grpo": {"words": 0.86, "gsm8k": 0.26},
}
WORKED = {"base": 0.0, "sft": 0.15, "grpo": 0.97}
NAMES = ("Tom", "Ada", "Mia", "Ben")
THINGS = ("apples", "stamps", "marbles")
Row = dict[str, Any]


def make_run(
    folder: Path, *, skill: Mapping[str, Mapping[str, float]] = SKILL, problems: int = 200, seed: int = 7
) -> dict[str, Path]:
    """Write the six inputs of the report stage; returns their folders by name."""
    names = ("base_evaluation", "sft_evaluation", "grpo_evaluation", "sft_training", "grpo_training", "validation")
    folders = {name: folder / name for name in names}
    for path in folders.values():
        path.mkdir(parents=True)
    questions = make_questions(problems, random.Random(seed))
    for model in skill:
        records = make_records(model, questions, skill[model], random.Random(f"{seed} {model}"))
        write_evaluation(folders[f"{model}_evaluation"], records)
    write_training(folders["sft_training"], folders["grpo_training"], random.Random(seed))
    write_validation(folders["validation"], problems)
    _write_lineage(folders)
    return folders


def make_questions(problems: int, rng: random.Random) -> list[Row]:
    """Sums in words, and a few problems of a second source that has no subjects."""
    questions = []
    for index in range(problems):
        terms = [rng.randint(1, 9) for _ in range(rng.randint(3, 6))]
        source = "words" if index % 4 else "gsm8k"
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        gets = ", ".join(f"gets {term} more" for term in terms[1:])
        questions.append(
            {
                "id": f"{source}/test/{index:05d}",
                "source": source,
                "subject": thing if source == "words" else "",
                "level": len(terms) - 2 if source == "words" else None,
                "question": f"{name} has {terms[0]} {thing}, {gets}. How many {thing} has {name} now?",
                "answer": str(sum(terms)),
                "terms": terms,
            }
        )
    return questions


def make_records(model: str, questions: list[Row], skill: Mapping[str, float], rng: random.Random) -> list[Row]:
    """One greedy and two sampled answers per question."""
    records = []
    for question in questions:
        difficulty = rng.random()
        for sample in range(3):
            right = (difficulty if sample == 0 else rng.random()) < skill[question["source"]]
            records.append(_record(model, question, sample, right, rng))
    return records


def _record(model: str, question: Row, sample: int, right: bool, rng: random.Random) -> Row:
    answer = question["answer"] if right else str(int(question["answer"]) + rng.choice((-10, -1, 1, 2, 10)))
    worked = rng.random() < WORKED[model]
    lines = _working(question["terms"]) if worked else []
    response = "has has 4 has\n" * 8 if model == "base" and not right else "\n".join([*lines, f"#### {answer}"])
    unscorable = not right and rng.random() < 0.02
    return {
        **{key: question[key] for key in ("id", "source", "subject", "level", "question", "answer")},
        "sample": sample,
        "response": response,
        "extracted": answer if "####" in response else None,
        "verdict": "unscorable" if unscorable else ("right" if right else "wrong"),
        "reason": "same number" if right else "other number",
        "num_tokens": len(response),
        "finished": "####" in response,
        "worked": worked,
    }


def _working(terms: list[int]) -> list[str]:
    lines, total = [], terms[0]
    for term in terms[1:]:
        lines.append(f"{total}+{term}={total + term}")
        total += term
    return lines


def write_evaluation(folder: Path, records: list[Row]) -> None:
    """Write records with the scores that belong to them."""
    greedy = [record for record in records if record["sample"] == 0]
    sources = sorted({record["source"] for record in records})
    scores = {
        "greedy": {
            "all": _score(greedy),
            "by_source": {source: _score([r for r in greedy if r["source"] == source]) for source in sources},
            "by_subject": {source: _by(greedy, source, "subject") for source in sources},
            "by_level": {source: _by(greedy, source, "level") for source in sources},
        },
        "sampled": {
            "num_samples": 2,
            "temperature": 1.0,
            "by_source": {source: _sampled(records, source) for source in sources},
        },
        "mean_length_tokens": fmean(record["num_tokens"] for record in greedy),
        "worked_fraction": fmean(record["worked"] for record in greedy),
        "truncated_fraction": fmean(not record["finished"] for record in greedy),
        "unscorable": sum(record["verdict"] == "unscorable" for record in greedy),
    }
    jsonl.write_rows(folder / "records.jsonl", records)
    jsonl.write_json(folder / "scores.json", scores)


def _score(records: list[Row]) -> Row:
    return score(sum(record["verdict"] == "right" for record in records), len(records))


def _by(records: list[Row], source: str, key: str) -> dict[str, Row]:
    having = [record for record in records if record["source"] == source and record[key] not in ("", None)]
    return {str(group): _score([r for r in having if r[key] == group]) for group in sorted({r[key] for r in having})}


def _sampled(records: list[Row], source: str) -> Row:
    right: dict[str, list[bool]] = {}
    for record in records:
        if record["sample"] > 0 and record["source"] == source:
            right.setdefault(record["id"], []).append(record["verdict"] == "right")
    means = [fmean(outcomes) for outcomes in right.values()]
    return {
        "accuracy": fmean(means),
        "interval": list(mean_interval(means)),
        "problems": len(means),
        "samples": sum(len(outcomes) for outcomes in right.values()),
    }


def write_training(sft: Path, grpo: Path, rng: random.Random, *, steps: int = 60) -> None:
    """Write the steps of both trainings: the worked share, the length and the reward rise together."""
    jsonl.write_rows(
        sft / "steps.jsonl",
        (
            {
                "step": step,
                "loss": 0.3 + 3.2 / (1 + 0.06 * step) + rng.gauss(0, 0.04),
                "gradient_norm": 0.5 + 2 / (1 + 0.1 * step) + abs(rng.gauss(0, 0.1)),
                "learning_rate": 1e-3,
                "epoch": step / 150,
            }
            for step in range(300)
        ),
    )
    jsonl.write_rows(grpo / "steps.jsonl", (_grpo_step(step, steps, rng) for step in range(steps)))


def _grpo_step(step: int, steps: int, rng: random.Random) -> Row:
    done = step / steps
    worked = min(1.0, max(0.0, 0.2 + 0.85 * done**0.6 + rng.gauss(0, 0.04)))
    accuracy = min(1.0, max(0.0, 0.5 + 0.4 * worked + rng.gauss(0, 0.04)))
    return {
        "step": step,
        "reward": accuracy,
        "accuracy": accuracy,
        "worked_fraction": worked,
        "completion_length_tokens": 10 + 28 * worked + rng.gauss(0, 1),
        "truncated_fraction": max(0.0, rng.gauss(0.01, 0.01)),
        "kl": 0.06 * done + abs(rng.gauss(0, 0.004)),
        "entropy": 0.5 - 0.3 * done + rng.gauss(0, 0.02),
        "sampler_mismatch": 3e-7,
        "sampler_mismatch_max": 2e-6,
        "clip_high_fraction": max(0.0, rng.gauss(0.01, 0.005)),
        "clip_low_fraction": max(0.0, rng.gauss(0.005, 0.002)),
        "ratio_min": 0.8,
        "ratio_max": 1.2,
        "loss": rng.gauss(0, 0.01),
        "gradient_norm": 0.6 + abs(rng.gauss(0, 0.2)),
        "learning_rate": 2e-4,
        "groups_without_spread_fraction": min(1.0, max(0.0, 0.1 + 0.5 * done + rng.gauss(0, 0.05))),
        "unscorable_fraction": 0.0,
    }


def write_validation(folder: Path, problems: int) -> None:
    """Write the result of a data validation that passed with one warning."""
    titles = {
        "ids_unique": ("Every problem has its own id", "critical", 0),
        "answers_verifiable": ("The solution of every problem is graded right", "critical", 0),
        "no_contamination": ("No test problem is found in the training problems", "critical", 0),
        "question_length": ("Questions have between 10 and 2,000 characters", "warning", 3),
    }
    expectations = [
        {
            "name": name,
            "title": title,
            "severity": severity,
            "success": unexpected == 0,
            "checked": 4000 + problems,
            "unexpected": unexpected,
            "unexpected_percent": 100 * unexpected / (4000 + problems),
            "examples": [],
            "detail": "",
        }
        for name, (title, severity, unexpected) in titles.items()
    ]
    result = {"success": True, "rows": {"train": 4000, "test": problems}, "expectations": expectations}
    jsonl.write_json(folder / "result.json", {**result, "statistics": {}})


def made_by_grpo() -> Row:
    """The lineage of the policy that the evaluations are of."""
    grpo = _made_by(
        "train_grpo",
        {"model": _MODEL, "prompts": 16, "group_size": 8, "steps": 60, "learning_rate": 2e-4, "kl_coefficient": 0.02},
        {"problems": _PROBLEMS, "reference": _SFT},
    )
    grpo["inputs"]["reference"]["digest"] = lineage.value_digest("sft")
    return grpo


def write_bare_report(folder: Path, policy: Path) -> None:
    """Write what of a report says that a policy was evaluated and passed the gate, without figures or a page."""
    gate = {"target": ["words"], "min_gain": 0.1, "max_p_value": 0.01, "margin": 0.5, "enforce": True}
    target = {"sources": ["words"], "min_gain": 0.1, "max_p_value": 0.01, "passed": True}
    verdict = {"passed": True, "enforced": True, "target": target, "others": [], "reasons": []}
    made = _made_by("report", {"gate": gate, "num_examples": 0}, _lineages())
    model = made["inputs"]["grpo_evaluation"]["lineage"]["inputs"]["model"]
    model.update(digest=lineage.digest(policy), lineage=lineage.read(policy))
    models = {
        f"{name} model": made["inputs"][f"{name}_evaluation"]["lineage"]["inputs"]["model"]["digest"]
        for name in ("base", "sft", "grpo")
    }
    folder.mkdir(parents=True)
    lineage.write(folder, made)
    jsonl.write_json(folder / "verdict.json", verdict)
    jsonl.write_json(folder / "summary.json", {"verdict": verdict})
    jsonl.write_json(folder / "provenance.json", {"inputs": models})


def report_on(report: Path, policy: Path) -> Path:
    """Copy a report so that it is one on this policy: beside it, with its digest in the place of the made-up one."""
    folder = policy.with_name(f"{policy.name}-{report.name}-report")
    shutil.copytree(report, folder, dirs_exist_ok=True)
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(lineage.value_digest("grpo"), lineage.digest(policy)), encoding="utf-8")
    return folder


def _write_lineage(folders: Mapping[str, Path]) -> None:
    for name, made in _lineages().items():
        lineage.write(folders[name], made)


def _lineages() -> dict[str, Row]:
    """The lineage of each input of the report stage."""
    grpo = made_by_grpo()
    made = {
        "sft_training": _SFT,
        "grpo_training": grpo,
        "validation": _made_by("validate_data", {"min_rows": 100}, {"problems": _PROBLEMS}),
    }
    for name, trained in (("base", _SFT), ("sft", _SFT), ("grpo", grpo)):
        inputs = {"model": trained, "problems": _PROBLEMS}
        evaluation = _made_by("evaluate", {"num_samples": 2, "temperature": 1.0}, inputs)
        evaluation["inputs"]["model"]["digest"] = lineage.value_digest(name)
        made[f"{name}_evaluation"] = evaluation
    return made


def _made_by(stage: str, config: Row, inputs: Mapping[str, Row]) -> Row:
    return {
        "stage": stage,
        "config": config,
        "inputs": {name: {"digest": lineage.value_digest(name), "lineage": made} for name, made in inputs.items()},
        "code": lineage.value_digest("code"),
        "packages": {"torch": "2.13.0", "transformers": "5.19.0"},
    }


_MODEL = {"base": "scratch:words", "prompt": "{question}\n", "answer": "declared"}
_PROBLEMS = _made_by("prepare_data", {"num_train": 4000, "seed": 1}, {})
_SFT = _made_by(
    "train_sft",
    {"model": _MODEL, "epochs": 2, "learning_rate": 1e-3},
    {"problems": _PROBLEMS},
)
