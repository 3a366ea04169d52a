"""Sampling with vLLM, on a copy of the policy's weights that is brought up to date and verified before each rollout.

Weights go through a folder, which is in memory if vLLM is on the same host, or straight to vLLM's processes.
"""

import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from components.environments.pool import Answer
from components.policy.checkpoint import Checkpoint, save
from components.policy.engine import Policy
from components.policy.logprobs import completion_logprobs
from components.policy.lora import merged_state_dict, save_adapters
from components.policy.packing import TokenSequence, pack
from components.rollout.sampler import Completion, Sampling
from components.rollout.trajectory import RolloutContext, Status, Trajectory
from components.rollout.vllm.servers import Request, SampledTokens, Submit, VllmServers
from components.rollout.vllm.verification import verify_logprobs
from components.shared.problem import Problem

_MAX_PROBE_TOKENS = 16
"""Completion tokens of a probe: enough to tell weights apart. At temperatures other than 1, each costs a request."""


def complete(
    engine: VllmServers, checkpoint: Checkpoint, problems: Sequence[Problem], sampling: Sampling
) -> list[list[Completion]]:
    """Return the completions of each problem, sampled by an engine; the weights in `checkpoint` are not used.

    Stop texts, and calls in fenced blocks, need an engine that was started with a tokenizer. If `checkpoint` is on a
    GPU, requests have no seeds: with seeds vLLM samples row by row, and its results still vary, as its batches depend
    on time.
    """
    seeds: Sequence[int | None] = [None] * len(problems)
    if checkpoint.device.type != "cuda":
        # A seed for each group: vLLM adds the number of the completion in its group.
        generator = random.Random(sampling.seed)
        seeds = [generator.getrandbits(53) for _ in problems]
    groups = RolloutContext(checkpoint, sampling, max_tokens=engine.max_tokens).begin(problems)
    with engine.submitting() as submit:
        _Turns(submit, checkpoint, sampling, seeds).run_to_completion(groups)
    return [[each.completion() for each in group] for group in groups]


def _params(checkpoint: Checkpoint, sampling: Sampling, stop: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's `SamplingParams` without those that `_request` adds."""
    params = {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        # Only the end tokens of the policy end a completion, not those in the model's generation_config.json.
        "stop_token_ids": list(checkpoint.end_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(stop),
    }
    return {**params, "stop": list(stop)} if stop else params


class _Turns:
    """Runs trajectories to completion with a request for each turn; the first turns of a group are one request."""

    def __init__(self, submit: Submit, checkpoint: Checkpoint, sampling: Sampling, seeds: Sequence[int | None]) -> None:
        """`seeds` has the seed of each problem's requests; None for requests without a seed."""
        self._submit, self._seeds = submit, seeds
        turn_stops = checkpoint.format.turn_stops if sampling.environments is not None else ()
        self._params = _params(checkpoint, sampling, (*sampling.stop, *turn_stops))
        self._answers: SimpleQueue[tuple[Future[Any], list[Trajectory]]] = SimpleQueue()
        """Answers of the engine and of environments, each with the trajectories that receive it."""
        self._places: dict[Trajectory, tuple[int, int]] = {}
        """The index of each trajectory's problem, and its number in the group."""
        self._num_open = 0
        """Trajectories that are not done."""

    def run_to_completion(self, groups: Sequence[list[Trajectory]]) -> None:
        """Return once all trajectories are done."""
        for problem, group in enumerate(groups):
            if group[0].status is Status.SAMPLING:  # else the prompt fills the context, and the whole group is done
                self._places |= {each: (problem, number) for number, each in enumerate(group)}
                self._request(group)
        self._num_open = len(self._places)
        try:
            while self._num_open:
                answer, trajectories = self._answers.get()
                self._receive(answer.result(), trajectories)
        finally:
            for each in self._places:
                each.close()

    def _receive(self, answer: Answer | list[SampledTokens], trajectories: Sequence[Trajectory]) -> None:
        """Add the answer of their environment or engine to trajectories, and request the next one."""
        if isinstance(answer, Answer):
            (trajectory,) = trajectories
            trajectory.receive(answer)
        else:
            for trajectory, sampled in zip(trajectories, answer, strict=True):
                trajectory.extend(sampled.token_ids, sampled.logprobs)
        for trajectory in trajectories:
            if trajectory.status is Status.SAMPLING:
                self._request([trajectory])
            elif trajectory.pending_answer is not None:
                self._wait_for(trajectory.pending_answer, [trajectory])
            else:
                self._num_open -= 1

    def _request(self, trajectories: list[Trajectory]) -> None:
        """Begin to sample the next turn of a trajectory, or the first turns of a whole group."""
        first = trajectories[0]
        problem, number = self._places[first]
        seed = self._seeds[problem]
        if seed is not None and first.num_sampled:  # not the seed of its first turn
            seed = random.Random(f"{seed}/{number}/{first.num_sampled}").getrandbits(53)
        params = {**self._params, "n": len(trajectories), "max_tokens": first.tokens_left, "seed": seed}
        request = Request((*first.prompt_ids, *first.ids), params)
        self._wait_for(self._submit(request), trajectories)

    def _wait_for(self, answer: "Future[Any]", trajectories: list[Trajectory]) -> None:
        """Put the answer into the queue when it is there."""
        answer.add_done_callback(lambda each: self._answers.put((each, trajectories)))


class VllmSampler:
    """A `Sampler` on an engine with a copy of the weights."""

    def __init__(
        self, engine: VllmServers, checkpoint: Checkpoint, *, temperature: float, max_mismatch: float, folder: Path
    ) -> None:
        """`max_mismatch` is in nats per token. Weights that go through files are written to `folder`."""
        self.engine, self._checkpoint, self._folder = engine, checkpoint, folder
        self._temperature, self._max_mismatch = temperature, max_mismatch
        self._version: int | None = None
        self._logprobs_M: Tensor | None = None
        """The trainer's log-probabilities of the probes' completion tokens, end to end, at `_version`."""
        self.sleep, self.close = engine.sleep, engine.close

    def generate(self, problems: Sequence[Problem], sampling: Sampling) -> list[list[Completion]]:
        """See `Sampler`."""
        return complete(self.engine, self._checkpoint, problems, sampling)

    def attach(self, policy: Policy, probes: Sequence[TokenSequence]) -> None:
        """See `Sampler`."""
        self._policy = policy
        self._probes = [TokenSequence(each.prompt_ids, each.completion_ids[:_MAX_PROBE_TOKENS]) for each in probes]
        # The same batches in each process, as a forward pass of sharded weights waits for those of all processes.
        longest = max(map(len, self._probes))
        self._batches = pack(
            self._probes, max_tokens=longest, device=self._checkpoint.device, padded=self._checkpoint.is_padded
        )

    def update_weights(self, version: int) -> float:
        """See `Sampler`; does nothing if the engine has this version."""
        started = time.monotonic()
        if version != self._version:
            previous, self._version = self._version, version
            if self.engine.weights_by == "folder":
                self._write(version, previous)
                self.engine.set_weights(version, self._folder / str(version))
            else:
                self._send(version)
            self._verify_logprobs()
            self._policy.ranks.barrier("the end of loading weights")
            if previous is not None and self._policy.ranks.is_main:
                shutil.rmtree(self._folder / str(previous), ignore_errors=True)
        return time.monotonic() - started

    def _send(self, version: int) -> None:
        """Send the weights from memory, from the main rank to shared servers, or from each rank to its own server."""
        ranks = self._policy.ranks
        is_sender = ranks.is_main or not self.engine.shared
        with self._policy.gather_full_parameters():
            if is_sender:
                self.engine.set_weights(version, merged_state_dict(self._checkpoint.model))
        ranks.barrier("the sending of weights")
        if not is_sender:
            self.engine.set_weights(version, None)  # the main rank has sent them

    def _write(self, version: int, previous: int | None) -> None:
        """Write the weights to the folder `version`, and remove all others except `previous`, which is in use."""
        adapters_only = self.engine.synchronise == "adapters"
        with self._policy.gather_full_parameters(only_trained=adapters_only):
            if self._policy.ranks.is_main:
                for path in self._folder.glob("*"):  # also those that a killed run has left
                    if path.name != str(previous):
                        shutil.rmtree(path, ignore_errors=True)
                partial = self._folder / f".{version}.partial"
                partial.mkdir()  # without parents: a watchdog removes the folder when the run is killed
                if adapters_only:
                    save_adapters(self._checkpoint.model, partial)
                else:
                    save(self._checkpoint, partial)
                partial.rename(self._folder / str(version))
        self._policy.ranks.barrier("the writing of weights")

    def _verify_logprobs(self) -> None:
        """Raise StaleWeightsError if log-probabilities of the probes by a server differ from the trainer's."""
        num_tokens = sum(len(probe.completion_ids) for probe in self._probes)
        new_M = completion_logprobs(self._policy, self._batches, num_tokens).cpu()
        for url, logprobs_of_probes in self.engine.score(self._probes, self._temperature).items():
            sampler_M = torch.tensor(list(chain(*logprobs_of_probes)), dtype=torch.float64)
            verify_logprobs(sampler_M, new_M, self._logprobs_M, max_mismatch=self._max_mismatch, name=url)
        self._logprobs_M = new_M
