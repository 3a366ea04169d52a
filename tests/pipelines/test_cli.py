import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.preflight.config import load_params
from components.shared.environment import ENDPOINT_VARIABLES
from pipelines.cli import main
from tests.presets import preset

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train_grpo:", "train_gpro:"), "train_gpro: unknown key; did you mean `train_grpo`?"),
        (("  group_size:", "  groupsize:"), "train_grpo.groupsize: unknown key; did you mean `group_size`?"),
        (
            ("kl: {coefficient: ", "kl: {coefficient: -"),
            "train_grpo.loss.kl.coefficient: input should be greater than or equal",
        ),
    ],
)
def test_a_wrong_key_or_value_stops_before_anything_runs(
    change: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with file, line and key, exit code 2, and no trace of a run."""
    path = tmp_path / "wrong.yaml"
    text = (ROOT / "params.yaml").read_text()
    line = text[: text.index(change[0])].count("\n") + 1
    path.write_text(text.replace(*change, 1))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--params", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:{line}: {message}")
    assert error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["wrong.yaml"]


def test_a_params_file_can_be_printed_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it extends and all defaults, as a params file that means the same."""
    assert main(["config", "--params", str(ROOT / "params/smoke.yaml")]) == 0
    (tmp_path / "full.yaml").write_text(capsys.readouterr().out)
    assert load_params(tmp_path / "full.yaml") == load_params(ROOT / "params/smoke.yaml")


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest mistake of all gets no traceback."""
    assert main(["run", "--params", "params/nope.yaml"]) == 2
    assert capsys.readouterr().err == "error: params/nope.yaml: no such params file\n"


def test_data_says_which_file_it_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`grpo-pipeline data` outside the project says so in one line."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "--source", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: data/raw: contains no DVC pointers")


def test_fetch_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A registry that is not there is not made by asking for a version."""
    registry = tmp_path / "registry"
    assert main(["fetch", "v0.0.1", str(tmp_path / "policy"), "--registry", str(registry)]) == 2
    assert capsys.readouterr().err == f"error: {registry}: no such registry; nothing has been registered there\n"
    assert not registry.exists()


@pytest.mark.parametrize("command", [["submit"], ["schedule", "apply", "weekly", "--cron", "0 0 2 * * 1"]])
def test_a_missing_address_is_reported_before_the_graph_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Compiling takes half a minute, after which nothing could be done with the graph."""
    for name in (*ENDPOINT_VARIABLES, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert main([*command, "--pipeline", "nope.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: no address of Kubeflow Pipelines: pass --endpoint URL or set ")


@pytest.mark.slow
def test_a_failing_stage_ends_the_run_with_its_own_exit_code(tmp_path: Path) -> None:
    """The graph stops at the stage, whose error is shown as one line; the log is kept and named."""
    path = tmp_path / "malformed.yaml"
    params = preset()
    params["prepare_data"]["sources"] = [{"kind": "gsm8k", "train": "rows.jsonl", "test": "rows.jsonl"}]
    params["report"]["gate"]["target"] = ["gsm8k"]
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 20 + "{}\n" * 30)
    path.write_text(yaml.safe_dump(params))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from pipelines.cli import main; raise SystemExit(main(['run', '--params', {str(path)!r}]))",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: rows.jsonl: 30 of 50 rows are malformed")
    assert done.stderr.count("\n") == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == ["[1/9] prepare_data"]
    (log,) = tmp_path.glob("outputs/runs/*-malformed/kfp.log")
    assert str(log.relative_to(tmp_path)) in done.stdout
    assert not (tmp_path / "outputs/latest").exists()
