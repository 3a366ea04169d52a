"""Environments of an OpenEnv server, over its WebSocket: each trajectory has a connection, which is a session there.

The package openenv is not needed here: its protocol is JSON messages.

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

_MAX_MESSAGE_BYTES = 16 << 20
_MAX_SHOWN_CHARACTERS = 300


class OpenEnv:
    """One session on an OpenEnv server, in which each turn of the model is an action."""

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        action: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to the server at `url`, such as `http://127.0.0.1:8000`.

        `action_field` is the field of an action that takes the text of a turn. None means that the model calls
        functions: the arguments of a call are the action, and a turn without a call is the last one.
        `observation_field` is the field of an observation that the model reads. None means the only field with text,
        or all fields as JSON if several fields or none have text. The fields in `action` are added to every action,
        those in `reset` to the request that begins a session.
        """
        from websockets.sync.client import connect

        address = re.sub(r"^http", "ws", url).rstrip("/") + "/ws"
        self._connection = ExitStack()
        self._socket = self._connection.enter_context(connect(address, max_size=_MAX_MESSAGE_BYTES, proxy=None))
        self._action_field, self._observation_field = action_field, observation_field
        self._fixed_fields, self._reset = dict(action or {}), dict(reset or {})

    def reset(self, problem: Problem) -> None:
        """Begin a session whose seed is the number at the end of the problem's id."""
        number = re.search(r"\d+$", problem.id)
        self.begin(int(number.group()) if number else 0)

    def begin(self, seed: int) -> str:
        """Begin a session, and return its first observation."""
        return self._text(self._request("reset", {"seed": seed, **self._reset})["observation"])

    def step(self, text: str) -> Observation:
        """Take the action that the model wrote in a turn."""
        if self._action_field is not None:
            return self._act({self._action_field: text})
        calls = find_calls(text, "tool_call")
        if not calls:
            return Observation(done=True)
        if len(calls) > 1:
            return Observation("An action is one call; write one per turn.")
        if calls[0].error:
            return Observation(calls[0].error)
        return self._act(calls[0].arguments)

    def _act(self, fields: Mapping[str, Any]) -> Observation:
        """Send an action with these fields; return the server's observation, or why it refuses the action."""
        result = self._request("step", {**fields, **self._fixed_fields})
        if "errors" in result:  # the server has validated the action
            errors = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in result["errors"]]
            return Observation(f"Error: {'; '.join(errors)}")
        rewards = {} if result["reward"] is None else {"openenv": float(result["reward"])}
        return Observation(self._text(result["observation"]), bool(result["done"]), rewards)

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request; return the data of the reply. RuntimeError for any error other than an invalid action."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv())
        answer: dict[str, Any] = reply["data"]
        is_invalid_action = kind == "step" and "errors" in answer
        if reply["type"] == "error" and not is_invalid_action:
            raise RuntimeError(f"the server: {json.dumps(answer)[:_MAX_SHOWN_CHARACTERS]}")
        return answer

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return the part of a server's observation that the model reads."""
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
