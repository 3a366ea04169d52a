"""The pages that Kubeflow's UI shows in its side panel, in a browser and as wide as that panel."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import load_params
from components.preflight.form import form_of, page, sections_of
from components.prepare_data.prepare import STAGE as PREPARE_DATA
from components.register.registration_page import registration_page
from components.report.report import STAGE as REPORT
from components.shared import jsonl, stage
from components.shared.deployment import DeploymentConfig
from components.shared.errors import DataRejectedError
from components.validate_data.validate import STAGE as VALIDATE_DATA
from pipelines.run import index
from tests.pipelines.test_runs import make_outputs
from tests.presets import ROOT
from tests.register.registrations import make_config, make_policy, run_register
from tests.report.synthetic import make_run
from tests.report.test_report import CONFIG

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PROBE = Path(__file__).with_name("page_probe.js").read_text(encoding="utf-8")
_CLICKS = """
const led = [];
for (const link of document.querySelectorAll("a[href]")) {
  scrollTo(0, 0);
  const stays = !link.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));
  const box = document.querySelector(link.hash).getBoundingClientRect();
  led.push(stays && box.top > -1 && box.bottom < innerHeight + 1);
}
parent.postMessage(JSON.stringify(led), "*");
"""
"""Clicks on every link of the page, and tells the page around the frame whether the page stays and shows its target."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each page with all that it may have: reports, one with tools, good and rejected problems, a configuration."""
    folder = tmp_path_factory.mktemp("pages")
    params = load_params(ROOT / "params/smoke.yaml")
    stage.run(REPORT, CONFIG, {**make_run(folder / "run"), "report": folder / "report"})
    stage.run(REPORT, CONFIG, {**make_run(folder / "tool-run", tools=True), "report": folder / "tools"})
    stage.run(PREPARE_DATA, params.prepare_data, {"problems": folder / "problems"})
    stage.run(VALIDATE_DATA, params.validate_data, {name: folder / name for name in ("problems", "validation")})
    rows = [row | {"answer": "1"} for _, row in jsonl.read_rows(folder / "problems/train.jsonl")]
    jsonl.write_rows(folder / "problems/train.jsonl", rows)
    with pytest.raises(DataRejectedError):
        stage.run(VALIDATE_DATA, params.validate_data, {"problems": folder / "problems", "validation": folder / "bad"})
    form = form_of(params) | {"data_repository": f"https://git.example.com/{'team/' * 20}data.git"}
    sections, _ = sections_of(form, DeploymentConfig(), commit="0" * 40, secrets={})
    written = {
        name: (folder / name / "report.html").read_text("utf-8") for name in ("report", "tools", "validation", "bad")
    }
    written["index"] = index.write(make_outputs(folder / "index"), str(folder / "index/registry")).read_text("utf-8")
    registered = make_config(folder / "register")
    policy, registration = make_policy(folder / "policy"), folder / "registration"
    run_register(registered, policy, folder / "report", registration)
    written["registration"] = registration_page(registered.model_dump(), registration)
    return {**written, "configuration": page(form, sections, {"data at commit": "0" * 40})}


def found(text: str, frame: str, script: str, folder: Path, *options: str) -> Any:
    """What a script finds, as JSON, once a browser has shown a page in a frame with these attributes beside it."""
    around = f'<!doctype html><script>{script}</script><iframe {frame} srcdoc="{html.escape(text)}"></iframe>'
    (folder / "frame.html").write_text(f'{around}<pre id="found"></pre>', encoding="utf-8")
    always = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    command = [str(BROWSER), *always, *options, (folder / "frame.html").as_uri()]
    for _ in range(5):  # on a busy machine the browser may print the page before the frame has sent its message
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        if printed := re.search(r'<pre id="found">(.+?)</pre>', shown, re.DOTALL):
            return json.loads(html.unescape(printed[1]))
    raise AssertionError(shown[-500:])


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1400, True)])
@pytest.mark.parametrize("name", ["report", "tools", "validation", "bad", "configuration", "index", "registration"])
def test_a_page_can_be_read(name: str, width: int, dark: bool, pages: dict[str, str], tmp_path: Path) -> None:
    """Neither it nor a table scrolls sideways; no text is cut, covered, outside, below 12 pixels or hard to see."""
    preferred = f"--blink-settings=preferredColorScheme={int(not dark)}"
    layout = found(pages[name], f'style="width:{width}px;border:0"', _PROBE, tmp_path, preferred)
    assert layout.pop("scroll_width") <= width
    assert layout.pop("num_texts") > 20
    kinds = ("outside", "small", "cut", "overlaps", "faint", "scrolls")
    assert layout == {**{kind: [] for kind in kinds}, "dark": dark}


@pytest.mark.parametrize("name", ["report", "tools", "validation", "bad", "configuration", "registration"])
def test_links_work_in_the_frame_of_kubeflow(name: str, pages: dict[str, str], tmp_path: Path) -> None:
    """It is sandboxed and has no address: a link to a part of the page scrolls there, and the page stays."""
    targets = re.findall(r'<a [^>]*href="([^"]*)"', pages[name])
    assert all(target.startswith("#") for target in targets)
    text = pages[name].replace("</body>", f"<script>{_CLICKS}</script></body>")
    frame = 'sandbox="allow-scripts" style="width: 800px; height: 300px"'
    listen = 'addEventListener("message", (event) => (document.querySelector("pre").textContent = event.data))'
    assert found(text, frame, listen, tmp_path, "--virtual-time-budget=5000") == [True] * len(targets)


def test_the_page_on_a_registration_says_where_the_model_is(pages: dict[str, str]) -> None:
    """Its version, the addresses, the code, what each stage took, and the command that fetches it."""
    text = re.sub(r"<[^>]+>|\s", " ", pages["registration"])
    registry = re.escape(re.findall(r"--registry (\S+)", text)[0])
    assert re.search(rf"grpo-pipeline fetch grpo-policy@v0\.0\.1 grpo-policy --registry {registry} ", text)
    for row in (rf"Registry +{registry} ", r"Weights +next to the registry", r"Digest of the weights +[0-9a-f]{64} "):
        assert re.search(row, text), row
    assert re.search(r"register +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d:\d\d:\d\d", text)
    assert re.search(r"Work +\d:\d\d:\d\d", text)
