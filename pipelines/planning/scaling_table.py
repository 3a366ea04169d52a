"""How a run scales, as aligned text."""

from collections.abc import Sequence

from pipelines.planning.scaling import Point, limit_of, loss_at
from pipelines.planning.step_time import OTHER, PHASES, SYNC
from pipelines.planning.tables import aligned

_SHOWN = [phase for phase in PHASES if phase not in (SYNC, OTHER)]


def scaling(title: str, points: Sequence[Point]) -> str:
    """Return a row per number of GPUs, and where it stops."""
    rows = [[title, "prompts", "step s", *_SHOWN, "rest", "efficiency", "fits"]]
    for point in points:
        times = [point.time.phase(phase) for phase in _SHOWN]
        rest = point.time.phase(SYNC) + point.time.phase(OTHER)
        figures = [f"{seconds:.1f}" for seconds in (point.time.total, *times, rest)]
        fits = "yes" if point.fits else "no"
        rows.append([f"{point.num_gpus} GPUs", f"{point.prompts:,}", *figures, f"{point.efficiency:.0%}", fits])
    return aligned(rows) + "\n" + _limit(points)


def _limit(points: Sequence[Point]) -> str:
    first, last = points[0], points[-1]
    limit = limit_of(points)
    loss = limit or loss_at(first, last)
    fact = (
        f"falls below 50 % at {loss.num_gpus} GPUs"
        if limit
        else f"is still {last.efficiency:.0%} on {loss.num_gpus} GPUs"
    )
    text = f"Efficiency {fact}; {loss.share:.0%} of what is lost is {loss.phase}, {loss.term}:\n{loss.reason}."
    if last.prompts < last.num_gpus:
        text += f"\nA step has {last.prompts} prompts, and more GPUs than that are refused."
    return text
