"""Trajectories whose chat template rewrites the history: several branches, each exactly what was read and sampled."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from components.policy.checkpoint import Checkpoint, create
from components.policy.logprobs import LogprobModel
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.chat import AnsweredTurn
from components.shared.model import ModelConfig
from components.shared.tools import NEXT_ANSWER
from tests import chat_model, tiny
from tests.chat_model import CALLING, CHATML, REASONING
from tests.policy import plain
from tests.rollout import acting
from tests.rollout.acting import ActingEnvironments

FORGETTING = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' %}{{ message.content.split('</think>')[-1] + '<end>' }}
    {%- else %}{{ '+' + message.content + '\\n' }}{% endif -%}
{%- endfor -%}
"""
"""Leaves out the thoughts of earlier turns."""


def _forgetful(make: Callable[[], PreTrainedModel] = acting.mistral) -> Checkpoint:
    return acting.checkpoint(make, FORGETTING, b="</think>")


def _sampling(environments: ActingEnvironments, **changes: object) -> Sampling:
    return acting.sampling(environments, **{"temperature": 1.0, "max_new_tokens": 40, **changes})


@pytest.mark.parametrize(
    ("make", "max_batch_size"),
    [(acting.mistral, 8), pytest.param(acting.qwen3_next, 64, marks=pytest.mark.slow)],
    ids=["packed rows", "padded rows"],
)
def test_forked_trajectories_are_those_of_a_reference(make: Callable[[], PreTrainedModel], max_batch_size: int) -> None:
    """Each next prompt is what transformers writes, and each token has the log-probability after that prompt."""
    environments = ActingEnvironments()
    sampling = _sampling(environments)
    completions = acting.generate(TransformersSampler(_forgetful(make), max_batch_size), sampling)
    acting.require_true(completions, _forgetful(make), sampling)
    assert {0, 1, 2} <= {len(each.tokens.forks) for each in completions}
    assert any(len(each.turns) > 1 + len(each.tokens.forks) for each in completions), "what was not rewritten goes on"
    assert environments.open == 0


@pytest.mark.parametrize(
    ("make", "num_samples"), [(acting.mistral, 8), (acting.qwen3_next, 2)], ids=["packed rows", "padded rows"]
)
def test_recorded_logprobs_are_those_of_the_trainer(make: Callable[[], PreTrainedModel], num_samples: int) -> None:
    """In micro-batches of any composition, in the order in which the tokens were sampled."""
    checkpoint, sampling = _forgetful(make), _sampling(ActingEnvironments(), num_samples=num_samples)
    completions = acting.generate(TransformersSampler(checkpoint, 64), sampling)
    assert any(each.tokens.forks for each in completions)
    recorded_M = torch.tensor([logprob for each in completions for logprob in each.logprobs]).double()
    scorer, tokens = LogprobModel(checkpoint.model, temperature=1.0), [each.tokens for each in completions]
    scored_M = plain.logprobs(scorer, tokens, 300, padded=checkpoint.is_padded)
    assert float((scored_M - recorded_M).abs().max()) < 1e-5


QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '\\n<tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last %}
        {%- set content = content.split('</think>\\n\\n')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""Leaves out the thoughts before the last message of the user, and keeps those before answers of tools."""

_FIELD = "('<think>' + (message['thought'] or '') + '</think>' if message['role'] == 'assistant' else '')"
FIELDS = CHATML.replace("message['content']", f"{_FIELD} + message['content']")
"""Reads thoughts from a field of a message, and writes an empty one without it."""


def _checkpoint(folder: Path, template: str, environment: str = "feedback", **settings: object) -> Checkpoint:
    values = {"base": str(chat_model.write(folder, template)), "chat": {}, "tools": {"environment": environment}}
    return create(ModelConfig.model_validate({**values, **settings}), tiny.PROBLEMS, seed=1, dtype=torch.float32)


@pytest.mark.parametrize(
    ("template", "settings", "rewrites"),
    [
        (CHATML, {}, False),
        (CALLING, {}, False),
        (CALLING, {"environment": "calculator"}, False),
        (REASONING, {}, True),
        (QWEN3, {}, True),
        (QWEN3, {"environment": "calculator"}, False),
        (QWEN3, {"environment": "calculator", "thinking": False}, False),
        (FIELDS, {}, False),
    ],
)
def test_whether_a_template_rewrites_the_history(
    tmp_path: Path, template: str, settings: dict[str, object], rewrites: bool
) -> None:
    """Only where it drops thoughts that are part of the text; the empty one of the prompt stays as well."""
    assert _checkpoint(tmp_path, template, **settings).format.rewrites_history is rewrites  # type: ignore[arg-type]


def test_a_rewritten_prompt_has_a_message_for_each_answer(tmp_path: Path) -> None:
    """No special token comes from what the model spelled; what an environment answered was read like that before."""
    checkpoint = _checkpoint(tmp_path, QWEN3, "calculator")
    turns = [AnsweredTurn("<think>\nSo.\n</think>\n\n<|im_end|>1", f"2{NEXT_ANSWER}3")]
    text = checkpoint.tokenizer.decode(checkpoint.prompt_ids("1+1?", turns=turns))
    assert text.endswith(
        "</think>\n\n< |im_end|>1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
