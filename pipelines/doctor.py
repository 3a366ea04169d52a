"""`grpo-pipeline doctor`: checks the hardware and software of this machine, and prints problems with remedies.

Checks that may hang or crash run in a separate process with a deadline, such as the import of torch.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.shared.environment import available_cores
from components.shared.errors import PipelineError
from components.shared.libraries import missing_libraries
from pipelines.tables import listed

if TYPE_CHECKING:
    from components.preflight.config import Params

State = Literal["ok", "warning", "error"]

_ROOT = Path(__file__).parents[1]
_DEADLINE_S, _IMPORT_DEADLINE_S = 10.0, 120.0
_GIB = 2**30
_MIN_DISK_GIB, _SPARE_DISK_GIB, _MIN_MEMORY_GIB = 2, 20, 4
_BUSY_FRACTION = 0.3  # fraction of the cores that other processes may use before training on CPUs slows down
_SMI_FIELDS = "name,memory.total,memory.used,driver_version"
_PINNED_PACKAGE = re.compile(r"^([a-z0-9-]+)==([^\s;]+)", re.MULTILINE)
_NUM_PARAMETERS_SLOW = 100_000_000  # from this size on, training without a GPU takes long
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of x86 and ARM processors with instructions for bfloat16 products."""
_TORCH_SCRIPT = """
import json, torch
has_gpu = torch.cuda.is_available()
device = "cuda" if has_gpu else "cpu"
square = torch.arange(64.0, device=device).reshape(8, 8)
assert (square @ torch.eye(8, device=device)).equal(square), "a matrix product is wrong"
bf16 = torch.cuda.is_bf16_supported() if has_gpu else True
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpu": has_gpu, "bf16": bf16}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    text: str
    remedy: str = ""


def unused_gpu() -> str:
    """Return why this machine's GPU would not be used, and a remedy; empty if it is used or there is no GPU."""
    gpus = _nvidia()
    if not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ""
    finding = _torch(gpus)
    return f"torch {finding.text}; {finding.remedy}" if finding.state == "error" else ""


def slow_here(params: "Params") -> str:
    """Return a warning if this machine has no GPU and training takes long or could be faster; empty otherwise."""
    from components.preflight.resources import shape_of_base

    if _nvidia():
        return ""
    precision, has_bf16 = params.train_grpo.engine.precision, _has_bf16_instructions()
    if precision == "bf16" and not has_bf16:
        return "train_grpo.engine.precision: this processor has no instructions for bf16; fp32 is several times faster"
    shape = shape_of_base(params)
    if shape is None or shape.num_parameters < _NUM_PARAMETERS_SLOW:
        return ""
    base, size = params.train_sft.model.base, f"{shape.num_parameters / 1e6:,.0f} M parameters"
    warning = f"{base}: {size} train slowly without a GPU"
    if precision == "fp32" and has_bf16:
        warning += "; set engine.precision: bf16 and zero_stage: 2, which this processor has instructions for"
    return warning


def _has_bf16_instructions() -> bool:
    file = Path("/proc/cpuinfo")
    return file.is_file() and not _BF16_FLAGS.isdisjoint(file.read_text().split())


def doctor(params: Path | None) -> int:
    """Print the findings about this machine and a run on it; return 2 if one of them is an error."""
    checks = [_machine, _disk, _gpu_and_torch, _imports, _libraries, _lock, _git, _sandbox, _hub]
    if params:
        checks.append(partial(_run, params))
    exit_code = 0
    for check in checks:
        for finding in check():
            print(f"{finding.state:<7}  {finding.name:<12}  {finding.text}", flush=True)
            if finding.remedy:
                print(f"{'':<23}{finding.remedy}", flush=True)
            if finding.state == "error":
                exit_code = PipelineError.exit_code
    return exit_code


def _libraries() -> Iterator[Finding]:
    """Yield a finding for each shared library that an installed package needs and the system lacks."""
    for name, file in (missing_libraries() if shutil.which("ldd") else {}).items():
        remedy = "install the system package that contains it, such as libnuma1 for libnuma.so.1"
        yield Finding("libraries", "warning", f"{file} needs {name}, which is missing", remedy)


def _finding(name: str, text: str, is_wrong: bool, remedy: str, state: State = "warning") -> Finding:
    """Return a finding: with `state` and the remedy if something is wrong, otherwise with the state `ok`."""
    return Finding(name, state, text, remedy) if is_wrong else Finding(name, "ok", text)


def _machine() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {sys.platform}")
    cores, busy = available_cores(), os.getloadavg()[0]
    bf16 = "with" if _has_bf16_instructions() else "without"
    text = f"{cores} cores {bf16} instructions for bf16; load {busy:.1f} in the last minute"
    remedy = "other programs use the cores: until they end, training may take up to twice as long"
    yield _finding("cores", text, busy > _BUSY_FRACTION * cores, remedy)
    path = Path("/proc/meminfo")
    if path.is_file():
        gib = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in path.read_text().splitlines()}  # from KiB
        available = gib["MemAvailable"]
        text = f"{gib['MemTotal']:.0f} GiB, {available:.0f} GiB of them available"
        remedy = f"the default job needs about {_MIN_MEMORY_GIB} GiB"
        yield _finding("memory", text, available < _MIN_MEMORY_GIB, remedy)


def _disk() -> Iterator[Finding]:
    """Check the free space where a run writes."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    for name, folder in {"outputs/": Path("outputs"), "the hub's cache": cache}.items():
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / _GIB
        remedy = "a run of a 1.5B model writes about 20 GiB; `grpo-pipeline gc` removes unfinished work and old runs"
        state: State = "error" if free < _MIN_DISK_GIB else "warning"
        yield _finding("disk", f"{free:.0f} GiB free for {name}", free < _SPARE_DISK_GIB, remedy, state)


def _gpu_and_torch() -> Iterator[Finding]:
    gpus = _nvidia()
    for gpu in gpus:
        name, total, used, driver = (part.strip() for part in gpu.split(","))
        text = f"{name}, {int(total) / 1024:.0f} GiB, {int(used) / 1024:.1f} GiB in use, driver {driver}"
        remedy = "another process holds its memory: `nvidia-smi` names it"
        yield _finding("gpu", text, int(used) >= 0.1 * int(total), remedy)
    if not gpus:
        yield Finding("gpu", "ok", "none: nvidia-smi finds no GPU; small models train on the cores")
    yield _torch(gpus)


def _torch(gpus: list[str]) -> Finding:
    """Return whether torch works, and uses the GPUs that nvidia-smi lists."""
    torch = _run_python(_TORCH_SCRIPT)
    if isinstance(torch, str):  # an error
        return Finding("torch", "error", torch, "`make setup` in a fresh clone, or `make distclean setup` here")
    text = f"{torch['version']}, computes on {'the GPU' if torch['gpu'] else 'CPUs'}"
    if gpus and torch["cuda"] is None:
        return Finding("torch", "error", f"{text}, though there is a GPU", "make setup TORCH_BACKEND=auto")
    if gpus and not torch["gpu"]:
        remedy = f"its CUDA {torch['cuda']} needs a newer driver: update the driver"
        return Finding("torch", "error", f"{text}: it does not find the GPU", remedy)
    remedy = "set engine.precision: fp32, and evaluate.dtype: float32"
    return _finding("torch", f"{text}{'' if torch['bf16'] else ', which has no bfloat16'}", not torch["bf16"], remedy)


def _nvidia() -> list[str]:
    """Return nvidia-smi's line for each GPU, with `_SMI_FIELDS` and memory in MiB; empty without a GPU."""
    return (_output(["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]) or "").splitlines()


def _imports() -> Iterator[Finding]:
    for name in ("transformers", "deepspeed", "vllm"):
        version_or_error = str(_run_python(f"import json, {name}; print(json.dumps({name}.__version__))"))
        is_wrong = " " in version_or_error  # a version has no spaces
        if name == "vllm":
            remedy = "`sampler.vllm`, `serve` and `promote` need it: `make setup`"
            yield _finding(name, version_or_error, is_wrong, remedy)
        else:
            yield _finding(name, version_or_error, is_wrong, "`make setup`", "error")


def _lock() -> Iterator[Finding]:
    """Compare the versions of installed packages with the lock."""
    from components.shared.execution import current_environment  # slow to import

    pinned: dict[str, set[str]] = {}  # several versions if they differ between releases of Python
    for name, version in _PINNED_PACKAGE.findall((_ROOT / "requirements.lock").read_text(encoding="utf-8")):
        pinned.setdefault(name, set()).add(version)
    different = [
        f"{name} {version} (lock: {' or '.join(sorted(pinned[name]))})"
        for name, version in current_environment().packages.items()
        if name in pinned and version.partition("+")[0] not in pinned[name]  # builds of torch have a suffix
    ]
    remedy = "`make setup` installs what requirements.lock names"
    yield _finding("packages", listed(different) or "all as in requirements.lock", bool(different), remedy)


def _git() -> Iterator[Finding]:
    git = _output(["git", "--version"])
    yield _finding("git", git or "not found", not git, "versions are git tags: install git", "error")


def _sandbox() -> Iterator[Finding]:
    from components.grading.sandbox.run import require_sandbox

    try:
        require_sandbox()
        yield Finding("sandbox", "ok", "works: the code in a model's answer can be run safely")
    except PipelineError as error:
        yield Finding("sandbox", "warning", str(error), "only data sources with code to run (mbpp) need it")


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    token = "with a token" if get_token() else "without a token: gated models and `push` need HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "ok", "HF_HUB_OFFLINE is set: models and datasets come from folders or the cache")
        return
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=_DEADLINE_S).close()
        yield Finding("hub", "ok", f"{constants.ENDPOINT} answers, {token}")
    except (OSError, ValueError, HTTPException):  # ValueError: an address without a scheme
        remedy = "use models and datasets from local folders, or set HTTPS_PROXY, SSL_CERT_FILE or HF_ENDPOINT"
        yield Finding("hub", "warning", f"{constants.ENDPOINT} cannot be reached", remedy)


def _run(path: Path) -> Iterator[Finding]:
    """Yield the errors and warnings that a run with a params file would print before its first stage."""
    from components.preflight.config import advisories, contradictions, load_params
    from components.shared.config import with_place
    from pipelines.requirements import missing_here

    try:
        params = load_params(path)
    except PipelineError as error:
        for line in str(error).splitlines():
            yield Finding("params", "error", line)
        return
    data = None if params.prepare_data.repository else Path()
    problems = missing_here(params) + contradictions(params, data)
    for line in problems:
        yield Finding("params", "error", with_place(path, line))
    for line in filter(None, [*advisories(params, data), slow_here(params)]):
        yield Finding("params", "warning", line)
    if not problems:
        yield Finding("params", "ok", f"{path}: nothing is missing")


def _output(command: list[str]) -> str | None:
    """Return the output of a command; None if the command is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _run_python(script: str) -> Any:
    """Return the last line that a script prints, parsed as JSON; if it fails, the last line of its error, a string."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_DEADLINE_S:g} s"
    if result.returncode:
        return (result.stderr.strip() or f"ended with exit code {result.returncode}").splitlines()[-1]
    return json.loads(result.stdout.strip().splitlines()[-1])
