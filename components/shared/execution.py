"""How a stage was run: by whom and when, from which commit with which changes, and in which environment.

None of this should affect the result, but any of it may, and it can explain why a result is not reproduced. Reading it
takes milliseconds and imports no library: versions come from folder names, hardware from files of the kernel.
"""

import getpass
import hashlib
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from components.shared.environment import IMAGE_VARIABLE, LOCK_VARIABLE, REVISION_VARIABLE, available_cores
from components.shared.versioning import Workspace

_ROOT = Path(__file__).parents[2]
_CODE = ("components", "pipelines", "pyproject.toml", "requirements.lock")
"""Paths of the repository whose uncommitted changes are recorded."""
_SUFFIXES = (".py", ".jinja", ".css")
"""Suffixes of new files that are code."""
_KEYS = re.compile(
    r"A[KS]IA[0-9A-Z]{16}|\bhf_\w{30,}|\bgh[opusr]_\w{36}|github_pat_\w{30,}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\."
)
"""Keys of AWS, Hugging Face, GitHub, OpenAI and Slack, private keys, and JSON web tokens."""
_NAMED_SECRET = re.compile(r"""(?i)(?:key|token|secret|passw(?:or)?d)\w*["']?\s*[:=]\s*["']([^"'\s]{12,})["']""")
_MIN_ENTROPY = 3.3
"""Bits per character above which a value that is named like a secret counts as one: words have fewer."""
_MAX_PATCH = 200_000
"""Characters of uncommitted changes that are recorded; for longer ones only the digest is."""
_VARIABLE = re.compile(
    "(?!GOMP_SPINCOUNT$)(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|VECLIB|NUMEXPR|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|VLLM)_.*"
    "|LD_PRELOAD|PYTHONHASHSEED"
)
"""Variables that change results or speed of numerical libraries; that of `limit_spin` does not change results."""
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_PLACE_FILE = "place.json"
ABSENT = "(absent)"
"""Shown for a package, variable or setting that one of two sides lacks."""
_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia")
_CPU_NAMES = ("model name", "Model", "cpu model", "Hardware", "CPU part")
_DIFF = (
    *("-c", "core.quotePath=false", "diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
"""git's arguments for patches that `git apply` takes, regardless of the user's settings."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Environment(_Record):
    """The software and hardware that a stage ran on."""

    python: str
    packages: dict[str, str]
    """Version of every installed package, by its normalised name."""
    lock: str | None
    """SHA-256 of requirements.lock; null if the code comes without it."""
    image: str | None
    """Reference of the container image; null outside one."""
    system: str
    """Operating system with its kernel and C library."""
    machine: str
    """Architecture, such as x86_64."""
    cpu: str
    num_cores: int
    """Cores that the process may use."""
    gpus: tuple[str, ...]
    gpu_driver: str | None
    variables: dict[str, str]
    """Environment variables of numerical libraries, such as OMP_NUM_THREADS."""

    def __str__(self) -> str:
        gpus = "; ".join(f"{number} x {name}" for name, number in Counter(self.gpus).items())
        return f"{gpus or 'no GPU'}; {self.num_cores} cores of {self.cpu}; {self.system}; Python {self.python}"


class Revision(_Record):
    """The state of the code: a commit and uncommitted changes."""

    commit: str | None = None
    """Commit of the repository, or of the image's code; null if unknown."""
    patch_digest: str | None = None
    """SHA-256 of the uncommitted changes; null without any."""
    patch: str | None = None
    """The uncommitted changes, new files included, for `git apply`; null without any, or if they are too long."""

    def __str__(self) -> str:
        if self.commit is None:
            return "unknown, not run from a git repository"
        return self.commit + (" with uncommitted changes" if self.patch_digest else "")

    def without_secrets(self) -> "Revision":
        """Return this revision; without its patch if that has secrets, which only `grpo-pipeline run` refuses."""
        has_secrets = self.patch is not None and any(find_secrets(self.patch))
        return self.model_copy(update={"patch": None}) if has_secrets else self


class Run(_Record):
    """One execution of a stage: what differs between equal runs."""

    of: str
    """Key of the stage's record."""
    by: str
    """Who ran it: git's `user.name`, user and host."""
    run_id: str | None
    """Id of the Kubeflow run."""
    run_name: str | None
    started: datetime
    finished: datetime
    threads: int | None
    """Threads of torch; null if the stage did not use torch."""
    environment: str
    """Key of the environment."""
    revision: str
    """Key of the revision."""

    @property
    def seconds(self) -> float:
        """How long the stage took."""
        return (self.finished - self.started).total_seconds()


class Place(_Record):
    """Where a process runs: its environment and its number of threads."""

    environment: Environment
    threads: int | None
    """Threads of torch; null if the process does not use torch."""

    def write(self, work: Path) -> None:
        """Write it into a stage's work folder; for the processes that a stage starts for its work."""
        (work / _PLACE_FILE).write_text(self.model_dump_json() + "\n", encoding="utf-8")


def current_place() -> Place:
    """Return environment and threads of this process."""
    environment = current_environment()
    torch = sys.modules.get("torch")  # not imported here: that takes seconds
    if torch and torch.cuda.is_available() and not environment.gpus:  # a driver without files in /proc
        names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        environment = environment.model_copy(update={"gpus": names})
    return Place(environment=environment, threads=torch.get_num_threads() if torch else None)


def place_of(work: Path | None) -> Place:
    """Return the place that a process of the stage wrote into its work folder, or else that of this process."""
    path = work / _PLACE_FILE if work else None
    return Place.model_validate_json(path.read_bytes()) if path and path.is_file() else current_place()


def forget_place(work: Path) -> None:
    """Remove the place that processes of an earlier attempt wrote into a work folder."""
    (work / _PLACE_FILE).unlink(missing_ok=True)


def person() -> str:
    """Return `user@host` of this process, after the `user.name` that git has in the working folder, if any."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        user = str(os.getuid())
    account = f"{user}@{platform.node()}"
    name = Workspace(Path(), Path(tempfile.gettempdir())).try_git("config", "--get", "user.name")
    return f"{name.strip()} ({account})" if name and name.strip() else account


@cache
def current_environment() -> Environment:
    """Return the environment of this process, as it was at the first call.

    Call it before importing libraries, which add environment variables and entries to sys.path.
    """
    lock, lock_file = os.environ.get(LOCK_VARIABLE) or None, _ROOT / "requirements.lock"
    if lock_file.is_file():
        lock = hashlib.sha256(lock_file.read_bytes()).hexdigest()
    return Environment(
        python=platform.python_version(),
        packages=dict(sorted(_packages())),
        lock=lock,
        image=os.environ.get(IMAGE_VARIABLE) or None,
        system=platform.platform(),
        machine=platform.machine(),
        cpu=_cpu(),
        num_cores=available_cores(),
        gpus=tuple(_gpus()),
        gpu_driver=_gpu_driver(),
        variables={
            name: value.encode(errors="replace").decode()  # a value that is not UTF-8 cannot be in JSON
            for name, value in sorted(os.environ.items())
            if is_numerical(name)
        },
    )


def is_numerical(variable: str) -> bool:
    """Return whether an environment variable belongs to a numerical library and is recorded."""
    return _VARIABLE.fullmatch(variable) is not None and _SECRET.search(variable) is None


def _packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of each installed package, from folder names: reading the metadata takes too long."""
    known = set[str]()
    for folder in filter(Path.is_dir, map(Path, sys.path)):
        for path in folder.iterdir():
            if path.suffix in {".dist-info", ".egg-info"} and "-" in path.stem:
                package, version = path.stem.split("-")[:2]
                normalised = re.sub(r"[-_.]+", "-", package).lower()
                if normalised not in known:
                    known.add(normalised)
                    yield normalised, version


def _cpu() -> str:
    if _CPUINFO.is_file():
        lines = [line.partition(":") for line in _CPUINFO.read_text("utf-8", "replace").splitlines()]
        values = {name.strip(): value.strip() for name, _, value in lines}
        return next((values[name] for name in _CPU_NAMES if values.get(name)), platform.machine())
    return platform.processor() or platform.machine()


def _gpus() -> Iterator[str]:
    for path in sorted(_NVIDIA.glob("gpus/*/information")):
        yield from re.findall(r"^Model:\s*(.+?)\s*$", path.read_text("utf-8", "replace"), flags=re.MULTILINE)


def _gpu_driver() -> str | None:
    path = _NVIDIA / "version"
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def environment_differences(one: Environment, other: Environment) -> list[str]:
    """Return each difference between two environments in words, such as "torch 2.13.0 -> 2.12.0"."""
    before, after = one.model_dump(), other.model_dump()
    differences: list[str] = []
    for mapping in ("packages", "variables"):
        old, new = before.pop(mapping), after.pop(mapping)
        names = [name for name in sorted({**old, **new}) if old.get(name) != new.get(name)]
        differences += [f"{name} {old.get(name, ABSENT)} -> {new.get(name, ABSENT)}" for name in names]
    for key, value in before.items():
        if value != after[key]:
            differences.append(f"{key.replace('_', ' ')}: {_words(value)} -> {_words(after[key])}")
    return differences


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@cache
def current_revision(root: Path = _ROOT) -> Revision:
    """Return the state of the code in a repository; outside of one, the commit that the container image names."""
    if not (root / ".git").exists():
        return Revision(commit=os.environ.get(REVISION_VARIABLE) or None)
    workspace = Workspace(root, root)
    workspace.git("rev-parse", "--git-dir")  # fails if git itself does not work
    head = workspace.try_git("rev-parse", "--verify", "HEAD")
    if head is None:  # a repository without a commit
        return Revision()
    paths = [name for name in _CODE if (root / name).exists()]
    diff = ("--no-optional-locks", *_DIFF, "HEAD")
    tracked = workspace.git(*diff, "--", *paths)
    new = workspace.git("ls-files", "-z", "--others", "--exclude-standard", "--", *paths)
    new_files = [name for name in sorted(new.split("\0")) if name.endswith(_SUFFIXES)]
    patch = tracked + "".join(_patch_of_new_file(root, name) for name in new_files)
    if not patch:
        return Revision(commit=head.strip())
    digest = hashlib.sha256(patch.encode(errors="replace")).hexdigest()
    return Revision(commit=head.strip(), patch_digest=digest, patch=patch if len(patch) <= _MAX_PATCH else None)


def uncommitted_files(patch: str) -> list[str]:
    """Return the files that a patch changes."""
    return re.findall(r"^diff --git a/.* b/(.*)$", patch, re.MULTILINE)


def find_secrets(patch: str) -> Iterator[str]:
    """Yield `file:line` for each added line of a patch that seems to contain a key or a password."""
    file, number = "", 0
    for line in patch.splitlines():
        hunk = re.match(r"@@ -\S+ \+(\d+)", line)
        if hunk:
            number = int(hunk[1]) - 1  # of the line before the hunk
        elif line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif line.startswith(("+", " ")):
            number += 1
            if line.startswith("+") and _has_secret(line):
                yield f"{file}:{number}"


def _has_secret(line: str) -> bool:
    """Return whether a line has a key of a known form, or a random value with a name like that of a secret."""
    if _KEYS.search(line):
        return True
    secret = _NAMED_SECRET.search(line)
    return secret is not None and _entropy(secret[1]) > _MIN_ENTROPY


def _entropy(text: str) -> float:
    """Return the entropy of the characters in a text, in bits per character."""
    fractions = [count / len(text) for count in Counter(text).values()]
    return -sum(fraction * math.log2(fraction) for fraction in fractions)


def _patch_of_new_file(root: Path, name: str) -> str:
    """Return the patch that adds a file; git exits with 1 where there is a difference."""
    command = ["git", *_DIFF, "--no-index", "--", "/dev/null", name]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).stdout.decode(errors="replace")
