import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from components.environments.environment import Observation
from components.environments.openenv import OpenEnv
from components.environments.pool import Environments
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig
from tests import tiny

NAME = "components.environments.openenv:OpenEnv"
PROBLEM = tiny.problem(0, id="game/train/00137")
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": %s}}\n</tool_call>'


def _session(socket: ServerConnection) -> None:
    """Answer as a server of openenv-core does that holds this game: guess the last digit of the seed."""
    number, num_guesses = 0, 0
    for message in map(json.loads, socket):
        kind, data = message["type"], message["data"]
        reward = None
        if kind == "reset":
            number, num_guesses = data["seed"] % 10, 0
            text = f"Game {data['seed']}: guess a number from 0 to 9."
        elif not isinstance(data.get("number"), int):
            errors = [{"loc": ["number"], "msg": "Input should be a valid integer"}]
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            socket.send(json.dumps({"type": "error", "data": error}))
            continue
        else:
            num_guesses += 1
            found = data["number"] == number
            text = "Found." if found else "Too high." if data["number"] > number else "Too low."
            reward = 1 / num_guesses if found else 0.0
        reply = {"observation": {"text": text}, "reward": reward, "done": text == "Found."}
        socket.send(json.dumps({"type": "observation", "data": reply}))


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server with a game."""
    with serve(_session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def _begun(url: str, problem: Problem = PROBLEM, **arguments: Any) -> OpenEnv:
    environment = OpenEnv(url, **arguments)
    environment.reset(problem)
    return environment


def test_a_trajectory_is_a_session_whose_seed_is_the_number_of_its_problem(url: str) -> None:
    """In the processes of the pool; two trajectories do not disturb each other."""
    tools = ToolsConfig(environment=NAME, arguments={"url": url}, call_format="tool_call", num_workers=1)
    with Environments(tools) as environments:
        first, second = environments.begin(PROBLEM), environments.begin(tiny.problem(0, id="game/train/00002"))
        answers = [
            one.step(CALL % number).result() for one, number in ((first, 3), (second, 2), (first, 8), (first, 7))
        ]
        assert [answer.failure for answer in answers] == [None] * 4
        assert [answer.observation for answer in answers] == [
            Observation("Too low.", rewards={"openenv": 0.0}),
            Observation("Found.", done=True, rewards={"openenv": 1.0}),
            Observation("Too high.", rewards={"openenv": 0.0}),
            Observation("Found.", done=True, rewards={"openenv": 1 / 3}),
        ]


def test_a_call_of_another_form_is_answered_and_ends_nothing(url: str) -> None:
    """What the server refuses, what cannot be read, and two calls; a turn without a call is the last one."""
    environment = _begun(url)
    assert environment.step(CALL % '"x"').text.startswith("Error: number: Input should be a valid integer")
    assert environment.step("<tool_call>{").text.startswith("The call does not end")
    assert environment.step(CALL % 1 + CALL % 2).text == "An action is one call; write one per turn."
    assert environment.step(CALL % 7).rewards == {"openenv": 1.0}
    assert environment.step("It is 7.") == Observation(done=True)
    environment.close()
    # With a field for the text of a turn, and more fields, which the server gets as they are.
    environment = _begun(url, action_field="number", reset={"seed": 5}, observation_field="text")
    assert environment.step("five").text.startswith("Error: number: Input should be a valid integer")
    environment.close()
    assert _begun(url, action={"number": 5}, reset={"seed": 5}).step(CALL.replace('"number": %s', "")).done


def test_the_questions_of_a_dataset_are_the_first_observations(url: str) -> None:
    """Row by row, in the order of the seeds that training begins with."""
    command = [sys.executable, "-m", "components.environments.openenv", url, "3"]
    rows = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    assert [row["question"] for row in rows] == [f"Game {seed}: guess a number from 0 to 9." for seed in range(3)]


def test_a_server_that_is_not_there_is_named_before_anything_is_trained() -> None:
    """By the key of its arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tools = ToolsConfig(environment=NAME, arguments={"url": f"http://127.0.0.1:{port}"}, num_workers=1)
    with pytest.raises(PipelineError, match=r"tools\.arguments: .*OpenEnv cannot be made .*ConnectionRefusedError"):
        Environments(tools)
