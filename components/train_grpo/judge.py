"""A model as a judge: an OpenAI-compatible server rates each response by the items of a rubric.

The request is that of `POST /chat/completions` with a JSON schema as response format, as OpenAI and vLLM serve it.
"""

import json
import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, field_validator
from urllib3 import Retry

from components.shared.config import Config, Operational
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.api import Api
from components.train_grpo.slow_rewards import RewardWithUsage

_FIELD = re.compile(r"\{(question|answer|response|rubric)\}")
_MAX_SCORE = 10
_SHOWN_CHARACTERS = 200


class JudgeConfig(Config):
    """The judge behind the reward `judge`."""

    base_url: str = Field(pattern=r"^https?://")
    """Address of the API, such as `https://api.openai.com/v1` or `http://judge:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    key_variable: str | None = None
    """Environment variable that holds the API key; null sends none. On Kubernetes JUDGE_API_KEY or OPENAI_API_KEY, a
    key of the secret grpo-pipeline-judge."""
    prompt: str = (
        "Rate a response to a question.\n\nQuestion:\n{question}\n\nExpected answer: {answer}\n\n"
        "Response:\n{response}\n\nRate each item from 0 (not at all) to 10 (fully):\n{rubric}"
    )
    """What the judge is asked; `{question}`, `{answer}`, `{response}` and `{rubric}` are filled in."""
    rubric: dict[str, str] = Field(
        {"quality": "The response answers the question, correctly and clearly."}, min_length=1
    )
    """What each item means, by its name; the reward is the mean of their ratings, from 0 to 1."""
    max_tokens: int = Field(512, gt=0)
    """Tokens of the judge's answer at most."""
    temperature: float = Field(0.0, ge=0)
    """Temperature at which the judge answers."""
    prompt_price: Annotated[float, Operational] = Field(0.0, ge=0)
    """Price of a million tokens of prompts, in any currency; the end of training says what the judge has cost."""
    completion_price: Annotated[float, Operational] = Field(0.0, ge=0)
    """Price of a million tokens of the judge's answers."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        if "{response}" not in prompt:
            raise ValueError("has no {response}: the judge would rate nothing")
        return prompt


def judge(problem: Problem, response: str, settings: JudgeConfig, timeout_s: float) -> RewardWithUsage:
    """Return the mean rating of a response, from 0 to 1, with the tokens that the server says it took.

    After `timeout_s` without an answer the connection is closed; vLLM then stops its work on the request. PipelineError
    if an item has no rating in the answer; for other errors see `Api.post`.
    """
    fields = {
        "question": problem.conversation,
        "answer": problem.answer,
        "response": response,
        "rubric": "\n".join(f"- {name}: {meaning}" for name, meaning in settings.rubric.items()),
    }
    # str.format would fail on other braces in the prompt.
    text = _FIELD.sub(lambda match: fields[match[1]], settings.prompt)
    score = {"type": "integer", "minimum": 0, "maximum": _MAX_SCORE}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(settings.rubric, score),
        "required": list(settings.rubric),
        "additionalProperties": False,
    }
    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "ratings", "schema": schema, "strict": True},
        },
    }
    url = f"{settings.base_url.rstrip('/')}/chat/completions"
    answer = _api(url, settings.key_variable, timeout_s).post(body)
    rating = RewardWithUsage(_mean_rating(answer, settings))
    usage = answer.get("usage") or {}  # not every server counts tokens
    rating.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    rating.completion_tokens = int(usage.get("completion_tokens") or 0)
    return rating


@lru_cache
def _api(url: str, key_variable: str | None, timeout_s: float) -> Api:
    # No retries but redirects: slow_rewards.py repeats failed calls within the limits of `reward.calls`.
    retries = Retry(None, connect=0, read=0, status=0, other=0, redirect=5)
    return Api(url, "train_grpo.reward.judge", key_variable, retries=retries, timeout_s=timeout_s, maxsize=64)


def _mean_rating(answer: Any, settings: JudgeConfig) -> float:
    """Return the mean rating of the items of the rubric, from 0 to 1; PipelineError if one has no valid rating."""
    try:
        content = answer["choices"][0]["message"]["content"]
        ratings = json.loads(content)
        values = [ratings[name] for name in settings.rubric]
    except (LookupError, TypeError, ValueError):
        raise PipelineError(f"the judge answers without ratings: {json.dumps(answer)[:_SHOWN_CHARACTERS]}") from None
    for name, value in zip(settings.rubric, values, strict=True):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_SCORE:
            raise PipelineError(f"the judge rates {name} {value!r:.40}, not from 0 to {_MAX_SCORE}")
    return float(sum(values) / len(values) / _MAX_SCORE)
