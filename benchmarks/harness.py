"""Verdicts of EleutherAI's lm-evaluation-harness on given responses: by its own tasks, filters and metrics.

The harness is no dependency, and its MATH tasks need another antlr than DVC. `python harness.py CASES VERDICTS` works
in any environment that has it, with nothing of this project.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Family = Literal["gsm8k", "math"]
_TASKS = {
    "gsm8k": {"gsm8k": "gsm8k/gsm8k.yaml"},
    "math": {
        "minerva_math": "minerva_math/minerva_math_algebra.yaml",
        "hendrycks_math": "hendrycks_math/hendrycks_math_algebra.yaml",
    },
}
"""Tasks of the harness by family; those of MATH differ between subjects in nothing but the data."""


def verdicts(family: Family, cases: Sequence[tuple[str, str]]) -> list[dict[str, bool]]:
    """Return the verdicts on pairs of expected answer and response, by `task metric`."""
    rows: list[dict[str, bool]] = [{} for _ in cases]
    for task, yaml in _TASKS[family].items():
        for index, name, verdict in _run(task, yaml, family, cases):
            rows[index][name] = verdict
    return rows


def _run(task: str, yaml: str, family: Family, cases: Sequence[tuple[str, str]]) -> list[tuple[int, str, bool]]:
    """The case, metric and verdict of each sample of a task; nothing where the task lacks a package."""
    import datasets
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Recorded(LM):  # type: ignore[misc, unused-ignore]
        """Answers with the responses of the cases."""

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            return [cases[request.doc["case"]][1] for request in requests]

        def loglikelihood(self, requests: Sequence[Any]) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder) / "cases.jsonl", Path(folder) / f"{task}.yaml"
        data.write_text("".join(json.dumps(_document(family, *each)) + "\n" for each in enumerate(cases)))
        settings = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / yaml),
            "task": f"recorded_{task}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
            "training_split": None,
            "fewshot_split": None,
        }
        config.write_text(json.dumps(settings))  # JSON is YAML
        try:
            results = lm_eval.simple_evaluate(
                Recorded(),
                tasks=[str(config)],
                task_manager=TaskManager(include_defaults=False),
                num_fewshot=0,
                log_samples=True,
                bootstrap_iters=0,
            )
        except (ImportError, AssertionError):
            return []
    return [
        (
            sample["doc"]["case"],
            f"{task} {metric if sample['filter'] == 'none' else sample['filter']}",
            bool(sample[metric]),
        )
        for sample in results["samples"][f"recorded_{task}"]
        for metric in sample["metrics"]
    ]


def _document(family: Family, number: int, case: tuple[str, str]) -> dict[str, Any]:
    """A row of the dataset as the task expects it."""
    gold, _ = case
    if family == "gsm8k":
        return {"case": number, "question": "", "answer": f"#### {gold}"}
    return {"case": number, "problem": "", "solution": rf"\boxed{{{gold}}}", "level": "", "type": ""}


def main(cases: Path, results: Path) -> None:
    """Write the verdicts on each line of a file, `{family, gold, response}`, in their order."""
    rows = [json.loads(line) for line in cases.read_text(encoding="utf-8").splitlines()]
    families: dict[Family, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        families[row["family"]].append(index)
    for family, indices in families.items():
        graded = verdicts(family, [(rows[index]["gold"], rows[index]["response"]) for index in indices])
        for index, verdict in zip(indices, graded, strict=True):
            rows[index] = verdict
    results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
