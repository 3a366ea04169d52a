"""The user's code that a params file names as `package.module:name`: its file and digest, and its errors."""

import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.util import find_spec
from modulefinder import ModuleFinder
from pathlib import Path
from traceback import walk_tb

from components.shared.lineage import Material, file_digest, folder_digest

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.ASCII)
_OTHER_CODE = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]), "<frozen ")


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


def raised_at(error: BaseException) -> str:
    """Return the last line of the user's code in a traceback, else its last line, as ` (own.py, line 3)`, if any."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    places = [place for place in places if not place[0].startswith(_OTHER_CODE)] or places
    return f" ({Path(places[-1][0]).name}, line {places[-1][1]})" if places else ""


def import_problem(module: str, error: BaseException) -> str:
    """Return why a user's module cannot be imported: the error with its line, or where Python looks for the module."""
    problem = f"module {module} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"{problem}; put it into the folder in which the command is run or into PYTHONPATH, or install it"
    if isinstance(error, ModuleNotFoundError):
        return f"{problem}{raised_at(error)}; install this package"
    return problem if isinstance(error, SyntaxError) else f"{problem}{raised_at(error)}"  # a SyntaxError has its line


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
