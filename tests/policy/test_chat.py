from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.policy.checkpoint import Checkpoint, create, load, save
from components.rollout.sampler import Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.shared.chat import prompt_format
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.tokenizer import tokenizer_for
from tests import chat_model, tiny
from tests.chat_model import CHATML, HEADERS, REASONING, THINKING, TURNS

SYSTEM = "Add <b> & 'c'.\n"
TOOLS = """\
{%- for message in messages %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- if loop.first %}{% continue %}{% endif %}
    {{- tools is none }}{{ documents is none }}{{ strftime_now('%%') }}
    {%- break %}
{%- endfor %}
{{- add_generation_prompt }}
"""


def _checkpoint(folder: Path, **changes: object) -> Checkpoint:
    settings = {"base": str(folder), "chat": {}, "prompt": "{question}\nThink.\n", **changes}
    return create(ModelConfig.model_validate(settings), [], seed=1, dtype=torch.float32)


@pytest.mark.parametrize(
    ("template", "system", "thinking"),
    [
        (CHATML, SYSTEM, None),
        (THINKING, None, False),
        (THINKING, SYSTEM, True),
        (REASONING, None, None),
        (HEADERS, SYSTEM, None),
        (TOOLS, None, None),
        (TURNS, None, None),
    ],
)
def test_a_prompt_has_the_tokens_that_transformers_makes_of_the_conversation(
    tmp_path: Path, template: str, system: str | None, thinking: bool | None
) -> None:
    """With the tokenizer of transformers, and with that of the light image."""
    folder = chat_model.write(tmp_path, template)
    checkpoint = _checkpoint(folder, chat={"system": system}, thinking=thinking)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": "1+1?\nThink."})
    options = {} if thinking is None else {"enable_thinking": thinking}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    assert checkpoint.prompt_ids("1+1?") == tuple(expected)
    text = prompt_format(checkpoint.config).prompt("1+1?")
    light = tokenizer_for(checkpoint.config, [])
    assert light.encode(text, add_special_tokens=False).ids == expected


def test_a_question_follows_the_messages_of_its_conversation(tmp_path: Path) -> None:
    """Its own system message replaces the config's, and no text in it becomes a special token."""
    folder = chat_model.write(tmp_path, CHATML)
    checkpoint = _checkpoint(folder, chat={"system": SYSTEM}, prompt="{question}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    earlier = (("system", "In base 2."), ("user", "1+0?"), ("assistant", "1"))
    messages = [{"role": role, "content": content} for role, content in (*earlier, ("user", "1+1?"))]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert checkpoint.prompt_ids("1+1?", "", earlier) == tuple(expected)
    asked = tiny.PROBLEMS[0].model_copy(update={"question": "1+1?", "earlier": earlier})
    assert checkpoint.examples([asked])[0].prompt_ids == tuple(expected)
    end = tokenizer.eos_token
    assert checkpoint.prompt_ids(f"1{end}1?").count(tokenizer.eos_token_id) == checkpoint.prompt_ids("11?").count(
        tokenizer.eos_token_id
    )
    with pytest.raises(PipelineError, match=r"follows other messages \(system\), which need a chat template"):
        prompt_format(ModelConfig(base=str(folder))).prompt("1+1?", "", earlier[:1])


def test_templates_of_older_models_are_read(tmp_path: Path) -> None:
    """From the config of the tokenizer, where there may be several, with special tokens that are objects."""
    folder = chat_model.write_older(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    checkpoint = _checkpoint(folder)
    assert checkpoint.format.prompt("1?") == "<|begin_of_text|>1?\nThink.<|endoftext|>"
    assert prompt_format(checkpoint.config).prompt("1?") == checkpoint.format.prompt("1?")


@pytest.mark.parametrize(
    ("template", "settings", "response", "end"),
    [
        (CHATML, {}, "#### 2", "<|im_end|>"),
        (HEADERS, {}, "#### 2", "<|eot_id|>"),
        (TURNS, {}, "#### 2", "<end_of_turn>"),
        (THINKING, {}, "<think>\n\n</think>\n\n#### 2", "<|im_end|>"),
        (THINKING, {"thinking": False}, "#### 2", "<|im_end|>"),
        # One that ends no turn: the end of a text does.
        ("{% for each in messages %}{{ each.content }}\n{% endfor %}", {}, "#### 2", "<|endoftext|>"),
    ],
)
def test_an_answer_to_learn_from_ends_as_the_template_ends_it(
    tmp_path: Path, template: str, settings: dict[str, object], response: str, end: str
) -> None:
    """With the one token that the model has to learn, and after what the template puts before an answer."""
    checkpoint = _checkpoint(chat_model.write(tmp_path, template), **settings)
    problem = tiny.problem(0, question="1+1?", solution="#### 2")
    example = checkpoint.examples([problem])[0]
    assert example.prompt_ids == checkpoint.prompt_ids("1+1?")
    assert checkpoint.tokenizer.decode(example.completion_ids) == response + end
    ends = [checkpoint.tokenizer.convert_ids_to_tokens(token) for token in checkpoint.end_ids]
    assert ends == list(dict.fromkeys([end, "<|endoftext|>"]))


def test_a_template_that_leaves_thoughts_out_shows_no_answer_to_learn_from(tmp_path: Path) -> None:
    """That matters to fine-tuning alone: an example is then the solution right after the prompt."""
    checkpoint = _checkpoint(chat_model.write(tmp_path, REASONING))
    with pytest.raises(PipelineError, match=r"shows no answer to learn from"):
        checkpoint.format.require_answers()
    solution_ids = checkpoint.encode(tiny.PROBLEMS[0].solution)
    assert checkpoint.examples([tiny.PROBLEMS[0]])[0].completion_ids == (
        *solution_ids,
        checkpoint.tokenizer.eos_token_id,
    )


def test_a_saved_policy_is_asked_as_before_and_ends_its_turns_for_others(tmp_path: Path) -> None:
    """What serves the folder without our files has the template, and stops where a turn ends."""
    settings = {"chat": {"system": SYSTEM}, "thinking": False, "prompts": {"code": "Code: {question}"}}
    settings["tools"] = {"environment": "calculator", "max_turns": 3}
    saved = _checkpoint(chat_model.write(tmp_path / "base"), **settings)
    save(saved, tmp_path / "policy")
    loaded = load(tmp_path / "policy", dtype=torch.float32)
    assert loaded.config == saved.config.model_copy(update={"base": str(tmp_path / "policy")})
    for source, shown in (("sums", "1+1?\nThink."), ("code", "Code: 1+1?")):
        assert loaded.format.prompt("1+1?", source).endswith(f"user\n{shown}<|im_end|>\n<|im_start|>assistant\n")
        problem = tiny.problem(0, source=source)
        assert loaded.examples([problem])[0] == saved.examples([problem])[0]
        assert saved.examples([problem])[0].prompt_ids == loaded.prompt_ids(problem.question, source)
    ends = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").generation_config.eos_token_id
    assert tuple(ends) == saved.end_ids == loaded.end_ids
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").chat_template == CHATML


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('No user') }}", r"its chat template cannot be used \(No user\)"),
        ("{% if %}", r"its chat template cannot be used \(Expected an expression"),
        ("{{ messages.clear() }}", "its chat template cannot be used"),
        ("{{ messages[5].content.x.y }}", "its chat template cannot be used"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", r"cannot be used \(maximum recursion depth"),
        ("{{ 'a' * 10**15 }}", r"its chat template cannot be used \(MemoryError\)"),
    ],
)
def test_a_template_that_is_missing_or_fails_is_named(tmp_path: Path, template: str | None, message: str) -> None:
    """In one line, wherever a prompt is made."""
    checkpoint = _checkpoint(chat_model.write(tmp_path, template))
    for ask in (checkpoint.prompt_ids, lambda question: prompt_format(checkpoint.config).prompt(question)):
        with pytest.raises(PipelineError, match=message) as raised:
            ask("1+1?")
        assert "\n" not in str(raised.value)
        assert str(tmp_path) in str(raised.value)


def test_a_model_that_chats_may_answer_in_a_sentence() -> None:
    """Unless the config says where the answer has to be, or an environment asks for it. Others have no such keys."""
    with pytest.raises(ValueError, match="a model made from scratch has no chat template"):
        ModelConfig.model_validate({"base": "scratch:tiny", "chat": {}})
    with pytest.raises(ValueError, match="thinking: is for chat templates"):
        ModelConfig.model_validate({"base": "x", "thinking": True})
    chat = {"base": "model", "chat": {}}
    tools = {"tools": {"environment": "calculator"}}
    given = [chat, chat | {"answer": "boxed"}, chat | tools, {"base": "model"}]
    answers = ["last_sentence", "boxed", "declared", "declared"]
    assert [ModelConfig.model_validate(values).answer for values in given] == answers


def test_a_response_to_a_prompt_that_opens_a_thought_begins_inside_it(tmp_path: Path) -> None:
    """So a thought that does not end has no answer, whatever stands in it."""
    sampling = Sampling(num_samples=1, temperature=0.0, max_new_tokens=3, seed=1)
    for checkpoint, start in ((_checkpoint(chat_model.write(tmp_path, REASONING)), "<think>"), (tiny.checkpoint(), "")):
        ((completion,),) = TransformersSampler(checkpoint, 4).generate(tiny.PROBLEMS[:1], sampling)
        assert completion.response == start + completion.text
