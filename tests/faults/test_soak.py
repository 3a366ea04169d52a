from pathlib import Path

import pytest

from tests.faults.place import Place
from tests.faults.rewards import MEASURES_VARIABLE
from tests.train_grpo.settings import grpo_config

pytestmark = pytest.mark.long(minutes=6)
NUM_STEPS, SETTLED_STEPS, GROUP_SIZE = 500, 200, 2
MOST_GROWTH_BYTES = 15e6
MOST_MORE = 10
"""Open files and threads of spare graders, which come and go: far fewer than the steps."""


def test_memory_files_and_threads_do_not_grow(place: Place, tmp_path: Path) -> None:
    """After the first steps memory, open files and threads stay as they are."""
    config = grpo_config(
        num_steps=NUM_STEPS,
        prompts_per_step=1,
        group_size=GROUP_SIZE,
        sampling__max_new_tokens=4,
        logged_completions_per_step=0,
        reward__weights={"accuracy": 1.0, "tests.faults.rewards:measuring": 1.0},
        checkpoint={"every_steps": 50, "keep_last": 1, "keep_best": False, "grace_s": 20},
    )
    measures = tmp_path / "measures"
    assert place.run(config, within_s=500, **{MEASURES_VARIABLE: str(measures)}) == 0, place.err
    rows = [[int(number) for number in line.split()] for line in measures.read_text().splitlines()]
    assert len(rows) == NUM_STEPS * GROUP_SIZE
    settled, last = (rows[steps * GROUP_SIZE - 1] for steps in (SETTLED_STEPS, NUM_STEPS))
    growth_bytes = last[0] - settled[0]
    assert growth_bytes < min(MOST_GROWTH_BYTES, 0.05 * settled[0])
    assert all(after - before < MOST_MORE for before, after in zip(settled[1:], last[1:], strict=True))
