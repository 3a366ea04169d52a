"""What the check of a cluster reads and removes; the check itself is tried on clusters."""

import subprocess
from contextlib import suppress
from pathlib import Path

from components.shared.results import Record, Result
from components.shared.work import locked_work
from tests.pipelines.cluster.cluster_check import STEP, UPLOAD, cleaning
from tests.pipelines.cluster.recorded import RECORDINGS, needs_recordings


def test_only_what_the_check_made_is_removed_from_the_volume(tmp_path: Path) -> None:
    """Its registry, runs, unfinished work and results; another run's stay."""
    ours, theirs = "11111111-ours", "22222222-theirs"
    for name, run_id, seed in (("cluster-check-1", ours, 123456789), ("cluster-check-2", theirs, 1234567890)):
        root = tmp_path / "grpo-pipeline"
        for folder in (tmp_path / name / "registry", root / run_id / "train_sft/reference"):
            folder.mkdir(parents=True)
        fingerprint = {"config": {"seed": seed}, "inputs": {}, "code": ""}
        work = locked_work(root / "work", "train_grpo", fingerprint)
        with suppress(KeyboardInterrupt), work as unfinished:
            (unfinished.folder / "checkpoint").touch()
            raise KeyboardInterrupt
        outputs = {"reference": root / run_id / "train_sft/reference"}
        Record(root / "work", "train_sft", fingerprint).add(Result.of(run_id, outputs, seconds=1.0, metrics={}))
    script = cleaning(str(tmp_path), "cluster-check-1", 123456789, [ours])
    subprocess.run(["sh", "-c", script], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster-check-2", "grpo-pipeline"]
    assert sorted(path.name for path in (tmp_path / "grpo-pipeline").iterdir()) == [theirs, "work"]
    left = sorted(path for path in (tmp_path / "grpo-pipeline/work").glob("*/*") if not path.name.startswith("."))
    assert [path.parent.name for path in left] == ["train_grpo", "train_sft"]
    assert all("1234567890" in path.read_text() or theirs in path.read_text() for path in left if path.is_file())


@needs_recordings
def test_lines_that_are_read_are_those_of_real_logs() -> None:
    """Where Kubeflow's launcher puts a file, and how far GRPO is."""
    trained = UPLOAD.findall((RECORDINGS / "logs/train_sft-succeeded.txt").read_text())
    assert {source for source, *_ in trained} == {"minio"}
    assert any(key.endswith("/training/curves.csv") for *_, key in trained)
    steps = list(map(int, STEP.findall((RECORDINGS / "logs/train_grpo-terminated.txt").read_text())))
    assert (steps[0], steps[-1]) == (85, 216)
