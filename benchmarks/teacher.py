"""The policy of a run teaches the run's fine-tuned reference, beside GRPO from the same reference.

    python benchmarks/teacher.py outputs/latest --sizes 1x2 2x4 16x8 --seeds 1 2 3

RUN is a finished `make run`. A size is prompts x completions of a step. For each size and seed it prints the step after
which the validation accuracy is first 90 % or more, by GRPO with the run's reward and by the teacher alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ENOUGH = 0.9


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["1x2", "2x4", "16x8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[3e-4])
    options = parser.parse_args()
    for size in options.sizes:
        for rate in options.learning_rates:
            for seed in options.seeds:
                for by in ("GRPO", "teacher"):
                    accuracies = train(options.run, by, size, rate, seed, options.steps)
                    first = next((step for step, each in enumerate(accuracies) if each >= ENOUGH), None)
                    shown = " ".join(f"{each:.0%}" for each in accuracies)
                    print(f"{size} {rate:g} seed {seed} {by}: step {first}: {shown}", flush=True)


def train(run: Path, by: str, size: str, rate: float, seed: int, steps: int) -> list[float]:
    """Return the validation accuracy before the first step and after each."""
    artifacts = run.resolve() / "artifacts"
    config: dict[str, Any] = yaml.safe_load((run / "params.yaml").read_text(encoding="utf-8"))["train_grpo"]
    prompts, group = map(int, size.split("x"))
    config |= {"prompts_per_step": prompts, "group_size": group, "num_steps": steps, "seed": seed}
    config |= {"learning_rate": rate, "warmup_steps": 1, "final_learning_rate_fraction": 1.0}
    config["validation"] |= {"every_steps": 1, "patience": None}
    config["checkpoint"] |= {"keep_in_registry": 0}
    config["reward"]["max_steps_without_signal"] = 0
    if by == "teacher":
        config["teacher"] = {"base": str(artifacts / "train_grpo/policy")}
        config["reward"]["weights"] = {"accuracy": 0.0}
        config["loss"]["kl"]["coefficient"] = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "params.yaml").write_text(yaml.safe_dump({"train_grpo": config}), encoding="utf-8")
        folders = {
            "problems": artifacts / "prepare_data/problems",
            "reference": artifacts / "train_sft/reference",
            **{name: folder / name for name in ("policy", "training", "timings")},
        }
        arguments = [word for name, path in folders.items() for word in (f"--{name}", str(path))]
        command = [sys.executable, "-m", "components.train_grpo", "--params", str(folder / "params.yaml"), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (folder / "training/validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["accuracy"] for line in lines]


if __name__ == "__main__":
    main()
