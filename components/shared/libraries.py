"""Shared libraries that installed packages load and that are missing on this machine."""

import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_ALTERNATIVES = "bitsandbytes/libbitsandbytes_*"
"""Files for each release of CUDA, ROCm and oneAPI, of which the package loads one."""
_OPTIONAL = re.compile(r"lib(cuda|nvidia-ml|tbb|mpi|oshmem|pmix|uc[mpst]|fabric|gdrapi)\b")
"""Libraries of the GPU driver, which a container gets from its node, and of unused plugins."""


def missing_libraries() -> dict[str, str]:
    """Return each library that an installed package needs and the loader does not find, with a file that needs it.

    Libraries in other packages count as found: Python imports those packages first.
    """
    site = Path(sysconfig.get_path("platlib"))
    files = sorted(path for path in site.rglob("*.so*") if path.is_file() and not path.match(_ALTERNATIVES))
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(_ldd, files))
    installed, missing = {path.name for path in files}, dict[str, str]()
    for path, output in zip(files, outputs, strict=True):
        for name in _MISSING.findall(output):
            if name not in installed and not _OPTIONAL.match(name):
                missing.setdefault(name, path.relative_to(site).as_posix())
    return missing


def _ldd(path: Path) -> str:
    return subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    print(missing_libraries())
