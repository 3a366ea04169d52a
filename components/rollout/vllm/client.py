"""One vLLM server, as its client sees it: every call has a deadline and either answers or says why not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3

from components.policy.packing import TokenSequence
from components.rollout.vllm.requests import Drawn, scoring_requests
from components.rollout.vllm.verification import HeldWeights
from components.shared.errors import PipelineError

_CONNECT_S = 5.0
_CONTROL_S = 30.0
"""For calls that compute nothing."""
_MAX_CONNECTIONS = 256
INITIAL_VERSION = "default"
"""What vLLM calls the weights that it started with."""


class ServerLostError(Exception):
    """The server does not answer, or cannot be trusted with the next request."""


class VllmClient:
    """The calls of one server."""

    def __init__(self, url: str, request_deadline_s: float) -> None:
        self.url = url
        self._request_deadline_s = request_deadline_s
        self._pool = urllib3.PoolManager(maxsize=_MAX_CONNECTIONS, retries=False)

    def generate(self, token_ids: tuple[int, ...], sampling_params: dict[str, Any], version: str) -> list[Drawn]:
        """Return the completions of a prompt, all drawn from the weights of that version."""
        choices = self._answer(token_ids, sampling_params, version)["choices"]
        ordered = sorted(choices, key=lambda choice: int(choice["index"]))
        return [
            Drawn(tuple(choice["token_ids"]), tuple(each["logprob"] for each in choice["logprobs"]["content"]))
            for choice in ordered
        ]

    def score(self, sequence: TokenSequence, temperature: float, version: str) -> list[float]:
        """Return the log-probability of each completion token under the weights of that version."""
        start = len(sequence.prompt_ids)
        told: list[float] = []
        for request in scoring_requests(sequence, temperature):
            answer = self._answer(request.prompt, request.sampling_params, version)
            if answer["prompt_logprobs"]:
                own = zip(answer["prompt_logprobs"][start:], request.prompt[start:], strict=True)
                told += [place[str(token)]["logprob"] for place, token in own]
            tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            told.append(next(top["logprob"] for top in tops if top["token_id"] == request.token))
        return told

    def version(self) -> str:
        """Return the version of the weights it samples from."""
        return str(self._call("GET", "/weight_info", None, _CONTROL_S)["weight_version"])

    def load(self, folder: str, version: str) -> None:
        """Replace the weights; to be called while they are `changing_weights`."""
        self._each_worker("load_folder", {"folder": folder, "version": version})

    def held_weights(self, sent: dict[str, list[int]]) -> list[HeldWeights]:
        """Return what each of its processes computes with, given the shapes of the tensors that it was sent."""
        held: list[HeldWeights] = self._each_worker("held_weights", {"sent": sent})
        return held

    @contextmanager
    def changing_weights(self, version: str) -> Iterator[None]:
        """Let the block replace the weights while nothing is computed, and call them `version` from then on.

        What is under way is done before; what is asked for meanwhile waits for the new weights.
        """
        self._call("POST", "/pause?mode=wait&clear_cache=true", {}, self._request_deadline_s)
        yield
        self._call("POST", "/update_weight_version", {"new_version": version}, _CONTROL_S)
        self._call("POST", "/resume", {}, _CONTROL_S)

    def num_workers(self) -> int:
        """Return how many processes hold the weights, or a part of them."""
        return int(self._call("GET", "/get_world_size", None, _CONTROL_S)["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Receiver`."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info}, self._request_deadline_s)

    def start_weight_update(self) -> None:
        """See `Receiver`."""
        self._call("POST", "/start_weight_update", {}, self._request_deadline_s)

    def update_weights(self, update_info: Any) -> None:
        """See `Receiver`."""
        self._call("POST", "/update_weights", {"update_info": update_info}, self._request_deadline_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `Receiver`; the version is given by `changing_weights`."""
        assert weight_version is None
        self._call("POST", "/finish_weight_update", {}, self._request_deadline_s)

    def close(self) -> None:
        """Close what is open."""
        self._pool.clear()

    def _each_worker(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        body = {"method": method, "kwargs": arguments}
        results: list[Any] = self._call("POST", "/collective_rpc", body, self._request_deadline_s)["results"]
        return results

    def _answer(self, token_ids: tuple[int, ...], sampling_params: dict[str, Any], version: str) -> Any:
        body = {"token_ids": token_ids, "sampling_params": sampling_params}
        answer = self._call("POST", "/inference/v1/generate", body, self._request_deadline_s)
        drawn_from = {span["version"] for choice in answer["choices"] for span in choice["weight_versions"]}
        if drawn_from != {version}:
            raise ServerLostError(f"it sampled from weights {', '.join(sorted(drawn_from))}, not {version}")
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
    """The first line of what a server says of an error, in whichever of its forms."""
    if isinstance(content, dict):
        content = content.get("error", content)
        content = content.get("message", content) if isinstance(content, dict) else content
    return str(content).strip().split("\n", 1)[0][:500]
