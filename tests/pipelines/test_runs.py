"""The commands on the runs of this machine, and the page over all runs and versions."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.register.snapshot import Snapshot
from components.report.report import STAGE
from components.shared import durable, jsonl, lineage, stage
from components.shared.errors import PipelineError
from components.shared.page import percent
from pipelines.run.history import LOCK, resolve
from pipelines.run.index import write
from pipelines.run.listing import disk
from pipelines.run.settings import heading
from tests.pipelines.conftest import Program
from tests.register.registrations import make_config, make_policy, run_register
from tests.report.synthetic import make_run
from tests.report.test_report import CONFIG

FINISHED, FAILED = "20260102T030405Z-params", "20260103T030405Z-smoke"
STOPPED, EMPTY = "20260104T030405Z-smoke-2", "20260105T030405Z-empty"


def _journal(run: Path, *events: dict[str, Any], end: str = "") -> None:
    (run / "journal.jsonl").write_text("\n".join([*map(json.dumps, events), end]))


def make_outputs(folder: Path) -> Path:
    """A folder of outputs with a finished run and all that may become of others, and a registry beside it."""
    outputs, stages = folder / "outputs", make_run(folder / "stages")
    stage.run(STAGE, CONFIG, {**stages, "report": folder / "report"})
    policy = make_policy(folder / "policy")
    version = run_register(make_config(folder), policy, folder / "report", folder / "registration")
    trained = {"stage": "train_grpo", "event": "started", "outputs": {"training": str(stages["grpo_training"])}}
    failed = {"stage": "evaluate", "event": "failed", "error": "<b>no memory</b>", "exit_code": 2}
    message = {"stage": "vllm", "event": "message", "text": "server 0 of rank 0 has ended"}
    journals: dict[str, list[Any]] = {
        FINISHED: [trained, {"stage": "register", "event": "finished"}],
        FAILED: [trained, failed, message],
        STOPPED: [{"stage": "prepare_data", "event": "started", "outputs": {}}],
        EMPTY: [],
    }
    for name, events in journals.items():
        (outputs / "runs" / name).mkdir(parents=True)
        _journal(outputs / "runs" / name, *events, end='{"stage": "half wri')
    summary = jsonl.read_json(folder / "report/summary.json")
    jsonl.write_json(outputs / "runs" / FINISHED / "summary.json", {**summary, "version": version, "exit": 0})
    (outputs / "runs" / FINISHED / "report.html").touch()
    (outputs / "runs" / FAILED / "summary.json").write_text('{"verdict": ')
    (outputs / "runs/mine").mkdir()
    return outputs


@pytest.fixture
def outputs(made_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs: a finished one, one that failed, one that was stopped and one that did not begin."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made_runs / "outputs", tmp_path / "outputs")


def test_runs_are_listed_the_newest_first(outputs: Path, program: Program) -> None:
    """With their state, accuracies, verdict, version and size; the same as JSON."""
    with (outputs / "runs" / FAILED / "weights").open("wb") as file:
        file.truncate(5_000_000)
    runs = json.loads(program("runs", "list", "--json").out)
    assert [run["state"] for run in runs] == ["stopped", "stopped at prepare_data", "failed at evaluate", "finished"]
    assert runs[2]["bytes"] >= 5_000_000
    _, *rows = program("runs", "list").lines
    assert [row.split()[0] for row in rows] == [run["name"] for run in runs]
    assert percent(runs[3]["accuracy"]["grpo"]) in rows[3]
    assert runs[3]["version"] == "grpo-policy@v0.0.1"
    assert "5.0 MB" in rows[2]


def test_a_run_is_found_by_part_of_its_name(outputs: Path) -> None:
    """Or as the one started last; what is ambiguous or missing is refused with the names there are."""
    assert resolve("0103T", outputs).name == FAILED
    assert resolve("latest", outputs).name == EMPTY
    (outputs / "latest").symlink_to(f"runs/{FINISHED}")
    assert resolve("outputs/latest", outputs).name == FINISHED
    assert resolve(str(outputs / "runs" / FAILED), outputs).name == FAILED
    with pytest.raises(PipelineError, match=f"smoke: 2 runs have this in their names: {STOPPED}, "):
        resolve("smoke", outputs)
    with pytest.raises(PipelineError, match=f"no run `nope` in .*; the runs there are {EMPTY}, "):
        resolve("nope", outputs)
    for name in (FINISHED, FAILED, EMPTY):
        durable.remove(outputs / "runs" / name)
    with pytest.raises(PipelineError, match="no run `` in"):  # also where there is only one
        resolve("", outputs)
    with pytest.raises(PipelineError, match="there are no runs"):
        resolve("latest", outputs / "runs")


def test_a_run_is_shown_with_its_stages(outputs: Path, program: Program) -> None:
    """What each took, what was reused, where it failed and what is saved."""
    (outputs / "work/checkpoints/step-000040").mkdir(parents=True)
    _journal(
        outputs / "runs" / FAILED,
        {"stage": "train_sft", "event": "finished", "seconds": 61.0, "reused_from": "earlier"},
        {"stage": "train_grpo", "event": "work", "folder": str(outputs / "work")},
        {"stage": "train_grpo", "event": "failed", "error": "no memory", "exit_code": 2},
    )
    base, own, first = (outputs / f"{name}.yaml" for name in ("base", "own", "first"))
    base.write_text("train_grpo: {num_steps: 9, group_size: 8}")
    own.write_text("extends: base.yaml\ntrain_grpo: {num_steps: 7, weights: {'m:f': 1, 'm:g': 2}, sources: [{a: 1}]}")
    first.write_text(heading(own, ["train_sft.seed=\n2", "train_grpo.sources=[]"]) + base.read_text())
    (outputs / "runs" / FAILED / "params.yaml").write_text(heading(first, ["evaluate.limit=5"]) + base.read_text())
    shown = program("runs", "show", FAILED).out
    assert f"{FAILED}: failed at train_grpo" in shown
    assert f"train_grpo   failed: no memory\n             step 40 is saved in {outputs / 'work'}\n" in shown
    keys = "steps: 7, train_grpo.weights.m:f: 1, train_grpo.weights.m:g: 2, train_sft.seed: 2, train_grpo.sources: []"
    assert "settings     train_grpo.num_" + f"{keys}, evaluate.limit: 5\n".replace(", ", "\n" + " " * 13) in shown
    assert json.loads(program("runs", "show", FAILED, "--json").out)["stages"][0]["reused_from"] == "earlier"


def test_runs_are_compared(outputs: Path, program: Program) -> None:
    """Keys that differ, accuracies and times side by side, and curves over common axes, each by its number."""
    for name, accuracies, tools in ((FINISHED, (0.0, 0.5, 1.0), "{turns: 4}"), (FAILED, (1.0, 0.5), "null")):
        run, num_steps = outputs / "runs" / name, len(accuracies)
        (run / "params.yaml").write_text(f"train_grpo: {{num_steps: {num_steps}, sources: [{{k: 4, tools: {tools}}}]}}")
        rows = [{"step": step, "accuracy": each, "kl": None} for step, each in enumerate(accuracies, start=1)]
        jsonl.write_rows(run / "steps.jsonl", rows)
        _journal(run, {"stage": "train_grpo", "event": "started", "outputs": {"training": str(run)}})
    text = program("runs", "compare", FINISHED, FAILED).out
    assert "params       train_grpo.num_steps: 3 -> 2\n" in text
    assert " train_grpo.sources.0.tools: {turns 4} -> null\naccuracy" in text
    assert " -> (absent)" in text
    (*_, first, second, both), plot = text.splitlines()[:-13], text.splitlines()[-13:]
    assert [first, second, both] == [f"{'':>9}{each}" for each in (f"1 {FINISHED}", f"2 {FAILED}", "* several curves")]
    top, bottom, middle = plot[0], plot[11], "".join(plot[1:11])
    assert top.split() == ["100", "%", "2", "1"]  # the label, then the second run's first step and the first run's last
    assert top.index("2") < len(top) // 2 < len(top) - 1
    assert bottom.split() == ["0", "%", "1"]
    assert middle.split() == ["*"]  # both have 50 % at the second step
    error = program("runs", "compare", FINISHED, FAILED, "--curve", "nonsense", code=2).error
    assert "--curve nonsense: no step has this figure; there are accuracy, kl, step" in error
    program("runs", "compare", FINISHED, code=2)


def test_a_run_is_found_by_what_is_said_of_it(outputs: Path, program: Program) -> None:
    """Its note and tags are listed and shown; the name of its params file stays known."""
    program("runs", "note", FAILED, "a larger rate", "--tag", "lr")
    for text in ("larger", "#lr", "failed"):
        (line,) = program("runs", "list", text).lines[1:]
        assert line.startswith(FAILED)
        assert line.endswith("#lr: a larger rate")
    assert "note         #lr: a larger rate\n" in program("runs", "show", FAILED).out
    assert program("runs", "list", "nowhere").out == "outputs/runs has no run that says 'nowhere'\n"
    assert resolve(FAILED, outputs).about.params == "smoke"


def test_a_removed_run_leaves_shared_files(outputs: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bytes without another link are freed; a running run stays, and any other without a yes."""
    finished, failed, stopped = (outputs / "runs" / name for name in (FINISHED, FAILED, STOPPED))
    for name, other, size in (("shared", finished, 1000), ("removed", stopped, 100)):
        (failed / name).write_bytes(bytes(size))
        os.link(failed / name, other / name)
    (outputs / "latest").symlink_to(f"runs/{FAILED}")
    lock = durable.lock_folder(failed / LOCK)
    assert program("runs", "rm", FAILED, "--yes", code=2).error == f"error: {FAILED}: is running; stop it first\n"
    lock.release()
    monkeypatch.setattr("builtins.input", lambda question: "n")
    program("runs", "rm", FAILED, code=1)
    freed = {"failed at evaluate": disk(failed)[0] - 1000 - 100, "stopped at prepare_data": disk(stopped)[0]}
    printed = re.findall(r": (.*), frees (\d+) bytes", program("runs", "rm", FAILED, STOPPED, "--yes").out)
    assert printed == [(state, str(size)) for state, size in freed.items()]
    assert not failed.exists()
    assert (finished / "shared").read_bytes() == bytes(1000)
    assert (outputs / "latest").resolve() == finished.resolve()


def test_the_report_is_opened_or_named(outputs: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is printed in any case: there may be no browser."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert program("runs", "open", FINISHED).out == f"outputs/runs/{FINISHED}/report.html\n"
    assert opened == [(outputs / "runs" / FINISHED / "report.html").as_uri()]
    assert "there is no report yet: the run is failed at evaluate" in program("runs", "open", FAILED, code=2).error


def test_garbage_is_what_no_run_needs(outputs: Path, program: Program) -> None:
    """Artifacts of runs that failed before a finished one, unfinished work of other code, and old runs if asked."""
    stopped, missed = (outputs / f"runs/2026010{day}T010203Z-params" for day in (1, 2))
    failed = outputs / "runs" / FAILED
    for run in (stopped, missed, failed):
        (run / "artifacts").mkdir(parents=True)
        (run / "artifacts/weights").write_bytes(bytes(2000))
    # Of a run that missed the gate the policy is registered nowhere, and took the longest to make.
    _journal(missed, {"stage": "train_grpo", "event": "finished"}, {"stage": "report", "event": "failed", "error": ""})
    work = {name: outputs / "work/train_sft" / name for name in ("same", "other", "empty", "used")}
    for name, folder in work.items():
        (folder / "checkpoints" / ("" if name == "empty" else "step-000010")).mkdir(parents=True)
        files = lineage.stage_files("train_sft") if name == "same" else {"shared/jsonl.py": "other"}
        (folder / "fingerprint.json").write_text(json.dumps({"files": files}))
    lock = durable.lock_folder(work["used"] / LOCK)
    shown = program("gc", "--dry-run").out
    assert shown.count("would remove ") == 4
    assert f"{stopped.name}/artifacts (2.0 kB): the run stopped, and a later one has finished" in shown
    program("gc")
    lock.release()
    assert [run.joinpath("artifacts").is_dir() for run in (stopped, missed, failed)] == [False, True, True]
    assert [name for name, folder in work.items() if folder.exists()] == ["same", "used"]
    lock = durable.lock_folder(failed / LOCK)
    for run, other in ((missed, STOPPED), (failed, STOPPED), (failed, missed.name)):  # `failed` stays
        os.link(run / "artifacts/weights", outputs / "runs" / other / run.name)
    dry_run, removal = (program("gc", "--keep", "1", *options).lines for options in (["--dry-run"], []))
    assert removal[-1] == dry_run[-1].replace("would be ", "")
    lock.release()
    assert {run.name for run in (outputs / "runs").glob("2*")} == {EMPTY, FAILED}
    program("gc", "--keep", "0", code=2)


def test_every_run_and_version_is_listed(made_runs: Path) -> None:
    """Whatever became of a run, the newest first; links, figures, curves, aliases, and which run made a version."""
    outputs = made_runs / "outputs"
    text = write(outputs, str(made_runs / "registry")).read_text(encoding="utf-8")
    target = jsonl.read_json(made_runs / "report/verdict.json")["target"]
    accuracies = f"{percent(target['sft']['accuracy'])} → {percent(target['grpo']['accuracy'])}"
    by_name = dict(re.findall(r'<tr id="([^"]*)">(.*?)</tr>', text, re.DOTALL))
    assert list(by_name) == sorted((path.name for path in outputs.glob("runs/2*")), reverse=True)
    states = {EMPTY: "stopped", STOPPED: "stopped at prepare_data", FINISHED: "finished"}
    for name, state in {**states, FAILED: "failed at evaluate: &lt;b&gt;no memory&lt;/b&gt;"}.items():
        assert state in by_name[name]
        assert ("<svg" in by_name[name]) == (name in (FINISHED, FAILED))
    assert text.count("<polyline") == 2 * 2  # two curves of each of two runs
    assert f'<a href="runs/{FINISHED}/report.html">params</a>' in by_name[FINISHED]
    (version,) = re.findall(r"<tr><td><code>grpo-policy@v0\.0\.1</code>.*?</tr>", text, re.DOTALL)
    assert ">candidate</span>" in version
    assert f'<a href="#{FINISHED}"' in version
    assert [accuracies in row for row in (by_name[FINISHED], version)] == [True, True]
    assert jsonl.read_json(made_runs / "registration/version.json")["registered"]["by"] in text


def test_a_damaged_version_is_listed_without_its_accuracy(made_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has finished must not end by it."""
    monkeypatch.setattr(Snapshot, "read_each", lambda *_: [(b'{"target": ', None)])
    text = write(made_runs / "outputs", str(made_runs / "registry")).read_text(encoding="utf-8")
    (version,) = re.findall(r"<tr><td><code>grpo-policy@v0\.0\.1</code>.*?</tr>", text, re.DOTALL)
    assert "→" not in version


def test_a_registry_that_cannot_be_read_is_named(made_runs: Path, tmp_path: Path) -> None:
    """The runs are listed all the same; each version and each run has the name of its registry if there are several."""
    text = write(made_runs / "outputs", (tmp_path / "gone").as_uri()).read_text(encoding="utf-8")
    assert "4 runs, 1 registered version" in text
    assert re.search(r'class="banner warning"><p>file://.*gone: .*git: ', text)
    registries = [str(made_runs / "registry"), str(shutil.copytree(made_runs / "registry", tmp_path / "other"))]
    pages = [write(made_runs / "outputs", each).read_text(encoding="utf-8") for each in registries]
    counts = [[page.count(f">in {registry}</div>") for registry in registries] for page in pages]
    assert counts == [[0, 0], [2, 1]]
