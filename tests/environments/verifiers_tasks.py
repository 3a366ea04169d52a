"""Tasks of one turn with a reward, as packages for verifiers write them."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):  # type: ignore[misc]
    """A number to guess."""

    number: int


class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One turn, rewarded where it has the number."""

    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def found(self, trace: vf.Trace) -> float:
        """Look for it."""
        return float(str(self.data.number) in trace.nodes[-1].message.content)


class Config(vf.TasksetConfig):  # type: ignore[misc]
    """How many tasks there are."""

    num_numbers: int = 5


class Tasks(vf.Taskset[Guess, Config]):  # type: ignore[misc]
    """A task for each number."""

    def load(self) -> Iterator[Guess]:
        """Yield them."""
        for number in range(self.config.num_numbers):
            yield Guess(Data(prompt=f"Guess number {number}.", number=number), self.config.task)


__all__ = ["Tasks"]
