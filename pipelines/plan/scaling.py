"""The same run on more and more GPUs: where it stops scaling, and which term limits it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipelines.plan.hardware import Gpu
from pipelines.plan.memory import fits
from pipelines.plan.run import Run
from pipelines.plan.step_time import StepTime, step_time

_DOUBLINGS = 8
"""Numbers of GPUs that are looked at: those of the run, and twice as many again and again."""
_MIN_EFFICIENCY = 0.5
"""Below this more GPUs are not worth it."""
_FEW = "for each token of the longest completion, however few completions a GPU has"
_GATHERS = "ZeRO 3 gathers all weights for each micro-batch, however many GPUs there are"
_REASONS = {
    ("sampling", "reading weights"): f"decoding reads all weights {_FEW}",
    ("sampling", "starting operations"): f"decoding launches every operation again {_FEW}",
    ("sampling", "reading caches"): "groups stay whole: a GPU has at least one, and reads its caches",
    ("sampling", "arithmetic"): "groups stay whole: no GPU samples less than one",
    ("sampling", "prompts"): "groups stay whole: no GPU reads less than one prompt",
    ("sampling", "choosing tokens"): "groups stay whole: no GPU samples less than one",
    ("reference", "arithmetic"): "groups stay whole: no GPU scores less than one for each optimizer step",
    ("reference", "moving activations"): "groups stay whole: no GPU scores less than one for each optimizer step",
    ("reference", "gathering weights"): _GATHERS,
    ("update", "arithmetic"): "groups stay whole: no GPU trains on less than one for each optimizer step",
    ("update", "moving activations"): "groups stay whole: no GPU trains on less than one for each optimizer step",
    ("update", "gathering weights"): _GATHERS,
    ("update", "reducing gradients"): "gradients of all weights are summed over all GPUs after each micro-batch",
    ("update", "gathering new weights"): "all new weights go to all GPUs after each optimizer step",
    ("weight sync", "weights by files"): "one process writes all new weights for the samplers",
    ("weight sync", "weights over the network"): "one process sends all new weights to the samplers",
    ("weight sync", "weights over a socket"): "one process sends all new weights to the samplers",
    ("weight sync", "weights within the GPU"): "every GPU receives all new weights",
    ("weight sync", "gathering weights"): "every GPU receives all new weights",
    ("checkpoints", "writing"): "one process writes the whole checkpoint",
    ("other", "the rest"): "groups stay whole: no process handles less than one",
    ("other", "gathering completions"): "every process receives the completions of all others",
}


@dataclass(frozen=True)
class Point:
    """One number of GPUs."""

    num_gpus: int
    prompts: int
    time: StepTime
    efficiency: float
    """Completions per second and GPU, as a fraction of the first point's."""
    fits: bool


@dataclass(frozen=True)
class Loss:
    """What a number of GPUs loses against perfect scaling."""

    num_gpus: int
    phase: str
    term: str
    """The one with the largest loss."""
    share: float
    """Fraction of the whole loss."""
    reason: str
    """Why the term does not shrink."""


def simulate(run: Run, gpu: Gpu, scaling: Literal["strong", "weak"]) -> list[Point]:
    """Return a point for each number of GPUs, from the run's own on; with `weak` scaling its prompts grow with them.

    Servers keep their share of the GPUs.
    """
    numbers = [run.num_gpus << doublings for doublings in range(_DOUBLINGS)]
    points: list[Point] = []
    for number in numbers:
        servers = max(round(run.num_servers * number / run.num_gpus), 1) if run.num_servers else 0
        prompts = run.prompts * (number // numbers[0] if scaling == "weak" else 1)
        scaled = replace(run, num_gpus=number, num_servers=servers, prompts=prompts)
        time = step_time(scaled, gpu)
        first_s = (points[0].time.total if points else time.total) * numbers[0] / run.prompts
        points.append(Point(number, prompts, time, first_s / (time.total * number / prompts), fits(scaled, gpu)))
    return points


def limit_of(points: Sequence[Point]) -> Loss | None:
    """Return the loss where efficiency falls below a half; None where it does not."""
    below = next((point for point in points if point.efficiency < _MIN_EFFICIENCY), None)
    return None if below is None else loss_at(points[0], below)


def loss_at(first: Point, point: Point) -> Loss:
    """Return the loss of a point against the first."""
    ideal = first.num_gpus * point.prompts / (point.num_gpus * first.prompts)
    lost = {key: seconds - ideal * first.time.terms.get(key, 0.0) for key, seconds in point.time.terms.items()}
    phase, term = max(lost, key=lambda key: lost[key])
    total = sum(seconds for seconds in lost.values() if seconds > 0)
    reason = _REASONS.get((phase, term), f"{term} does not shrink with more GPUs")
    return Loss(point.num_gpus, phase, term, lost[phase, term] / total if total else 0.0, reason)


def draw(curves: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write efficiency over the number of GPUs, a line for each curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot([point.num_gpus for point in points], [point.efficiency for point in points], marker="o", label=label)
    axes.axhline(_MIN_EFFICIENCY, color="grey", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.num_gpus for points in curves.values() for point in points])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="GPUs", ylabel="efficiency per GPU", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
