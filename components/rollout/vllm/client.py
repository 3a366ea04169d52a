"""HTTP client of one vLLM server: every call has a deadline and either answers or says why not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import urllib3
from torch import Tensor

from components.policy.packing import TokenSequence
from components.rollout.vllm.sampler import Request, SampledTokens, scoring_requests
from components.rollout.vllm.verification import shapes, verify_weights
from components.shared.errors import PipelineError

_CONNECT_S = 5.0
_CONTROL_S = 30.0
"""For calls that compute nothing."""
_MAX_CONNECTIONS = 256
INITIAL_VERSION = "default"
"""vLLM's version of the weights that it started with."""


class ServerLostError(Exception):
    """The server does not answer, or cannot be trusted with the next request."""


class VllmClient:
    """The calls of one server."""

    def __init__(self, url: str, request_deadline_s: float) -> None:
        self.url = url
        self._request_deadline_s = request_deadline_s
        self._pool = urllib3.PoolManager(maxsize=_MAX_CONNECTIONS, retries=False)

    def complete(self, request: Request, version: str) -> list[SampledTokens]:
        """Return the completions of a prompt, all sampled from the weights of that version."""
        choices = self._generate(request.prompt_ids, request.params, version)["choices"]
        return [
            SampledTokens(tuple(choice["token_ids"]), tuple(each["logprob"] for each in choice["logprobs"]["content"]))
            for choice in sorted(choices, key=lambda choice: int(choice["index"]))
        ]

    def score(self, sequence: TokenSequence, temperature: float, version: str) -> list[float]:
        """Return the log-probability of each completion token under the weights of that version."""
        start = len(sequence.prompt_ids)
        logprobs: list[float] = []
        for request in scoring_requests(sequence, temperature):
            answer = self._generate(request.prompt_ids, request.params, version)
            if answer["prompt_logprobs"]:
                pairs = zip(answer["prompt_logprobs"][start:], request.prompt_ids[start:], strict=True)
                logprobs += [place[str(token)]["logprob"] for place, token in pairs]
            tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            logprobs.append(next(top["logprob"] for top in tops if top["token_id"] == request.token))
        return logprobs

    def version(self) -> str:
        """Return the version of the weights it samples from."""
        return str(self._call("GET", "/weight_info", None, _CONTROL_S)["weight_version"])

    @contextmanager
    def changing_weights(self, version: str, sent: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the block replace the weights by those `sent` while nothing is computed, then verify and name them.

        Requests under way are finished before; those that arrive meanwhile wait for the new weights.
        """
        self.post("pause?mode=wait&clear_cache=true", {})
        yield
        verify_weights(sent, self._call_workers("loaded_weights", {"shapes": shapes(sent)}), name=self.url)
        self._call("POST", "/update_weight_version", {"new_version": version}, _CONTROL_S)
        self._call("POST", "/resume", {}, _CONTROL_S)

    def load(self, folder: str, version: str) -> None:
        """Replace the weights; to be called while `changing_weights`."""
        self._call_workers("load_folder", {"folder": folder, "version": version})

    def num_workers(self) -> int:
        """Return how many processes hold the weights, or a part of them."""
        return int(self._call("GET", "/get_world_size", None, _CONTROL_S)["world_size"])

    def post(self, name: str, body: dict[str, Any]) -> Any:
        """Return the answer of the endpoint of this name."""
        return self._call("POST", f"/{name}", body, self._request_deadline_s)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _call_workers(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        results: list[Any] = self.post("collective_rpc", {"method": method, "kwargs": arguments})["results"]
        return results

    def _generate(self, token_ids: tuple[int, ...], params: dict[str, Any], version: str) -> Any:
        answer = self.post("inference/v1/generate", {"token_ids": token_ids, "sampling_params": params})
        versions = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"]}
        if versions != {version}:
            raise ServerLostError(f"it sampled from weights {', '.join(sorted(versions))}, not {version}")
        return answer

    def _call(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, deadline_s), total=deadline_s)
        try:
            answer = self._pool.request(method, self.url + path, json=body, timeout=timeout)
            content = answer.json() if answer.data else None
        except urllib3.exceptions.ReadTimeoutError:
            raise ServerLostError(f"no answer to {path} within {deadline_s:g} s") from None
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ServerLostError(str(error)) from None
        if 400 <= answer.status < 500:
            raise PipelineError(f"vLLM server {self.url} refuses {path}: {_message(content)}")
        if answer.status != 200:
            raise ServerLostError(f"{path} failed ({answer.status}): {_message(content)}")
        return content


def _message(content: Any) -> str:
    """Return the first line of an error that a server reports, in any of its forms."""
    if isinstance(content, dict):
        content = content.get("error", content)
        content = content.get("message", content) if isinstance(content, dict) else content
    return str(content).strip().split("\n", 1)[0][:500]
