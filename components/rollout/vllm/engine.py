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
from components.rollout.vllm.config import VllmConfig, engine_arguments, environment, raise_if_out_of_memory
from components.rollout.vllm.requests import Request, SampledTokens, ScoringRequest, scoring_requests
from components.rollout.vllm.transfer import Transfer
from components.rollout.vllm.verification import shapes, verify_weights, weights_in
from components.shared.environment import OWNER_VARIABLE
from components.shared.errors import PipelineError, RetryableError, out_of_memory

_NAME = "vLLM in this process"
_LOCALHOST = "127.0.0.1"
_LINES_SHOWN = 20
_POLL_S = 0.2
"""Between checks that the engine is alive."""


class EngineEndedError(RetryableError):
    """The engine's process has ended."""


class VllmEngine:
    """An `Engine` (see sampler.py) in a process beside the trainer, with the weights in `folder` at first.

    RetryableError where it ends, or takes longer than its deadlines.
    """

    shared = False

    def __init__(self, folder: Path, config: VllmConfig, *, dtype: Dtype, log: Path) -> None:
        self.weights_by = config.weights_by
        self._deadline_s, self._log = config.request_deadline_s, log
        self._asleep = False
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {OWNER_VARIABLE: str(os.getpid()), **_device_of_this_rank()}
        if config.weights_by == "ipc":
            # Handles of memory are pickled; they come from this process alone, over a pipe.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        with (
            _explaining_a_failed_start(log),
            _within(config.start_deadline_s, log),
            _environment({**environment(config, self._temporary.name), **variables}),
            _output_to(log),
            _in_own_session(),
        ):
            from vllm import LLM

            self._llm: Any = LLM(str(folder), **engine_arguments(config, dtype), **_memory_arguments())
            # What this process logs from here on; starting the engine has set up logging anew.
            logging.getLogger("vllm").handlers = [logging.FileHandler(log)]
        self._transfer = Transfer(self.weights_by, self._call, deadline_s=self._deadline_s)

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        """See `Engine`."""
        answers = self._generate([(request.prompt_ids, request.params) for request in requests])
        return [[_sampled_tokens(output) for output in answer.outputs] for answer in answers]

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Engine`: there is one copy of the weights."""
        requests = [scoring_requests(sequence, temperature) for sequence in sequences]
        answers = iter(self._generate([(each.prompt_ids, each.params) for group in requests for each in group]))
        logprobs = [
            [logprob for each in group for logprob in _scores(each, next(answers), len(sequence.prompt_ids))]
            for sequence, group in zip(sequences, requests, strict=True)
        ]
        return {_NAME: logprobs}

    def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine`."""
        with self._changing_weights():
            self._llm.collective_rpc("load_folder", args=(str(folder.resolve()), str(version)))
        self._verify(weights_in(folder))

    def receive_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Engine`."""
        with self._changing_weights():
            self._transfer.send(weights, trainer_address=_LOCALHOST, num_receivers=1)
        self._verify(weights)

    def expect_weights(self, version: int) -> None:
        """See `Engine`: nobody else sends to the engine of this process."""
        raise AssertionError("each process has an engine of its own")

    def sleep(self) -> None:
        """See `Sampler`; on CPUs there is nothing to free."""
        if torch.cuda.is_available():
            with _within(self._deadline_s, self._log, self._llm):
                self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """End the engine's process."""
        with suppress(Exception):  # it is ended below if it fails to end itself
            self._llm.llm_engine.engine_core.shutdown()
        _kill_engines()
        self._temporary.cleanup()

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        with _within(self._deadline_s, self._log, self._llm):
            self._wake_up()
            self._llm.reset_prefix_cache()
            yield

    def _verify(self, sent: Mapping[str, Tensor]) -> None:
        with _within(self._deadline_s, self._log, self._llm):
            loaded = self._llm.collective_rpc("loaded_weights", args=(shapes(sent),))
        verify_weights(sent, loaded, name=_NAME)

    def _generate(self, prompts: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> list[Any]:
        from vllm import SamplingParams

        with _within(self._deadline_s, self._log, self._llm):
            self._wake_up()
            answers: list[Any] = self._llm.generate(
                [{"prompt_token_ids": list(prompt_ids)} for prompt_ids, _ in prompts],
                [SamplingParams(**params) for _, params in prompts],
                use_tqdm=False,
            )
            return answers

    def _wake_up(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _call(self, name: str, arguments: dict[str, Any]) -> None:
        """Call a function of the transfer of weights."""
        getattr(self._llm, name)(*([arguments] if arguments else []))


def _sampled_tokens(output: Any) -> SampledTokens:
    logprobs = [place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True)]
    return SampledTokens(tuple(output.token_ids), tuple(logprobs))


def _scores(request: ScoringRequest, answer: Any, start: int) -> list[float]:
    """Return the log-probabilities in an answer: of its prompt from `start` on, if any, and of the next token."""
    places = [*(answer.prompt_logprobs or ())[start:], answer.outputs[0].logprobs[0]]
    tokens = [*request.prompt_ids[start:], request.token][-len(places) :]
    return [place[token].logprob for place, token in zip(places, tokens, strict=True)]


def _memory_arguments() -> dict[str, Any]:
    """Return the arguments of an engine on a GPU whose memory it shares with the trainer."""
    if not torch.cuda.is_available():
        return {}
    # vLLM requires this share to be free although the size of its cache is given; by default nearly all.
    return {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}


def _device_of_this_rank() -> dict[str, str]:
    """Return the variable that makes vLLM use the GPU of this rank instead of the machine's first."""
    if not torch.cuda.is_available():
        return {}
    number = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


@contextmanager
def _explaining_a_failed_start(log: Path) -> Iterator[None]:
    """Turn the end of an engine that has not started into a PipelineError: it would end the same way again."""
    offset = log.stat().st_size if log.exists() else 0  # earlier attempts have printed, too
    try:
        yield
    except Exception as error:
        if not isinstance(error, EngineEndedError) and out_of_memory(error) is None:
            raise
        printed = log.read_bytes()[offset:].decode(errors="replace") if log.exists() else ""
        raise_if_out_of_memory(printed, log, "train_grpo.sampler.vllm")
        tail = printed.splitlines()[-_LINES_SHOWN:]
        raise PipelineError("\n".join([f"vLLM could not start; the end of {log}:", *tail])) from error


@contextmanager
def _within(deadline_s: float, log: Path, llm: Any = None) -> Iterator[None]:
    """Raise RetryableError where the block takes longer, or the engine's process ends meanwhile."""
    done, overdue = threading.Event(), threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + deadline_s
        while not done.wait(_POLL_S):
            if time.monotonic() > deadline:
                overdue.set()
                _kill_engines()
            if llm is not None and not _engines():
                _fail_pending_calls(llm.llm_engine.engine_core)
            if overdue.is_set():
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:  # vLLM raises whatever its engine's process died of
        if out_of_memory(error) is not None:  # trying again would not help; the caller knows which keys do
            raise
        raise _explained(error, deadline_s if overdue.is_set() else None, log) from error
    finally:
        done.set()
        watcher.join()


def _explained(error: Exception, missed_s: float | None, log: Path) -> Exception:
    """Return what an error of vLLM means for the run; `missed_s` is the deadline, if it was missed."""
    if missed_s is not None:
        return RetryableError(f"vLLM did not finish within {missed_s:g} s; its output is in {log}")
    if isinstance(error, ValueError):
        return PipelineError(f"vLLM refuses the request: {error}")
    return EngineEndedError(f"vLLM has ended ({error}); its output is in {log}")


def _fail_pending_calls(client: Any) -> None:
    """Fail the calls that wait for an engine that was killed: vLLM lets them wait forever."""
    error = RuntimeError("its process was ended")
    client.outputs_queue.put_nowait(error)
    for call in list(client.utility_results.values()):
        if not call.done():
            call.set_exception(error)


def _engines() -> list[Any]:
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


def _kill_engines() -> None:
    for process in _engines():
        process.kill()
        process.join()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Start processes with this environment."""
    original = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(original)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Redirect what this process prints to a file; processes started in the block keep printing there."""

    def redirect(targets: Sequence[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, target in zip((1, 2), targets, strict=True):
            os.dup2(target, number)

    originals = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        redirect([file.fileno()] * 2)
    try:
        yield
    finally:
        redirect(originals)
        for original in originals:
            os.close(original)


@contextmanager
def _in_own_session() -> Iterator[None]:
    """Keep signals to this process's group, such as Ctrl-C, from the engine: it would end in the middle of a rollout.

    It ends with this process nevertheless (worker.py). multiprocessing has no option for this, so the command line of
    the processes that are started in the block is changed.
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
