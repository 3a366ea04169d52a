"""Sampling with vLLM beside the trainer: it runs in a process of its own, which this one starts, calls and ends.

`python -m components.rollout.vllm.engine` is that process: apart from the trainer's environment, output and signals.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.policy.config import LoraConfig
from components.policy.packing import TokenSequence
from components.rollout.vllm.config import (
    EnginesConfig,
    VllmConfig,
    engine_arguments,
    environment,
    raise_if_out_of_memory,
)
from components.rollout.vllm.sampler import Request, SampledTokens, Submit, scoring_requests
from components.rollout.vllm.verification import shapes, verify_weights, weights_in
from components.shared.errors import PipelineError, RetryableError, out_of_memory

_NAME = "vLLM beside this process"
_LINES_SHOWN = 20
_POLL_S = 0.2
"""Between checks that trainer and engine are alive."""
_END_S = 5.0


class EngineEndedError(RetryableError):
    """vLLM's process has ended."""


class VllmEngine:
    """An `Engine` (see sampler.py) in a process beside the trainer, with the weights in `folder` at first.

    RetryableError where it ends, or takes longer than its deadlines.
    """

    shared = False

    def __init__(
        self,
        folder: Path,
        config: VllmConfig,
        *,
        dtype: str,
        log: Path,
        lora: LoraConfig | None = None,
        section: str = "train_grpo.sampler.vllm",
        gpus: Sequence[int] | None = None,
        has_tokenizer: bool = False,
    ) -> None:
        """Start it on the GPU of this rank or, split, on those of the `gpus`; `section` is where its keys are.

        Only an engine with a tokenizer can stop at texts. `lora` is as in `engine_arguments`.
        """
        self.weights_by, self.synchronise, self.max_tokens = config.weights_by, config.synchronise, config.max_tokens
        self._unverified_base: Path | None = folder if config.synchronise == "adapters" else None
        self._deadline_s, self._log, self._asleep = config.request_deadline_s, log, False
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        gpu_seed = int(os.environ.get("RANK", "0")) if torch.cuda.is_available() else None
        arguments = engine_arguments(config, dtype, lora, gpu_seed=gpu_seed, has_tokenizer=has_tokenizer)
        variables = environment(config, self._temporary.name)
        if config.weights_by == "ipc":
            # Handles of memory are pickled; they come from this process alone, over a pipe.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if torch.cuda.is_available():
            # The GPU of this rank, and not the machine's first.
            numbers = [torch.cuda.current_device()] if gpus is None else gpus
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in numbers)
            # vLLM requires this share to be free although the size of its cache is given; by default nearly all.
            arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}
            arguments["tensor_parallel_size"] = len(numbers)
        self._connection, end = Pipe()
        command = [sys.executable, "-P", "-W", "ignore", "-m", "components.rollout.vllm.engine", str(end.fileno())]
        log.parent.mkdir(parents=True, exist_ok=True)
        with end, log.open("ab") as file:
            printed_before = file.tell()
            self._process = subprocess.Popen(
                command,
                env=variables,
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C would end it in the middle of a rollout
            )
        try:
            self._call("start", str(folder), arguments, deadline_s=config.start_deadline_s)
        except EngineEndedError as error:  # it would end the same way again
            printed = log.read_bytes()[printed_before:].decode(errors="replace")
            raise_if_out_of_memory(printed, log, section)
            tail = printed.splitlines()[-_LINES_SHOWN:]
            raise PipelineError("\n".join([f"vLLM could not start; the end of {log}:", *tail])) from error
        self._transfer: Any = None

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        """See `Engine`."""
        completions: list[list[SampledTokens]] = self._compute("complete", requests)
        return completions

    @contextmanager
    def submitting(self) -> Iterator[Submit]:
        """See `CompletionBackend`; nothing else is asked of the engine meanwhile."""
        self._wake()
        requests = _Requests(self._connection, self._deadline_s, self._log, self._kill)
        try:
            yield requests.submit
        finally:
            requests.end()

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[str, list[list[float]]]:
        """See `Engine`: there is one copy of the weights."""
        return {_NAME: self._compute("score", sequences, temperature)}

    def set_weights(self, version: int, weights: Path | Mapping[str, Tensor] | None) -> None:
        """See `Engine`."""
        assert weights is not None, "no other process sends weights to the engine of this one"
        sent = weights_in(weights) if isinstance(weights, Path) else weights
        self._compute("reset_prefix_cache")
        if self._unverified_base is not None:
            sent = {**sent, **weights_in(self._unverified_base)}
        if self.synchronise == "adapters":
            self._call("use_adapters", version, str(weights))
        elif isinstance(weights, Path):
            self._call("collective_rpc", "load_folder", None, (str(weights.resolve()), str(version)))
        else:
            self._send(weights)
        verify_weights(sent, self._call("collective_rpc", "loaded_weights", None, (shapes(sent),)), name=_NAME)
        self._unverified_base = None

    def sleep(self) -> None:
        """See `Sampler`; on CPUs there is nothing to free."""
        if torch.cuda.is_available():
            self._call("sleep", 1)
            self._asleep = True

    def close(self) -> None:
        """End vLLM's processes."""
        self._connection.close()  # upon which it ends by itself, unless it computes
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()
        self._temporary.cleanup()

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        from components.rollout.vllm.transfer import Transfer, TransferError  # vLLM itself

        def call(name: str, arguments: dict[str, Any]) -> None:
            self._call(name, *([arguments] if arguments else []))

        if self._transfer is None:
            self._transfer = Transfer(self.weights_by, call, deadline_s=self._deadline_s)
        try:
            self._transfer.send(weights, trainer_address="127.0.0.1", num_receivers=1)
        except TransferError as error:
            raise EngineEndedError(f"vLLM did not take the weights: {error}; its output is in {self._log}") from error

    def _compute(self, method: str, *arguments: Any) -> Any:
        self._wake()
        return self._call(method, *arguments)

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the update has freed, PyTorch would keep from vLLM
            self._call("wake_up")
            self._asleep = False

    def _call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Return what a method of vLLM's process returns, within the deadline of a request if no other is set."""
        deadline_s, output = deadline_s or self._deadline_s, f"its output is in {self._log}"
        try:
            self._connection.send((method, arguments))
            if not wait([self._connection], deadline_s):
                self._kill()
                raise RetryableError(f"vLLM did not finish within {deadline_s:g} s; {output}")
            result, error = self._connection.recv()
        except (EOFError, ConnectionError) as lost:
            raise EngineEndedError(f"vLLM has ended; {output}") from lost
        if error is not None:
            raise _explained(error, output)
        return result

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _explained(error: Exception, output: str) -> Exception:
    """Return what is raised here for an error in vLLM's process."""
    if isinstance(error, ValueError):
        return PipelineError(f"vLLM refuses the request: {error}")
    if out_of_memory(error) is not None:
        return error  # trying again would not help; the caller knows which keys do
    return EngineEndedError(f"vLLM has ended ({error}); {output}")


class _Requests:
    """Requests that vLLM's process answers one by one, in any order; a thread waits for the answers."""

    def __init__(self, connection: Connection, deadline_s: float, log: Path, kill: Callable[[], None]) -> None:
        self._connection, self._deadline_s, self._kill = connection, deadline_s, kill
        self._output = f"its output is in {log}"
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[list[SampledTokens]]] = {}
        self._num_submitted, self._last_message, self._ending = 0, time.monotonic(), False
        self._lost: Exception | None = None
        self._send(("answer_requests", ()))
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> "Future[list[SampledTokens]]":
        """See `Submit`."""
        answer: Future[list[SampledTokens]] = Future()
        with self._lock:
            number, self._num_submitted = self._num_submitted, self._num_submitted + 1
            self._last_message, lost = time.monotonic(), self._lost
            if lost is None:
                self._waiting[number] = answer
        if lost is None:
            self._send((number, request))
        else:
            answer.set_exception(lost)
        return answer

    def end(self) -> None:
        """Give up the requests in flight, and wait until vLLM's process takes other calls."""
        self._last_message, self._ending = time.monotonic(), True
        self._send(None)
        self._thread.join()

    def _send(self, message: Any) -> None:
        with suppress(ConnectionError):  # which the thread notices, too
            self._connection.send(message)

    def _receive(self) -> None:
        """Hand answers over until the call ends; give the reason to all that still wait."""
        reason: Exception = EngineEndedError(f"the request was given up; {self._output}")
        try:
            while (message := self._next_message()) is not None:
                number, sampled, error = message
                with self._lock:
                    answer = self._waiting.pop(number)
                if error is None:
                    answer.set_result(sampled)
                else:
                    answer.set_exception(_explained(error, self._output))
        except (EOFError, OSError):
            reason = EngineEndedError(f"vLLM has ended; {self._output}")
        except Exception as error:
            reason = error
        with self._lock:
            self._lost, waiting, self._waiting = reason, self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(reason)

    def _next_message(self) -> Any:
        """Return the number of a request with its result; None where vLLM's process waits for another call."""
        while not wait([self._connection], _POLL_S):
            with self._lock:
                is_late = time.monotonic() - self._last_message > self._deadline_s
                if is_late and (self._waiting or self._ending):
                    self._kill()
                    raise RetryableError(f"vLLM did not finish within {self._deadline_s:g} s; {self._output}")
        message = self._connection.recv()
        with self._lock:
            self._last_message = time.monotonic()
        if len(message) == 3:
            return message
        _, error = message
        if error is not None:
            raise _explained(error, self._output)
        return None


class VllmEngines:
    """Engines of one model that share the prompts: what evaluates a model that does not change."""

    def __init__(
        self, folder: Path, config: EnginesConfig, *, max_tokens: int, dtype: str, logs: Path, section: str
    ) -> None:
        """Start all engines at once; they can stop at texts."""
        settings = config.model_dump(exclude={"num_engines", "gpus_per_engine"})
        one = VllmConfig(max_tokens=max_tokens, **settings)
        visible = torch.cuda.device_count()
        if 0 < visible < config.num_gpus:
            raise PipelineError(
                f"{section}: {config.num_engines} engines with {config.gpus_per_engine} GPUs each need "
                f"{config.num_gpus}; {visible} are visible here"
            )

        def start(number: int) -> VllmEngine:
            gpus = range(number * config.gpus_per_engine, (number + 1) * config.gpus_per_engine)
            log = logs / f"vllm-{number}.log"
            return VllmEngine(folder, one, dtype=dtype, log=log, section=section, gpus=gpus, has_tokenizer=True)

        with ThreadPoolExecutor(config.num_engines) as threads:
            started = [threads.submit(start, number) for number in range(config.num_engines)]
        self.max_tokens = max_tokens
        self._engines = [each.result() for each in started if not each.exception()]
        for failure in filter(None, (each.exception() for each in started)):
            self.close()
            raise failure

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        """See `CompletionBackend`: each engine completes as many of the requests, give or take one."""
        engines = self._engines
        with ThreadPoolExecutor(len(engines)) as threads:
            shares = [requests[number :: len(engines)] for number in range(len(engines))]
            # With nothing to do an engine is not asked.
            answers = list(threads.map(lambda engine, share: engine.complete(share) if share else [], engines, shares))
        return [answers[index % len(engines)][index // len(engines)] for index in range(len(requests))]

    @contextmanager
    def submitting(self) -> Iterator[Submit]:
        """See `CompletionBackend`: all requests of a group go to one engine, which has its prompt in the cache."""
        with ExitStack() as stack:
            submits = [stack.enter_context(engine.submitting()) for engine in self._engines]
            yield lambda request: submits[request.group % len(submits)](request)

    def close(self) -> None:
        """End vLLM's processes."""
        for engine in self._engines:
            engine.close()


class _Vllm:
    """vLLM as the trainer calls it: its own methods, and those here."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._trainer = connection, os.getppid()
        self.llm: Any = None
        self.adapters: Any = None
        """vLLM's request for them."""
        threading.Thread(target=self._end_with_others, daemon=True).start()

    def start(self, folder: str, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(folder, **arguments)

    def use_adapters(self, version: int, folder: str) -> None:
        """Load adapters, and sample with them from now on."""
        from vllm.lora.request import LoRARequest

        # A name and a number that no other version has: nothing of another can be taken for this one.
        self.adapters = LoRARequest(str(version), version + 1, folder)
        self.llm.llm_engine.add_lora(self.adapters)

    def complete(self, requests: Sequence[Request]) -> list[list[SampledTokens]]:
        return [[_sampled_tokens(output) for output in answer.outputs] for answer in self._generate(requests)]

    def answer_requests(self) -> None:
        """Answer requests as they come, each once it is done, until None comes."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        engine, numbers = self.llm.llm_engine, dict[str, int]()
        while True:
            while self._connection.poll() or not numbers:
                message = self._connection.recv()
                if message is None:
                    engine.abort_request(list(numbers))
                    return
                number, request = message
                try:
                    prompt, params = _prompt(request), SamplingParams(**request.params)
                    (id_,) = self.llm.enqueue([prompt], params, lora_request=self.adapters, use_tqdm=False)
                except (ValueError, VLLMClientError) as error:
                    self._connection.send((number, None, ValueError(str(error))))
                else:
                    numbers[id_.partition("-")[0]] = number  # without what vLLM adds to tell its own requests apart
            for answer in engine.step():
                if answer.finished:
                    sampled = [_sampled_tokens(output) for output in answer.outputs]
                    self._connection.send((numbers.pop(answer.request_id), sampled, None))

    def score(self, sequences: Sequence[TokenSequence], temperature: float) -> list[list[float]]:
        requests = [scoring_requests(sequence, temperature) for sequence in sequences]
        answers = iter(self._generate([each for group in requests for each in group]))
        return [
            [logprob for each in group for logprob in _scores(each, next(answers), len(sequence.prompt_ids))]
            for sequence, group in zip(sequences, requests, strict=True)
        ]

    def _generate(self, requests: Sequence[Request]) -> Any:
        from vllm import SamplingParams

        prompts = [_prompt(request) for request in requests]
        params = [SamplingParams(**each.params) for each in requests]
        return self.llm.generate(prompts, params, lora_request=self.adapters, use_tqdm=False)

    def _end_with_others(self) -> None:
        """End vLLM once the trainer has ended, or vLLM's engine, for which this process would wait forever."""
        while os.getppid() == self._trainer and (self.llm is None or multiprocessing.active_children()):
            time.sleep(_POLL_S)
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        os._exit(1)


def _prompt(request: Request) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(request.prompt_ids)}


def _sampled_tokens(output: Any) -> SampledTokens:
    logprobs = [place[token].logprob for place, token in zip(output.logprobs, output.token_ids, strict=True)]
    return SampledTokens(tuple(output.token_ids), tuple(logprobs))


def _scores(request: Request, answer: Any, start: int) -> list[float]:
    """Return the log-probabilities in an answer: of its prompt from `start` on, if any, and of the next token."""
    places = [*(answer.prompt_logprobs or ())[start:], answer.outputs[0].logprobs[0]]
    tokens = [*request.prompt_ids[start:], request.params["logprob_token_ids"][0]][-len(places) :]
    return [place[token].logprob for place, token in zip(places, tokens, strict=True)]


def _serve(connection: Connection) -> None:
    """Answer the trainer's calls until it closes the connection."""
    vllm = _Vllm(connection)
    with suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            result, failure = None, None
            try:
                result = getattr(vllm if hasattr(vllm, method) else vllm.llm, method)(*arguments)
            except Exception as error:
                if method == "start":
                    raise
                from vllm.exceptions import VLLMClientError

                traceback.print_exc()
                # Of a type that the trainer knows without vLLM.
                kind = ValueError if isinstance(error, ValueError | VLLMClientError) else RuntimeError
                failure = kind(str(error))
            connection.send((result, failure))


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    _serve(Connection(int(sys.argv[1])))
