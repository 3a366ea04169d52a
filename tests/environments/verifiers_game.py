"""A game of several turns, as packages for verifiers write it: its code speaks as the user of the agent."""

from collections.abc import Iterator

import verifiers.v1 as vf

from tests.environments.verifiers_tasks import Config, Data


class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded by the game alone."""


class Tasks(vf.Taskset[Guess, Config]):  # type: ignore[misc]
    """A task for each number, with a system message."""

    def load(self) -> Iterator[Guess]:
        """Yield them."""
        for number in range(self.config.num_numbers):
            yield Guess(Data(prompt=f"Guess {number}.", system_prompt="Be brief.", number=number), self.config.task)


class GameConfig(vf.EnvConfig):  # type: ignore[misc]
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):  # type: ignore[misc]
    """Asks until the number is found; "crash" ends it otherwise."""

    async def run(self, task: Guess, agents: vf.Agents) -> None:
        """Play."""
        async with agents.player.interaction(task) as interaction:
            segment, num_guesses = await interaction.turn(), 1
            while segment.last_reply != str(task.data.number):
                if segment.last_reply == "crash":
                    raise LookupError("it crashed")
                segment, num_guesses = await interaction.turn(f"No, not {segment.last_reply}."), num_guesses + 1
        interaction.trace.record_reward("game", 1 / num_guesses, 1.0)


__all__ = ["Game", "Tasks"]
