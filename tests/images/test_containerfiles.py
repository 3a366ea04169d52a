"""What every image promises, as it is written in the Containerfiles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "images").glob("*/Containerfile"))
IDS = [path.parent.name for path in FILES]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "DO_NOT_TRACK": "1",
}
WRITTEN = {
    "light": ["HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "DVC_SITE_CACHE_DIR"],
    "gpu": [
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "NUMBA_CACHE_DIR",
        "VLLM_CACHE_ROOT",
    ],
}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_the_base_of_an_image_is_an_argument(path: Path) -> None:
    """No tag that moves: a stage starts from an argument, from nothing, or from another stage of the file."""
    stages: set[str] = set()
    for reference, name in re.findall(r"^FROM (\S+) AS (\S+)$", path.read_text(), flags=re.MULTILINE):
        assert re.fullmatch(r"\$\{(BASE|DEPENDENCIES)\}|scratch", reference) or reference in stages, reference
        stages.add(name)
    assert len(stages) == len(re.findall("^FROM", path.read_text(), flags=re.MULTILINE))
    assert ":latest" not in path.read_text()
    assert re.findall(r"^ARG \w+=", path.read_text(), flags=re.MULTILINE) == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_an_image_does_not_run_as_root(path: Path) -> None:
    """The last user that is set has a number, which is not root's."""
    assert re.findall(r"^USER (\S+)$", path.read_text(), flags=re.MULTILINE)[-1] == "65532:0"


def test_images_stay_offline() -> None:
    """What would ask a hub or report to somebody is switched off; the gpu image is made from the light one's stage."""
    light = _environment("light")
    assert {name: light.get(name) for name in OFFLINE} == OFFLINE
    assert _environment("gpu")["VLLM_NO_USAGE_STATS"] == "1"
    assert "FROM ${DEPENDENCIES}" in (ROOT / "images/gpu/Containerfile").read_text()


@pytest.mark.parametrize("image", WRITTEN)
def test_caches_and_homes_are_in_tmp(image: str) -> None:
    """Caches and homes are in /tmp: with that writable, the rest of a container may be read-only."""
    environment = _environment(image)
    for name in WRITTEN[image]:
        assert environment[name] == "/tmp" or environment[name].startswith("/tmp/"), name


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_packages_come_from_the_lock_and_before_the_code(path: Path) -> None:
    """Nothing is installed by name; a change of the code makes a new layer of a megabyte, and no other."""
    text = path.read_text()
    assert "pip install" not in text
    assert text.count("requirements.lock") == 1
    assert text.index("COPY components") > text.rindex("packages.py install")
    assert text.index("COPY components") > text.rindex("apt-get install")


def test_the_build_context_has_only_what_is_built_from() -> None:
    """The ignore file lets in what decides what is in an image, and nothing else."""
    from images.build import BAKED

    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(BAKED) - {".dockerignore"}


def _environment(image: str) -> dict[str, str]:
    text = (ROOT / "images" / image / "Containerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.+)$", text, flags=re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())
