"""The user's code that a params file names as `package.module:name`: its file and its digest."""

import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path

from components.shared.lineage import Material, file_digest, folder_digest


def own_code_materials(names: Iterable[str]) -> dict[str, Material]:
    """Return a digest of each module `package.module:name`, together with the user's modules that it imports.

    Installed packages and files that the code opens do not count. A module without a file is left out.
    """
    files_by_name = {name: _files(name) for name in names}
    return {name: _material(files) for name, files in files_by_name.items() if files}


def own_file(name: str) -> Path | None:
    """Return the file of a module `package.module:name` without importing it; None if there is none."""
    package, *names = name.partition(":")[0].split(".")
    try:
        spec = find_spec(package)
    except ValueError:  # such as `__main__`
        spec = None
    spec = spec or PathFinder.find_spec(package, [str(Path.cwd())])
    for submodule in names:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: in a folder without __init__.py, a full name would require importing its parents.
        spec = PathFinder.find_spec(submodule, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _files(name: str) -> dict[str, Path]:
    """Return the files of a module and of those that it imports, by their names; empty if it has no file."""
    file = own_file(name)
    if file is None:
        return {}
    name = name.partition(":")[0]
    installed = (sys.prefix, sys.base_prefix)
    folders = [folder for folder in [str(Path.cwd()), *sys.path] if not folder.startswith(installed)]
    finder = ModuleFinder(folders, excludes=["components", "pipelines"])  # in the fingerprint of a stage already
    try:
        finder.import_hook(name)
    except Exception:  # importing the code will report the error
        return {name: file}
    paths = {each: getattr(module, "__file__", None) for each, module in finder.modules.items()}
    imported = {each: Path(path) for each, path in paths.items() if path}
    return {**imported, name: file}


def _material(files: dict[str, Path]) -> Material:
    """Return the digest of one file, or of several by their modules' names, and their total size."""
    digests = {name: file_digest(file) for name, file in sorted(files.items())}
    sha256 = next(iter(digests.values())) if len(digests) == 1 else folder_digest(digests)
    return Material(sha256=sha256, size_bytes=sum(file.stat().st_size for file in files.values()))
