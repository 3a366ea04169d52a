"""The graph under KFP's local runner: `python -m ... PARAMS PIPELINE_ROOT JOURNAL [--containers]`.

Started by `pipelines.run.local`, which reads what comes out and shows the part of it that is meant for people.
"""

import json
import signal
import sys
from pathlib import Path

from kfp import local

from components.preflight.config import load_params, stage_sections
from pipelines.graph import local_graph


def main() -> None:
    """Run every task of the graph, one after the other, in this environment or each in a container of its image."""
    params, pipeline_root, journal = (Path(argument) for argument in sys.argv[1:4])
    # Standard output is a pipe here: without this, lines would arrive in blocks of 8 KiB.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    graph, names = local_graph(stage_sections(load_params(params)))
    journal.write_text(json.dumps({"event": "planned", "tasks": names}) + "\n", encoding="utf-8")
    runner: local.SubprocessRunner | local.DockerRunner
    if sys.argv[4:]:
        from pipelines.run import containers  # the package `docker` is there for this alone

        runner = containers.runner(journal.parent, journal)
    else:
        # Ctrl-C is for the stage at work, which ends in good order, and the graph with it.
        signal.signal(signal.SIGINT, lambda *_: None)
        runner = local.SubprocessRunner(use_venv=False)
    local.init(runner, pipeline_root=str(pipeline_root), raise_on_error=False)
    graph()


if __name__ == "__main__":
    main()
