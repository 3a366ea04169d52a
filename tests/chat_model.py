"""Chat models made on the spot: a small Qwen3 with a byte-level BPE tokenizer and a chat template, in a folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from components.shared.problem import Problem
from tests import tiny

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_ROLES = ("system", "user", "assistant")

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a calculator.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""With a message of the system by itself, as in Qwen2.5."""
THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""An answer without thoughts has an empty one before it, and `enable_thinking: false` begins with that, as in Qwen3."""
REASONING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ message.content }}{% endif %}
    {%- if message.role == 'user' %}{{ '<|User|>' + message.content }}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}
"""
"""Opens a thought for the model, and shows answers without their thoughts, as those distilled from DeepSeek-R1."""
HEADERS = """\
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- set content = content + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Begins with a token of its own and trims texts, as in Llama 3."""
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
"""Knows no system, as Gemma."""
CALLING = """\
{%- set ns = namespace(start=0) %}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {%- set ns.start = 1 %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n\\nTools:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\nCall one by JSON between <tool_call> and </tool_call>.' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[ns.start:] %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Shows tools and writes calls and their answers between tags, as Qwen does."""
TOKENS = (
    *(TEXT_END, START, END, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>"),
)
"""All special tokens of the tokenizer; the first is the one that ends a text."""


def tokenizer(template: str | None = CHATML, *, problems: Sequence[Problem] = tiny.PROBLEMS) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of the problems' texts, with the special tokens of all templates above."""
    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    byte_pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for problem in problems for text in (problem.question, problem.solution)]
    byte_pairs.train_from_iterator([*_ROLES, *texts], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs,
        bos_token="<|begin_of_text|>",
        eos_token=TEXT_END,
        pad_token=TEXT_END,
        additional_special_tokens=list(TOKENS),
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def write(
    folder: Path,
    template: str | None = CHATML,
    *,
    problems: Sequence[Problem] = tiny.PROBLEMS,
    seed: int = 1,
    max_tokens: int = 512,
) -> Path:
    """Write an untrained chat model into a folder as the hub has them, and return the folder.

    Its generation config names the end of a text alone: that a turn ends is known to the template. vLLM can load it.
    """
    made = tokenizer(template, problems=problems)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # vLLM has no attention for smaller ones on CPUs
        max_position_embeddings=max_tokens,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=made.eos_token_id,
        bos_token_id=None,
        pad_token_id=made.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def write_older(folder: Path, template: str = CHATML) -> Path:
    """Write the same in an older layout: the template in tokenizer_config.json, special tokens as objects."""
    write(folder, template)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chat_template"] = [{"name": "tool_use", "template": ""}, {"name": "default", "template": template}]
    config["eos_token"] = {"__type": "AddedToken", "content": config["eos_token"], "special": True}
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
