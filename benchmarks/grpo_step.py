"""One whole GRPO optimizer step, sampling included: TRL's GRPOTrainer and this project's, in turns.

`python benchmarks/grpo_step.py` measures the three rows of the README on this machine's processor. Both trainers are
given the same model, prompts, completion lengths, rewards and settings (case.py). Each lives in a process of its own,
of which only one works at a time (side.py). limit.py says how the arithmetic limit is counted.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from case import MODELS, Row, save_model, write_case
from environments import python_of
from limit import forward_flops, step_operations, update_operations
from results import FOLDER, Progress, Result, machine, record, versions
from side import Reply, Side, take_turns

from components.policy.flops import measure_matmul_flops

_HERE = Path(__file__).parent
_ROWS = ("4x8:117/64", "2x16:464/64", "4x8:117/16-256")
_MAX_IDLE = 0.05
"""Share of a core that a waiting trainer may use: it would be taken from the one that is measured."""
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Has glibc keep what is freed; else every large tensor is new pages, which can cost as much as its arithmetic."""
_WARM_UP = 2
"""Steps of each trainer that are not measured: it takes two for the allocator to have what a step needs."""
_NAMES = {"trl": "TRL, all in one pass", "trl_tuned": "TRL, tuned", "own": "this project"}


def main() -> None:
    """Measure the rows asked for, print each, and record it as soon as it is measured."""
    options = _options()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pythons = _pythons(options)
    on = machine(torch.get_num_threads(), torch.cuda.get_device_name() if options.device == "cuda" else None)
    installed = versions(Path(sys.executable), "torch", "transformers")
    installed |= versions(pythons["trl"], "trl") if "trl" in pythons else {}
    settings = {key: getattr(options, key) for key in ("trl_batch_size", "micro_batch_tokens", "rounds")}
    print(f"{on['gpu'] or on['processor']}, {on['threads']} threads, torch {torch.__version__}")
    progress = Progress(len(options.rows) * len(pythons) * (_WARM_UP + options.rounds))
    for row in options.rows:
        print(f"\n{row}: starting {'; '.join(_NAMES[name] for name in pythons)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            figures = _measure(options, pythons, row, Path(folder), progress)
        print("\n".join(_lines(row, figures)))
        identity = {"row": str(row), "model": Path(options.model).name, "trainers": list(pythons)}
        if options.device == "cpu" and options.dtype != "float32":
            identity["dtype"] = options.dtype
        path = record(options.out, "grpo_step", on, identity, {"versions": installed, "settings": settings, **figures})
        print(f"recorded in {path}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=_ROWS, help="PROMPTSxGROUP:PROMPT/COMPLETION tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: bfloat16 on cuda, else float32)")
    sizes = f"{', '.join(MODELS)} (a shape, with random weights), or the folder of a model (default: %(default)s)"
    parser.add_argument("--model", default="13m", help=sizes)
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each trainer")
    parser.add_argument("--only", choices=("trl", "own"), help="measure one trainer alone")
    parser.add_argument("--trl-python", type=Path, help="the Python of an environment with TRL; needed on cuda")
    parser.add_argument("--trl-batch-size", type=int, default=4, help="completions per forward pass of TRL, tuned")
    parser.add_argument("--micro-batch-tokens", type=int, default=3072, help="tokens per forward pass of our update")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    if options.model not in MODELS and not Path(options.model, "config.json").is_file():
        parser.error(f"--model {options.model}: neither one of {', '.join(MODELS)} nor the folder of a model")
    try:
        options.rows = [Row.parse(text) for text in options.rows]
    except ValueError as error:
        parser.error(str(error))
    if any(row.num_prompts * row.group_size % options.trl_batch_size for row in options.rows):
        parser.error(f"--trl-batch-size {options.trl_batch_size} must divide the completions of every row")
    return options


def _pythons(options: argparse.Namespace) -> dict[str, Path]:
    """Return the Python that each trainer runs in; on a GPU there is TRL only where its environment is given."""
    pythons = {}
    if options.only != "own" and (options.device == "cpu" or options.trl_python):
        pythons["trl"] = pythons["trl_tuned"] = options.trl_python or python_of("trl")
    if options.only != "trl":
        pythons["own"] = Path(sys.executable)
    return pythons


def _measure(
    options: argparse.Namespace, pythons: Mapping[str, Path], row: Row, folder: Path, progress: Progress
) -> Result:
    """Return what a row costs: each trainer's steps in turns, and what the arithmetic alone would cost."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    model, num_parameters = save_model(folder / "model", model=options.model, dtype=dtype)
    for name in pythons:
        write_case(
            folder / f"{name}.json",
            row,
            model=folder / "model",
            vocabulary_size=model.vocab_size,
            num_steps=_WARM_UP + options.rounds,
            device=options.device,
            dtype=options.dtype,
            learning_rate=1e-6,
            kl_coefficient=0.04,
            trl_batch_size=options.trl_batch_size if name == "trl_tuned" else row.num_prompts * row.group_size,
            micro_batch_tokens=options.micro_batch_tokens,
        )
    device = torch.device(options.device)
    before = measure_matmul_flops(device, dtype)
    measured = _steps(pythons, folder, row, _environment(options), progress, rounds=options.rounds)
    rate = max(before, measure_matmul_flops(device, dtype))
    forward = forward_flops(model, row, num_parameters=num_parameters)
    limit = {"operations": step_operations(forward), "rate": rate, "seconds": step_operations(forward) / rate}
    sides = {
        name: about | _figures(steps, update_operations(forward) / rate) for name, (about, steps) in measured.items()
    }
    return {"num_parameters": num_parameters, "limit": limit, **sides, "ratios": _ratios(sides, limit)}


def _environment(options: argparse.Namespace) -> dict[str, str]:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    return {"HF_HUB_OFFLINE": "1", **hidden}


def _steps(
    pythons: Mapping[str, Path],
    folder: Path,
    row: Row,
    environment: Mapping[str, str],
    progress: Progress,
    *,
    rounds: int,
) -> dict[str, tuple[Reply, list[Reply]]]:
    """Return each trainer's account of itself and its measured steps; completions have the lengths of the row."""
    sides: dict[str, Side] = {}

    def ended(name: str, turn: str, step: Reply) -> None:
        progress.done(f"{row}, {_NAMES[name]}, {turn}", step["seconds"])

    try:
        for name, python in pythons.items():
            script = _HERE / ("own_step.py" if name == "own" else "trl_step.py")
            memory = _KEEP_MEMORY if name == "trl_tuned" else {}
            sides[name] = Side(script, python, folder / f"{name}.json", {**environment, **memory})
        take_turns(sides, _WARM_UP, "warm-up", ended)
        steps, share = take_turns(sides, rounds, "round", ended)
    finally:
        for side in sides.values():
            side.close()
    assert all(step["lengths"] == sorted(row.lengths_B()) for taken in steps.values() for step in taken)
    if share > _MAX_IDLE:
        raise SystemExit(f"{row}: a waiting trainer used {share:.0%} of a core; the measurement is worth nothing")
    return {name: (side.about, steps[name]) for name, side in sides.items()}


def _figures(steps: list[Reply], update_limit_s: float) -> Result:
    update_s = statistics.median(step["seconds"] - step["sampling_s"] for step in steps)
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "sampling_s": statistics.median(step["sampling_s"] for step in steps),
        "peak_bytes": steps[-1]["peak_bytes"],
        "update_utilisation": update_limit_s / update_s,
        "steps_s": [step["seconds"] for step in steps],
    }


def _ratios(sides: Mapping[str, Result], limit: Result) -> dict[str, float]:
    ratios = {f"{name}_to_limit": side["seconds"] / limit["seconds"] for name, side in sides.items()}
    for name in sides.keys() - {"own"}:
        if own := sides.get("own"):
            ratios[f"{name}_to_own_seconds"] = sides[name]["seconds"] / own["seconds"]
            ratios[f"{name}_to_own_memory"] = sides[name]["peak_bytes"] / own["peak_bytes"]
    return ratios


def _lines(row: Row, result: Result) -> list[str]:
    limit, ratios = result["limit"], result["ratios"]
    lines = [
        f"{row}: the arithmetic alone {limit['seconds']:.3g} s ({limit['operations'] / 1e9:.0f} Gop "
        f"at {limit['rate'] / 1e9:.0f} Gop/s)"
    ]
    for name, called in _NAMES.items():
        if side := result.get(name):
            lines.append(
                f"  {called:<16}{side['seconds']:8.3f} s/step ({side['sampling_s']:.3f} s of it sampling), "
                f"peak {side['peak_bytes'] / 1e9:.2f} GB, {ratios[f'{name}_to_limit']:.2f} x the limit, "
                f"{side['update_utilisation']:.0%} of the matrix rate in the update"
            )
    for name in ("trl", "trl_tuned"):
        if f"{name}_to_own_seconds" in ratios:
            lines.append(
                f"  {_NAMES[name]} takes {ratios[f'{name}_to_own_seconds']:.2f} x the time and "
                f"{ratios[f'{name}_to_own_memory']:.2f} x the memory"
            )
    return lines


if __name__ == "__main__":
    main()
