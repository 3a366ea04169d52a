"""Environments of the package verifiers (0.4, `verifiers.v1`): the policy is the model of an episode's agent.

The package runs the episode in an event loop, which stops where the agent calls its model and goes on with the turn.
`python -m components.environments.verifiers TASKSET NUMBER` prints prompts of tasks as questions of a dataset.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from functools import cache
from itertools import islice, takewhile
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import AssistantMessage, Response, SystemMessage, UserMessage, content_text
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from components.environments.environment import Observation
from components.shared.problem import Problem


class Verifiers:
    """An episode of an environment that is installed as a package; a problem's question is the prompt of its task."""

    def __init__(self, taskset: str, num_tasks: int = 10_000, arguments: Mapping[str, Any] | None = None) -> None:
        """Load the first `num_tasks` tasks of a taskset, given its id and arguments, and its environment."""
        self._environment, self._tasks = _load(taskset, num_tasks, json.dumps(arguments or {}))

    def reset(self, problem: Problem) -> None:
        """Begin the episode of a task, up to the agent's first call of its model."""
        task = self._tasks.get(problem.question.strip())
        if task is None:
            raise LookupError(f"no task has the question of problem {problem.id} as its prompt; raise num_tasks?")
        self._loop = asyncio.new_event_loop()
        self._harness = _Turns(vf.HarnessConfig(id="null"))
        self._episode = self._loop.create_task(self._play(task))
        self._advance()

    def step(self, text: str) -> Observation:
        """Give `text` to the agent as its model's answer; return the next messages, or at the end the rewards."""
        self._harness.answer.set_result(text)
        if self._advance():
            rewards = {name: each.value for name, each in self._harness.trace.rewards.items() if each is not None}
            return Observation(done=True, rewards=rewards)
        messages = self._harness.messages.result()
        newest_first = takewhile(lambda message: message.role != "assistant", reversed(messages))  # since the last turn
        texts = [content_text(message.content) for message in newest_first]
        return Observation("\n".join(reversed(texts)))

    def close(self) -> None:
        """Cancel the episode if it has not ended."""
        self._episode.cancel()
        self._loop.run_until_complete(asyncio.gather(self._episode, return_exceptions=True))
        self._loop.close()

    def _advance(self) -> bool:
        """Run the episode to the next call of the model or to its end; return whether it has ended."""
        messages = self._harness.messages = self._loop.create_future()
        self._loop.run_until_complete(asyncio.wait([self._episode, messages], return_when=asyncio.FIRST_COMPLETED))
        if self._episode.done():
            self._episode.result()  # raises the error of an episode that has failed
        return self._episode.done()

    async def _play(self, task: vf.Task) -> None:
        """Run the episode of a task to its end and compute its rewards; RuntimeError if it fails."""
        agents = vf.Agents(self._environment.config, self._harness.agent)
        await self._environment.setup(agents)
        await self._environment.run(task, agents)
        trace = self._harness.trace
        if trace is None or trace.errors:
            raise RuntimeError(trace.errors[0].message if trace else "the episode has ended before its first turn")
        await self._environment.finalize(task, vf.Episode(task=trace.task, traces=[trace]))


class _Turns(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """The program of an agent, which calls its model once per turn: its futures connect it with `Verifiers`."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False
    trace: Any = None
    messages: "asyncio.Future[list[Any]]"  # the input of the model's next turn
    answer: "asyncio.Future[str]"  # the text of that turn

    def agent(self, _: str, config: vf.AgentConfig) -> vf.Agent:
        """Return an agent that runs this program."""
        here = {"model": "policy", "harness": self.config, "runtime": vf.SubprocessConfig()}
        agent = vf.Agent(config.model_copy(update=here))
        agent.harness = self
        return agent

    async def launch(self, ctx: Any, trace: vf.Trace, runtime: Any, *others: Any) -> vf.ProgramResult:
        """Wait for one turn of the model, and record it."""
        self.trace = trace
        system, prompt = self.resolve_prompt(others[-1])  # the data of the task
        messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        if system is not None:
            messages.insert(0, SystemMessage(content=system))
        self.answer = asyncio.get_running_loop().create_future()
        self.messages.set_result(messages)
        reply = AssistantMessage(content=await self.answer)
        response = Response(id="", created=int(time.time()), model="policy", message=reply, finish_reason="stop")
        prepare_turn(trace, messages).commit(response)
        return vf.ProgramResult(0, "", "")


@cache
def _load(taskset: str, num_tasks: int, arguments: str) -> tuple[vf.Env, dict[str, vf.Task]]:
    """Return the environment, and its tasks by prompt; `arguments` is JSON because the cache needs a hashable key."""
    environment = load_environment(resolve_env_config({"taskset": {"id": taskset, **json.loads(arguments)}}))
    tasks = {task.data.prompt_text.strip(): task for task in islice(environment.taskset, num_tasks)}
    num_agents = sum(isinstance(value, vf.AgentConfig) for _, value in environment.config)
    has_tools = any(task.hooks("stop") or task.toolsets(task.config) for task in islice(tasks.values(), 1))
    if num_agents > 1 or has_tools:
        raise ValueError(f"{taskset}: has several agents, tools or stop hooks; supported here: one agent that chats")
    return environment, tasks


if __name__ == "__main__":
    for prompt, task in _load(sys.argv[1], int(sys.argv[2]), "{}")[1].items():
        question: Any = prompt
        if task.data.system_prompt:
            system = {"role": "system", "content": task.data.system_prompt}
            question = [system, {"role": "user", "content": prompt}]
        print(json.dumps({"question": question, "answer": "none"}))
