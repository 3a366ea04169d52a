"""The user's code that a params file names as `package.module:name`: its file and its digest."""

import re
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path

from components.shared.lineage import Material, file_digest, folder_digest

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)


def is_custom(name: str) -> bool:
    """Return whether the name of a reward or an environment is that of a custom one, `package.module:name`."""
    return _NAME.fullmatch(name) is not None


def custom_code_materials(names: Iterable[str]) -> dict[str, Material]:
    """Return a digest of each module `package.module:name`, together with the user's modules that it imports.

    Installed packages and files that the code opens do not count. A module without a file is left out.
    """
    materials: dict[str, Material] = {}
    for name in names:
        files = _files(name)
        if files:
            digests = {module: file_digest(file) for module, file in sorted(files.items())}
            sha256 = next(iter(digests.values())) if len(digests) == 1 else folder_digest(digests)
            size_bytes = sum(file.stat().st_size for file in files.values())
            materials[name] = Material(sha256=sha256, size_bytes=size_bytes)
    return materials


def code_file(name: str) -> Path | None:
    """Return the file of a module `package.module:name` without importing it; None if there is none."""
    package, *submodules = name.partition(":")[0].split(".")
    try:
        spec = find_spec(package)
    except ValueError:  # such as `__main__`
        spec = None
    spec = spec or PathFinder.find_spec(package, [str(Path.cwd())])
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name: in a folder without __init__.py, a full name would require importing its parents.
        spec = PathFinder.find_spec(submodule, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _files(name: str) -> dict[str, Path]:
    """Return the files of a module and of the modules that it imports, by module name; empty if it has no file."""
    file = code_file(name)
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
