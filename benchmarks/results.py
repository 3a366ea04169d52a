"""What benchmarks print while they run, and what they leave: a file for each benchmark and machine.

`python benchmarks/results.py` prints the GRPO steps of all machines as one table.
"""

import json
import platform
import re
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from components.shared.versioning import Workspace

_HERE = Path(__file__).parent
FOLDER = _HERE / "results"
_COLUMNS = {
    "ours s": ("own", "seconds"),
    "limit s": ("limit", "seconds"),
    "ours / limit": ("ratios", "own_to_limit"),
    "TRL in one pass / ours": ("ratios", "trl_to_own_seconds"),
    "TRL tuned / ours": ("ratios", "trl_tuned_to_own_seconds"),
    "memory, TRL in one pass / ours": ("ratios", "trl_to_own_memory"),
}
"""Where the figures of a row of grpo_step.py are."""

Result = dict[str, Any]


class Progress:
    """Prints a line for each of `total` measurements as it ends."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def done(self, what: str, seconds: float) -> None:
        """Say what has ended and how long it took, and how long the rest takes if it goes on like this."""
        self._done += 1
        left_s = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        left = f"; about {tqdm.format_interval(left_s)} left" if left_s else ""
        print(f"{self._done}/{self._total}  {what}: {seconds:.3g} s{left}", flush=True)


def machine(threads: int, gpu: str | None = None) -> Result:
    """Return what names this machine: its processor, the threads that are used, and the GPU if one is measured."""
    models = (line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line)
    return {"processor": next(models, platform.machine()).partition(": ")[2], "threads": threads, "gpu": gpu}


def slug(of: Result) -> str:
    """Return a machine's name as a file is called, like `amd-epyc-2-threads`; a GPU stands for its machine."""
    name = re.sub(r"\((r|tm)\)", "", f"{of['gpu'] or of['processor']} {of['threads']} threads".lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def versions(python: Path, *packages: str) -> dict[str, str]:
    """Return the versions of those of the packages that a Python has."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    installed = json.loads(subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE).stdout)
    return {name: installed[name] for name in packages if name in installed}


def record(folder: Path, benchmark: str, on: Result, identity: Result, figures: Result) -> Path:
    """Add a row to the file of a benchmark and machine, in place of the row with the same identity; return the file.

    All other rows stay. A row has its date and the commit of this project.
    """
    path = folder / benchmark / f"{slug(on)}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    commit = Workspace(_HERE, Path(tempfile.gettempdir())).try_git("describe", "--always", "--dirty")
    row = {**identity, "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit and commit.strip(), **figures}
    others = [{name: other.get(name) for name in identity} for other in rows]
    if identity in others:
        rows[others.index(identity)] = row
    else:
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": on, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return path


def table(folder: Path) -> str:
    """Return the rows of all machines' GRPO steps as a Markdown table; what was not measured is empty."""
    lines = [["machine", "row", "model", "date", *_COLUMNS], ["---"] * (4 + len(_COLUMNS))]
    for path in sorted((folder / "grpo_step").glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            figures = [row.get(part, {}).get(name) for part, name in _COLUMNS.values()]
            cells = ["" if figure is None else f"{figure:.2f}" for figure in figures]
            lines.append([path.stem, row["row"], row["model"], row["date"], *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(table(FOLDER))
