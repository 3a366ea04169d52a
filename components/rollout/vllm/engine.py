"""Sampling with vLLM beside the trainer: its engine runs in a process of its own that this one starts and ends."""

import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.policy.config import Dtype
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.rollout.vllm.config import (
    VllmConfig,
    engine_arguments,
    environment,
    refuse_memory_of_vllm,
)
from components.rollout.vllm.requests import (
    Drawn,
    ScoringRequest,
    Tokens,
    completion,
    group_seeds,
    sampling_params,
    scoring_requests,
)
from components.rollout.vllm.transfer import Transfer
from components.rollout.vllm.verification import refuse_other_weights, shapes, weights_in
from components.shared.environment import OWNER_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from components.shared.system_errors import out_of_memory

_NAME = "vLLM in this process"
_LOCAL = "127.0.0.1"
_LINES_SHOWN = 20
_LOOK_S = 0.2
"""Between looks at whether the engine is still there."""


class EngineEndedError(RetryableError):
    """The engine's process has ended."""


class VllmEngine:
    """An `Engine` (see sampler.py) in a process beside the trainer, which starts with the weights of `checkpoint`.

    RetryableError where it ends, or takes longer than its deadlines.
    """

    shared = False

    def __init__(self, tokens: Tokens, checkpoint: Path, config: VllmConfig, *, dtype: Dtype, log: Path) -> None:
        self._tokens = tokens
        self.weights_by = config.weights_by
        self._deadline_s, self._log = config.request_deadline_s, log
        self._asleep = False
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        own = {OWNER_VARIABLE: str(os.getpid()), **_device_of_this_rank()}
        if config.weights_by == "ipc":
            # Handles of memory are no plain data; they come from this process alone, over a pipe.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        variables = {**environment(config, self._folder.name), **own}
        arguments = engine_arguments(config, dtype) | _beside_a_trainer()
        with (
            _refusing_what_cannot_start(log),
            _within(config.start_deadline_s, log),
            _environment(variables),
            _output_to(log),
            _in_sessions_of_their_own(),
        ):
            from vllm import LLM

            self._llm: Any = LLM(str(checkpoint), **arguments)
            _log_to(log)  # what this process logs from here on; starting the engine sets logging anew
        self._transfer = Transfer(self.weights_by, _Receiver(self._llm), deadline_s=self._deadline_s)

    def generate(
        self, questions: Sequence[str], *, num_samples: int, temperature: float, max_new_tokens: int, seed: int
    ) -> list[list[Completion]]:
        """See `Sampler`."""
        prompts = [self._tokens.prompt_ids(question) for question in questions]
        params = [
            sampling_params(
                self._tokens,
                num_samples=num_samples,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=group_seed,
            )
            for group_seed in group_seeds(seed, len(prompts))
        ]
        return [
            [completion(self._tokens, prompt, _drawn(output)) for output in answer.outputs]
            for prompt, answer in zip(prompts, self._generate(prompts, params), strict=True)
        ]

    def load_weights(self, folder: Path, version: int) -> None:
        """See `Sampler`."""
        with _within(self._deadline_s, self._log, self._llm):
            self._wake_up()
            self._llm.reset_prefix_cache()
            self._llm.collective_rpc("load_folder", args=(str(folder.resolve()), str(version)))
        self._verify(weights_in(folder))

    def receive_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Sampler`."""
        with _within(self._deadline_s, self._log, self._llm):
            self._wake_up()
            self._llm.reset_prefix_cache()
            self._transfer.send(weights, trainer_address=_LOCAL, num_receivers=1)
        self._verify(weights)

    def expect_weights(self, version: int) -> None:
        """See `Sampler`: nobody else sends to the engine of this process."""
        raise AssertionError("each process has an engine of its own")

    def prompt_logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Sampler`: there is one copy of the weights."""
        requests = [scoring_requests(sequence, temperature) for sequence in sequences]
        flat = [request for each in requests for request in each]
        answers = iter(self._generate([each.prompt for each in flat], [each.sampling_params for each in flat]))
        told = [
            [logprob for request in each for logprob in _told(request, next(answers), len(sequence.prompt_ids))]
            for sequence, each in zip(sequences, requests, strict=True)
        ]
        return {_NAME: told}

    def sleep(self) -> None:
        """Free the GPU's memory until the engine is next used; on CPUs there is nothing to free."""
        if torch.cuda.is_available():
            with _within(self._deadline_s, self._log, self._llm):
                self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """End the engine's process."""
        with suppress(Exception):  # whatever it says of its own end, it is ended
            self._llm.llm_engine.engine_core.shutdown()
        _kill_engines()
        self._folder.cleanup()

    def _verify(self, sent: Mapping[str, Tensor]) -> None:
        with _within(self._deadline_s, self._log, self._llm):
            held = self._llm.collective_rpc("held_weights", args=(shapes(sent),))
        refuse_other_weights(sent, held, name=_NAME)

    def _wake_up(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _generate(self, prompts: Sequence[tuple[int, ...]], params: Sequence[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        with _within(self._deadline_s, self._log, self._llm):
            self._wake_up()
            answers: list[Any] = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [SamplingParams(**each) for each in params],
                use_tqdm=False,
            )
            return answers


class _Receiver:
    """The engine as the end of a transfer of weights: see `Receiver`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)


def _beside_a_trainer() -> dict[str, Any]:
    """What vLLM is told where another model is in the memory of its GPU."""
    if not torch.cuda.is_available():
        return {}
    # It asks for this share to be free, though the size of its cache is given; by default for nearly all.
    return {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}


@contextmanager
def _refusing_what_cannot_start(log: Path) -> Iterator[None]:
    """An engine that ends before it has started would end the same way again."""
    before = log.stat().st_size if log.exists() else 0  # what attempts before have printed
    try:
        yield
    except Exception as error:
        if not isinstance(error, EngineEndedError) and out_of_memory(error) is None:
            raise
        printed = log.read_bytes()[before:].decode(errors="replace") if log.exists() else ""
        refuse_memory_of_vllm(printed, log, "train_grpo.sampler.vllm")
        tail = printed.splitlines()[-_LINES_SHOWN:]
        raise PipelineError("\n".join([f"vLLM could not start; the end of {log}:", *tail])) from error


@contextmanager
def _in_sessions_of_their_own() -> Iterator[None]:
    """Keep signals to this process's group, such as Ctrl-C, from the engine: it would end in the middle of a rollout.

    It ends with this process all the same (vllm_worker.py).
    """
    command_line = spawn.get_command_line

    def with_session(**arguments: Any) -> list[str]:
        command: list[str] = command_line(**arguments)
        place = command.index("-c") + 1
        return [*command[:place], f"import os; os.setsid(); {command[place]}", *command[place + 1 :]]

    spawn.get_command_line = with_session
    try:
        yield
    finally:
        spawn.get_command_line = command_line


def _device_of_this_rank() -> dict[str, str]:
    """What has vLLM use the GPU of this rank, and not the machine's first."""
    if not torch.cuda.is_available():
        return {}
    number = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def _drawn(output: Any) -> Drawn:
    told = [place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True)]
    return Drawn(tuple(output.token_ids), tuple(told))


def _told(request: ScoringRequest, answer: Any, start: int) -> list[float]:
    """The log-probabilities in an answer: those of its prompt from `start` on, if it has them, and the next token's."""
    own = zip(answer.prompt_logprobs[start:], request.prompt[start:], strict=True) if answer.prompt_logprobs else ()
    return [place[token].logprob for place, token in (*own, (answer.outputs[0].logprobs[0], request.token))]


@contextmanager
def _within(deadline_s: float, log: Path, llm: Any = None) -> Iterator[None]:
    """Give the block up, with RetryableError, where it takes longer or the engine's process ends meanwhile."""
    done, overdue = threading.Event(), threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + deadline_s
        while not done.wait(_LOOK_S):
            if time.monotonic() > deadline:
                overdue.set()
                _kill_engines()
            if llm is not None and not _engines():
                _wake(llm.llm_engine.engine_core)
            if overdue.is_set():
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:  # vLLM raises whatever its engine's process died of
        if out_of_memory(error) is not None:  # it would be refused again; who asked knows what helps
            raise
        raise _told_of(error, deadline_s if overdue.is_set() else None, log) from error
    finally:
        done.set()
        watcher.join()


def _told_of(error: Exception, missed_s: float | None, log: Path) -> Exception:
    """What an error of vLLM's means to the run; `missed_s` is the deadline, where it was missed."""
    if missed_s is not None:
        return RetryableError(f"vLLM did not finish within {missed_s:g} s; what it printed is in {log}")
    if isinstance(error, ValueError):
        return PipelineError(f"vLLM refuses what it is asked for: {error}")
    return EngineEndedError(f"vLLM has ended ({error}); what it printed is in {log}")


def _wake(client: Any) -> None:
    """Fail the calls that wait for an engine that was killed: vLLM lets them wait for ever."""
    error = RuntimeError("its process was ended")
    client.outputs_queue.put_nowait(error)
    for waiting in list(client.utility_results.values()):
        if not waiting.done():
            waiting.set_exception(error)


def _engines() -> list[Any]:
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


def _kill_engines() -> None:
    for process in _engines():
        process.kill()
        process.join()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Start processes with this environment."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Send what this process prints meanwhile to a file; processes started in the block keep printing there."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)


def _log_to(log: Path) -> None:
    logging.getLogger("vllm").handlers = [logging.FileHandler(log)]
