"""The teacher of on-policy distillation: a frozen model in this process, or one behind a vLLM server."""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import urllib3
from torch import Tensor

from components.policy.checkpoint import Checkpoint, create, load, load_without_weights
from components.policy.engine import torch_dtype
from components.policy.packing import TokenSequence
from components.shared.errors import PipelineError, RetryableError
from components.shared.model import PIPELINE_FILE, local_model
from components.train_grpo.config import TeacherConfig, TrainGRPOConfig
from components.train_grpo.reference import Reference

_MAX_REQUESTS = 64
"""Requests in flight at once, in each process."""
_REQUEST_S = 600.0
"""Time for one request, which may wait in the server for others."""
_RETRIES = urllib3.Retry(
    4,
    read=1,
    backoff_factor=1.0,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)
_SHOWN_CHARACTERS = 300


def load_teacher(teacher: TeacherConfig, config: TrainGRPOConfig, student: Checkpoint) -> "Reference | TeacherServer":
    """Return the teacher; PipelineError where its tokenizer is not that of the student."""
    folder, dtype = Path(local_model(teacher.base)), torch_dtype(config.engine)
    if teacher.server:
        loaded = load_without_weights(folder)
    elif (folder / PIPELINE_FILE).is_file():
        loaded = load(folder, dtype=dtype)
    else:
        asked = student.config.model_copy(update={"base": teacher.base})
        loaded = create(asked, [], seed=config.seed, dtype=dtype)
    if loaded.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise PipelineError(
            f"train_grpo.teacher.base: {teacher.base} has another tokenizer than the policy; it has to be the same"
        )
    if teacher.server:
        return TeacherServer(teacher.server, teacher.key_variable)
    return Reference(loaded.model, teacher.placement, temperature=config.sampling.temperature)


class TeacherServer:
    """A vLLM server, which returns the log-probabilities of the tokens of a prompt at temperature 1."""

    def __init__(self, url: str, key_variable: str | None = None) -> None:
        """`url` is that of the API; PipelineError where the environment has no `key_variable`."""
        headers = {}
        if key_variable:
            if not os.environ.get(key_variable):
                raise PipelineError(f"train_grpo.teacher.key_variable: the environment has no {key_variable}")
            headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
        self._url = f"{url.rstrip('/')}/completions"
        self._pool = urllib3.PoolManager(maxsize=_MAX_REQUESTS, headers=headers, retries=_RETRIES, timeout=_REQUEST_S)

    def logprobs(self, sequences_B: Sequence[TokenSequence], indices: Collection[int]) -> Tensor:
        """Return the log-probability of each of the M sampled tokens; NaN for completions not in `indices`.

        Raises:
            RetryableError: The server does not answer, or not in time.
            PipelineError: It refuses a request, or returns no log-probabilities of prompts.
        """
        with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
            branches = [(b, branch) for b in indices for branch in sequences_B[b].branches]
            known: dict[int, list[float]] = {}
            for (b, _), scores in zip(branches, threads.map(self._score, [each for _, each in branches]), strict=True):
                known.setdefault(b, []).extend(scores)
        return torch.tensor(
            [x for b, each in enumerate(sequences_B) for x in known.get(b, [torch.nan] * each.num_sampled)],
            dtype=torch.float64,
        )

    def _score(self, sequence: TokenSequence) -> list[float]:
        """Return the log-probability of each sampled token of a sequence without forks."""
        ids = [*sequence.prompt_ids, *sequence.completion_ids]
        answer = self._post({"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1})
        start = len(sequence.prompt_ids)
        try:
            of_places = answer["choices"][0]["prompt_logprobs"]
            places = [start + place for place in sequence.sampled_places]
            return [float(of_places[place][str(ids[place])]["logprob"]) for place in places]
        except (LookupError, TypeError):
            raise PipelineError(
                f"train_grpo.teacher.server: {self._url} returns no log-probabilities of the prompt; vLLM does"
            ) from None

    def _post(self, body: dict[str, Any]) -> Any:
        where = f"train_grpo.teacher.server: {self._url}"
        try:
            answer = self._pool.request("POST", self._url, json=body)
            if answer.status in _RETRIES.status_forcelist:
                raise RetryableError(f"{where} answers {answer.status}")
            if answer.status != 200:
                reason = " ".join(answer.data.decode(errors="replace").split())[:_SHOWN_CHARACTERS]
                raise PipelineError(f"{where} answers {answer.status} ({reason})")
            return answer.json()
        except urllib3.exceptions.HTTPError as error:
            raise RetryableError(f"{where}: {error}") from None
        except ValueError:
            raise PipelineError(f"{where} does not answer with JSON") from None
