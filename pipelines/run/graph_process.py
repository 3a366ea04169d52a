"""The graph under KFP's local runner, `python -m ... PARAMS PIPELINE_ROOT JOURNAL [--containers]`.

Started by `pipelines.run.local`, which reads what comes out and shows the part of it that is meant for people.
"""

import json
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp import local
from kfp.local import graph_utils

from components.preflight.config import resolved
from pipelines.grpo_post_training import grpo_post_training


def main() -> None:
    """Run every task of the graph, one after the other, in this environment or each in a container of its image."""
    params, pipeline_root, journal = (Path(argument) for argument in sys.argv[1:4])
    # Standard output is a pipe here: without this, lines would arrive in blocks of 8 KiB.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    graph_utils.topological_sort_tasks = _in_one_order(graph_utils.topological_sort_tasks)
    tasks = grpo_post_training.pipeline_spec.root.dag.tasks
    order = reversed(graph_utils.topological_sort_tasks(tasks))
    planned = [{"stage": _stage(name), "title": _title(tasks[name])} for name in order]
    journal.write_text(json.dumps({"event": "planned", "tasks": planned}) + "\n", encoding="utf-8")
    runner = _in_containers(journal) if sys.argv[4:] else _in_processes()
    local.init(runner, pipeline_root=str(pipeline_root), raise_on_error=False)
    grpo_post_training(**{f"{stage}_config": section for stage, section in resolved(params).items()})


def _in_processes() -> local.SubprocessRunner:
    # Ctrl-C is for the stage at work, which ends in good order, and the graph with it.
    signal.signal(signal.SIGINT, lambda *_: None)
    return local.SubprocessRunner(use_venv=False)


def _in_containers(journal: Path) -> local.DockerRunner:
    from pipelines.run import containers  # the package `docker` is there for this alone

    return containers.runner(journal.parent, journal)


def _in_one_order(sort: Callable[[Mapping[str, Any]], list[str]]) -> Callable[[Mapping[str, Any]], list[str]]:
    """Have KFP take tasks in the same order in each run: protobuf maps, which it iterates over, have none."""
    return lambda tasks: sort(dict(sorted(tasks.items())))


def _stage(task: str) -> str:
    """The stage that a task runs: KFP numbers the second and later tasks of a component."""
    return re.sub(r"-\d+$", "", task).replace("-", "_")


def _title(task: Any) -> str:
    title: str = task.task_info.name
    return title.replace("-", "_")


if __name__ == "__main__":
    main()
