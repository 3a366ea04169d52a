"""Prints what the interpreter reads to import its standard library: files and folders it opens, folders it lists.

A script for an interpreter without site-packages: the shared libraries that its extension modules link to are known
once the modules are loaded.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_NOT_FOR_SOLUTIONS = ("_test", "_xx", "xx", "_tkinter")


def main() -> None:
    """Print both lists as JSON."""
    folders = [Path(folder) for folder in sys.path if Path(folder).is_dir()]
    entries = [entry for folder in folders for entry in folder.iterdir() if entry.name not in _INSTALLED]
    for entry in entries:
        if entry.suffix == ".so" and not entry.name.startswith(_NOT_FOR_SOLUTIONS):
            with contextlib.suppress(ImportError):  # built without a library that it needs
                importlib.import_module(entry.name.partition(".")[0])
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    print(json.dumps([sorted({*map(str, entries), *libraries}), [*map(str, folders)]]))


if __name__ == "__main__":
    main()
