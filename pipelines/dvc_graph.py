"""Generates dvc.yaml, the graph for DVC, from the declarations of the stages; `make compile` runs it."""

from typing import Any

import yaml

from components.preflight.config import ALL_SECTIONS, STAGES
from components.shared import lineage
from pipelines.run.stages import load_stage

_HEAD = """\
# The graph for one machine under DVC: `dvc repro` computes what changed. Which params file it runs is in repro.yaml.
# Written from the stages by `make compile` (pipelines/dvc_graph.py); not to be edited.
"""
_OUTPUTS = "outputs/stages"
_MORE_INPUTS = {
    "prepare_data": ["data/own"],  # not data/raw: git has the pointers to its files, which may be missing here
    "train_sft": [f"{_OUTPUTS}/validate_data/validation"],  # nothing is trained on rejected data
}
_NOT_TRACKED = {"timings", "registration"}
"""Outputs that differ between runs of equal inputs, so that DVC must not compare them."""
_PLOTS = {
    "SFT loss": ("train_sft", "loss"),
    "GRPO reward and accuracy": ("train_grpo", ["reward", "accuracy", "worked_fraction"]),
    "GRPO completion length (tokens)": ("train_grpo", "completion_length_tokens"),
    "GRPO KL from the reference (nats per token)": ("train_grpo", "kl"),
    "GRPO entropy (nats per token)": ("train_grpo", "entropy"),
    "GRPO clip fraction": ("train_grpo", ["clip_high_fraction", "clip_low_fraction"]),
}
"""Stage whose curves are plotted, and their columns, by the title of the plot."""


def text() -> str:
    """Return the content of dvc.yaml."""
    graph = {
        "vars": ["repro.yaml"],
        "stages": {"params": _sections(), **{name: _stage(name) for name in STAGES}},
        "metrics": [f"{_OUTPUTS}/report/report/metrics.json"],
        "plots": [
            {title: {"x": "step", "y": {f"{_OUTPUTS}/{stage}/training/curves.csv": columns}}}
            for title, (stage, columns) in _PLOTS.items()
        ],
    }
    return _HEAD + yaml.safe_dump(graph, sort_keys=False, width=1000)


def _section_file(name: str) -> str:
    return f"{_OUTPUTS}/params/{name}.yaml"


def _sections() -> dict[str, Any]:
    """Return the DVC stage that writes the params to a file, and from each section what changes results to another.

    A stage reads the former and depends on the latter, so that it runs again only if one of these values has changed.
    """
    return {
        "cmd": f"grpo-pipeline config --params ${{params}} --sections {_OUTPUTS}/params",
        "deps": ["components", "params", "params.yaml"],
        "params": [{"repro.yaml": ["params"]}, {"${params}": None}],
        "outs": [_section_file(name) for name in (ALL_SECTIONS, *STAGES)],
    }


def _stage(name: str) -> dict[str, Any]:
    """Return the DVC stage that runs a stage: its command, the files that it depends on, and its outputs.

    A stage without tracked outputs, `register`, always runs: DVC cannot see whether the registry has the version.
    """
    stage = load_stage(name)
    inputs = {key: f"{_OUTPUTS}/{source}" for key, source in stage.inputs.items()}
    outputs = {key: f"{_OUTPUTS}/{name}/{key}" for key in stage.outputs}
    options = [f"--{key.replace('_', '-')} {folder}" for key, folder in {**inputs, **outputs}.items()]
    code = [f"components/{package}" for package in sorted(lineage.stage_packages(name))]
    tracked = [folder for key, folder in outputs.items() if key not in _NOT_TRACKED]
    return {
        "cmd": " ".join([f"python -m components.{name} --params {_section_file(ALL_SECTIONS)}", *options]),
        "deps": [*code, *sorted([_section_file(name), *inputs.values(), *_MORE_INPUTS.get(name, [])])],
        **({"outs": tracked} if tracked else {"always_changed": True}),
    }


if __name__ == "__main__":
    print(text(), end="")
