"""A game of two players, as a package for verifiers writes it."""

import verifiers.v1 as vf

from tests.environments.verifiers_tasks import Tasks


class DuelConfig(vf.EnvConfig):  # type: ignore[misc]
    """Two players."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):  # type: ignore[misc]
    """Never played."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Do nothing."""


__all__ = ["Duel", "Tasks"]
