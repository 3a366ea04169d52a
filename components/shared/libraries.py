"""Shared libraries that installed packages load and that are missing on this machine."""

import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    with ThreadPoolExecutor() as pool:
        processes = pool.map(lambda path: run(["ldd", path]), files)
    installed, missing = {path.name for path in files}, dict[str, str]()
    for path, process in zip(files, processes, strict=True):
        for name in _MISSING.findall(process.stdout):
            if name not in installed and not _OPTIONAL.match(name):
                missing.setdefault(name, path.relative_to(site).as_posix())
    return missing


if __name__ == "__main__":
    print(missing_libraries())
