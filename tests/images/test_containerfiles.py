"""What every image promises, as it is written in the Containerfiles."""

import re
from pathlib import Path

import pytest

from images.build import BAKED
from tests.presets import ROOT

FILES = sorted((ROOT / "images").glob("*/Containerfile"))
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "1",
    "DO_NOT_TRACK": "1",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_an_image_is_built_from_what_is_pinned(path: Path) -> None:
    """A stage starts from an argument, from nothing, or from another stage; packages come from the lock.

    The code comes last: a change of it makes a new layer of a megabyte, and no other. The last user is not root.
    """
    text, stages = path.read_text(), set()
    for reference, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE):
        assert re.fullmatch(r"\$\{(BASE|DEPENDENCIES)\}|scratch", reference) or reference in stages, reference
        stages.add(name)
    assert len(stages) == len(re.findall("^FROM", text, flags=re.MULTILINE))
    assert ":latest" not in text
    assert re.findall(r"^ARG \w+=", text, flags=re.MULTILINE) == []
    assert "pip install" not in text
    assert text.count("requirements.lock") == 1
    assert text.index("COPY components") > text.rindex("packages.py install")
    assert text.index("COPY components") > text.rindex("apt-get install")
    assert re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)[-1] == "65532:0"


def test_images_stay_offline() -> None:
    """What would ask a hub or report to somebody is switched off; the gpu image is made from the light one's stage."""
    light = _environment("light")
    assert {name: light.get(name) for name in OFFLINE} == OFFLINE
    assert _environment("gpu")["VLLM_NO_USAGE_STATS"] == "1"
    assert "FROM ${DEPENDENCIES}" in (ROOT / "images/gpu/Containerfile").read_text()


def test_the_build_context_has_only_what_is_built_from() -> None:
    """The ignore file lets in what decides what is in an image, and nothing else."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(BAKED) - {".dockerignore"}


def _environment(image: str) -> dict[str, str]:
    text = (ROOT / "images" / image / "Containerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.+)$", text, flags=re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())
