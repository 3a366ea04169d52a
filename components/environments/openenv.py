"""Environments that an OpenEnv server holds, over its WebSocket: a connection is a trajectory's session.

No package of OpenEnv is needed here: a server is asked by its published protocol, in JSON.

    python -m components.environments.openenv URL NUMBER > data/own/problems.jsonl

writes the first observations of seeds 0 to NUMBER - 1 as questions of a dataset.
"""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from components.environments.environment import Observation
from components.shared.problem import Problem
from components.shared.tools import find_calls

_NUMBER = re.compile(r"\d*$")
_MAX_MESSAGE_BYTES = 16 << 20
_MAX_SHOWN_CHARACTERS = 300


class OpenEnv:
    """One session on an OpenEnv server: each turn of the model is an action of it."""

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        action: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to the server at `url`, such as `http://127.0.0.1:8000`.

        `action_field` is the field of an action that gets the text of a turn; None where the model calls functions, of
        which the arguments are the action, and a turn without a call is the last one. `observation_field` is the field
        of an observation that the model reads; None for the only one that is text, or else all in JSON. `action` and
        `reset` are further fields of every action, and of the request that begins a session.
        """
        from websockets.sync.client import connect

        address = re.sub(r"^http", "ws", url).rstrip("/") + "/ws"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(address, max_size=_MAX_MESSAGE_BYTES, proxy=None))
        self._action_field, self._observation_field = action_field, observation_field
        self._action, self._reset = dict(action or {}), dict(reset or {})

    def reset(self, problem: Problem) -> None:
        """Begin a session whose seed is the number at the end of the problem's id."""
        self.begin(int(_NUMBER.findall(problem.id)[0] or 0))

    def begin(self, seed: int) -> str:
        """Begin a session, and return its first observation."""
        return self._shown(self._request("reset", {"seed": seed, **self._reset})["observation"])

    def step(self, text: str) -> Observation:
        """Take an action with what the model wrote in a turn."""
        if self._action_field is not None:
            own: Mapping[str, Any] = {self._action_field: text}
        else:
            calls = find_calls(text, "tool_call")
            if not calls:
                return Observation(done=True)
            if len(calls) > 1:
                return Observation("An action is one call; write one per turn.")
            if calls[0].error:
                return Observation(calls[0].error)
            own = calls[0].arguments
        result = self._request("step", {**own, **self._action})
        if "errors" in result:  # the model's action is of another form than the server accepts
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in result["errors"])
            return Observation(f"Error: {wrong}")
        rewards = {} if result["reward"] is None else {"openenv": float(result["reward"])}
        return Observation(self._shown(result["observation"]), bool(result["done"]), rewards)

    def close(self) -> None:
        """End the session."""
        self._open.close()

    def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv())
        found: dict[str, Any] = reply["data"]
        if reply["type"] == "error" and not (kind == "step" and "errors" in found):
            raise RuntimeError(f"the server: {json.dumps(found)[:_MAX_SHOWN_CHARACTERS]}")
        return found

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self._observation_field is not None:
            value = observation[self._observation_field]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


if __name__ == "__main__":
    for number in range(int(sys.argv[2])):
        environment = OpenEnv(sys.argv[1])
        print(json.dumps({"question": environment.begin(number), "answer": "none"}))
        environment.close()
