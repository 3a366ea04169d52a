"""`make gpu-check` runs the code for GPUs on this machine's GPU.

Each check is a process with a time limit and a log, and runs even if earlier ones failed. The results are in
outputs/gpu-check: gpu-check.json, and a log per check. `--device cpu` tries the checks themselves without a GPU.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from components.shared.errors import PipelineError
from pipelines.doctor import unused_gpu
from pipelines.run.screen import Screen, Style

ROOT = Path(__file__).parents[2]
OUT = Path("outputs/gpu-check")
_NEEDS_GPU = re.compile(r"needs a GPU")
_KERNEL_TESTS = ("tests/policy/test_attention.py", "tests/policy/test_logprobs.py")
_NUM_CHARACTERS = 300
_STEP_ROW = "16x8:192/410"
"""Prompts x completions : tokens of a prompt / of a completion, as for GSM8K."""
_BF16 = ["train_sft.model.base=scratch:math", "train_grpo.engine={precision: bf16, zero_stage: 2}"]
_BF16 += ["train_grpo.sampler.max_mismatch=0.05"]
_WEIGHTED = "train_grpo.sampler.correction.weight={level: token, max: 2.0}"
Result = Literal["passed", "missed", "not run"]


@dataclass(frozen=True)
class Row:
    """The result of a check."""

    title: str
    result: Result
    took_s: float
    evidence: str


@dataclass(frozen=True)
class Check:
    """A command, and the evidence in its files and output if it ends with 0."""

    name: str
    title: str
    minutes: float
    command: Sequence[str]
    evidence: Callable[[Path, str], str] = lambda folder, output: output.strip().splitlines()[-1]
    """Takes the check's folder and its output; raises ValueError if the check failed after all."""
    not_run: str = ""
    """Why it cannot run here."""


def checks(device: str, out: Path, *, model: str | None = None, trl_python: str | None = None) -> list[Check]:
    """Return all checks, for a device; `model` is a folder with a model to train, `trl_python` a Python with TRL."""
    python = [sys.executable, "-W", "ignore"]
    on_device = [*python, "-m", "tests.gpu.on_device"]
    tests = [*python, "-m", "pytest", "-p", "no:hydra_pytest", "-q", "-m", "not slow and not long"]
    cli = [*python, "-m", "pipelines.cli"]
    no_gpu = "" if device == "cuda" else "needs a GPU"
    one_gpu = "" if device == "cuda" and _num_gpus() > 1 else "needs two GPUs"
    no_vllm = "" if find_spec("vllm") else "vLLM is not installed"
    kernels = [*tests, "--junitxml", str(out / "kernels/junit.xml"), *_KERNEL_TESTS]
    step = [*python, "benchmarks/grpo_step.py", _STEP_ROW, "--device", "cuda", "--micro-batch-tokens", "16384"]
    step += ["--trl-python", trl_python] if trl_python else ["--only", "own"]
    no_model = "" if model else "no weights: MODEL=FOLDER names a 1.5B instruct model"

    def run(name: str, *settings: str, params: str = "params/smoke.yaml") -> list[str]:
        settings = (*settings, f"register.registry={out / name / 'registry'}")
        sets = [part for setting in settings for part in ("--set", setting)]
        return [*cli, "run", "--fresh", "--params", str(ROOT / params), *sets]

    dtype = ["evaluate.dtype=bfloat16"] if device == "cuda" else []
    vllm = "max_tokens: 256, cache_gib: 0.5, compile: false"
    beside = [f"train_grpo.sampler.vllm={{{vllm}}}", _WEIGHTED]
    server = [f"train_grpo.sampler.servers={{num_servers: 1, devices: ['1'], weights_by: nccl, {vllm}}}", _WEIGHTED]
    ranks = ["train_sft.engine.num_processes=2", "train_grpo.engine.num_processes=2"]
    qwen = [f"train_sft.model.base={model}", "train_grpo.num_steps=20", "report.gate.enforce=false"]
    qwen += ["train_grpo.validation={every_steps: 10, num_problems: 200}"]
    run_qwen = run("gsm8k", *qwen, params="params/qwen-1.5b.yaml")
    steps = [
        Check(
            name := f"step-{size}",
            f"a GRPO step of {size}, {_STEP_ROW}",
            30,
            [*step, "--model", size, "--out", str(out / name)],
            _step,
            no_gpu,
        )
        for size in ("0.5b", "1.5b")
    ]
    return [
        Check("machine", "what is there", 5, [*cli, "doctor"], _doctor),
        Check("kernels", "attention and output layer agree with float64", 20, kernels, _junit, no_gpu),
        Check("families", "models in bf16 are what is trained on", 15, [*on_device, "families", device]),
        Check("files", "vLLM gets weights by files", 15, [*on_device, "weights", device, "folder"], not_run=no_vllm),
        Check("ipc", "vLLM gets weights by ipc", 15, [*on_device, "weights", device, "ipc"], not_run=no_gpu or no_vllm),
        Check("training", "the smoke run in bf16", 30, run("training", *_BF16, *dtype), _last_policy),
        Check(
            name := "training-vllm", "the same by vLLM", 30, run(name, *_BF16, *dtype, *beside), _last_policy, no_vllm
        ),
        Check(
            "nccl", "a server gets weights by NCCL", 30, run("nccl", *_BF16, *server), _last_policy, one_gpu or no_vllm
        ),
        Check("ranks", "two processes train in bf16", 30, run("ranks", *_BF16, *ranks), _last_policy, one_gpu),
        *steps,
        Check("gsm8k", "20 steps of qwen-1.5b.yaml", 90, run_qwen, _last_policy, no_model),
    ]


def run(check: Check, folder: Path) -> Row:
    """Run a check in a process whose output goes to the folder's `log`."""
    if check.not_run:
        return Row(check.title, "not run", 0, check.not_run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, started = folder / "log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            check.command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(60 * check.minutes)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done within {check.minutes:g} minutes"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s, output = time.monotonic() - started, log.read_text(encoding="utf-8", errors="replace")
    if problem:
        lines = output.strip().splitlines() or ["it printed nothing"]
        return Row(check.title, "missed", took_s, f"{problem}: {lines[-1][:_NUM_CHARACTERS]}")
    try:
        return Row(check.title, "passed", took_s, check.evidence(folder, output)[:_NUM_CHARACTERS])
    except (ValueError, LookupError, OSError) as error:
        return Row(check.title, "missed", took_s, f"{type(error).__name__}: {error}"[:_NUM_CHARACTERS])


def _doctor(folder: Path, output: str) -> str:
    return "; ".join(re.findall(r"^ok +((?:gpu|torch|vllm|deepspeed) .*)", output, re.MULTILINE))


def _junit(folder: Path, output: str) -> str:
    """Count the tests; none of those that need a GPU may have been skipped."""
    suite = ElementTree.parse(folder / "junit.xml").getroot()[0]
    skipped = [each.get("message", "") for each in suite.iter("skipped")]
    if left_out := len([message for message in skipped if _NEEDS_GPU.search(message)]):
        raise ValueError(f"{left_out} tests that need a GPU were skipped")
    return f"{int(suite.attrib['tests']) - len(skipped)} tests passed, {len(skipped)} skipped"


def _step(folder: Path, output: str) -> str:
    (path,) = folder.glob("grpo_step/*.json")
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    own = row["own"]
    text = f"{own['seconds']:.2f} s, {own['sampling_s']:.2f} s of them sampling"
    trl = [f"{name} {row[name]['seconds']:.2f} s" for name in ("trl", "trl_tuned") if name in row]
    return "; ".join([f"{text}, peak {own['peak_bytes'] / 2**30:.1f} GiB", *trl])


def _last_policy(folder: Path, output: str) -> str:
    """Return the lines of GRPO's end and of the gate."""
    lines = [line.strip() for line in output.splitlines()]
    trained = [line for line in lines if re.match(r"\d+/\d+ steps +reward", line)]
    return "; ".join([*trained[-1:], *(line for line in lines if line.startswith(("gate ", "registered ")))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if all that could run passed, 1 if one failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of checks: machine, kernels, families ...")
    parser.add_argument("--model", help="folder with a 1.5B instruct model, to train 20 steps")
    parser.add_argument("--trl-python", help="Python of an environment with TRL, to compare with")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (problem := _no_gpu()):
        print(f"error: {problem}", file=sys.stderr)
        return PipelineError.exit_code
    screen, out = Screen(sys.stdout, sys.stderr), options.out.absolute()
    rows: list[Row] = []
    tried = checks(options.device, out, model=options.model, trl_python=options.trl_python)
    tried = [check for check in tried if not options.only or check.name in options.only]
    for number, check in enumerate(tried, start=1):
        screen.header(number, len(tried), check.title)
        row = run(check, out / check.name)
        rows.append(row)
        screen.detail(f"{row.result}: {row.evidence}", Style.RED if row.result == "missed" else Style.GREEN)
        written: dict[str, Any] = {"device": options.device, "at": datetime.now(UTC).isoformat(timespec="minutes")}
        text = json.dumps({**written, "checks": [asdict(row) for row in rows]}, indent=2)
        (out / "gpu-check.json").write_text(f"{text}\n", encoding="utf-8")
    screen.show(f"{options.out}/gpu-check.json")
    return int(any(row.result == "missed" for row in rows))


def _num_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines())


def _no_gpu() -> str:
    """Return why nothing can be tried."""
    if not shutil.which("nvidia-smi"):
        return "there is no GPU (no nvidia-smi); --device cpu tries the checks themselves"
    return unused_gpu()


if __name__ == "__main__":
    sys.exit(main())
