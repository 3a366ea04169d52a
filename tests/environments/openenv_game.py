"""A guessing game on a real server of OpenEnv, on the port that is given: run by Python with `openenv-core`."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):  # type: ignore[misc]
    """A number."""

    number: int


class Hint(Observation):  # type: ignore[misc]
    """What the game says of it."""

    text: str


class Game(Environment):  # type: ignore[misc]
    """The seed's last digit is to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Hint:
        """Begin."""
        self._number, self._num_guesses = (seed or 0) % 10, 0
        return Hint(text=f"Game {seed}: guess a number from 0 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Hint:
        """Compare."""
        self._num_guesses += 1
        if action.number == self._number:
            return Hint(text="Found.", done=True, reward=1 / self._num_guesses)
        return Hint(text="Too high." if action.number > self._number else "Too low.", reward=0.0)

    @property
    def state(self) -> State:
        """Nothing but a count."""
        return State(step_count=self._num_guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
