"""Model checkpoints: Hugging Face folders, with the prompt that the model was trained on beside the weights."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from components.policy.compatibility import prepare_model
from components.policy.lora import merged_state_dict
from components.policy.packing import TokenSequence
from components.policy.padded import padded_because
from components.shared import jsonl, lineage
from components.shared.chat import CUT, AnsweredTurn, ChatTemplate, PromptFormat, no_template, opens_thought
from components.shared.errors import PipelineError, is_failed_allocation
from components.shared.imports import without_packages
from components.shared.model import PIPELINE_FILE, ModelConfig, local_model, prompt_settings, require_model_folder
from components.shared.problem import Problem
from components.shared.tokenizer import EOS, PAD, UNKNOWN, tokenizer_for

with without_packages("sklearn"):  # with SciPy and pandas a second and 110 MB, for assisted decoding
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

Messages = Sequence[tuple[str, str]]
"""Messages of a conversation: role and content."""
_LOADING_SETTINGS = ("is_local", "local_files_only", "auto_map")
"""Settings that transformers adds to a tokenizer as it loads it; `auto_map` names code, which is never run."""
_MAX_THINK_TOKENS = 16
"""Most tokens that `<think>` and a line break after it may take at the end of a prompt."""
_MAX_CHARACTERS_PER_TOKEN = 16
"""A longer observation is cut to so many characters per allowed token before its tokens are counted, for speed."""


class ReadObservation(NamedTuple):
    """An answer of the environment as the model reads it."""

    ids: tuple[int, ...]
    """Tokens of the text and of what the chat template puts around it."""
    text: str
    """The answer, or the beginning of one that is too long; `NEXT_ANSWER` separates the answers to several calls."""


@dataclass(frozen=True)
class Checkpoint:
    """A model with its tokenizer and prompt."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: ModelConfig

    @cached_property
    def format(self) -> PromptFormat:
        """The form of the prompts; PipelineError if the config has `chat` and the tokenizer has no chat template."""
        if self.config.chat is None:
            return PromptFormat(self.config, None)
        try:
            text = self.tokenizer.get_chat_template()
        except ValueError:
            raise no_template(self.config.base) from None
        template = ChatTemplate(self.config.base, text, self.tokenizer.special_tokens_map)
        return PromptFormat(self.config, template)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion: that of the chat template first, then those of the model or tokenizer."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        end_ids = eos if isinstance(eos, list) else [eos]
        template_end = self.encode(self.format.end.lstrip())[:1]
        # A token that is not special may also occur within an answer.
        if template_end and template_end[0] in self.tokenizer.added_tokens_decoder:
            end_ids = [*template_end, *end_ids]
        return tuple(dict.fromkeys(end_ids))

    @property
    def is_padded(self) -> bool:
        """Whether the model needs padded rows (padded.py)."""
        return bool(padded_because(self.model))

    def cost_of_padding(self) -> str:
        """Return a line that says what padded rows cost, and why the model needs them."""
        return f"padded rows, each prompt once per completion: {padded_because(self.model)}"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.model.device
        return device

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""
        return self._encode_all([text])[0]

    def prompt_ids(
        self, question: str, source: str = "", earlier: Messages = (), turns: Sequence[AnsweredTurn] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of the prompt that asks a question from a source of problems, after earlier messages.

        With `turns`, it is the prompt for the turn after them. A plain prompt begins with the begin token if the model
        has one; a chat template writes the special tokens, and the text of a question or turn never becomes one.
        """
        turns = [turn._replace(response=self._without_special_tokens(turn.response)) for turn in turns]
        return self._with_begin(self.encode(self._prompt(question, source, earlier, turns)))

    def read_observation(self, text: str, *, ended: bool) -> ReadObservation:
        """Return the environment's answer as the model reads it after a turn, up to where the model writes again.

        `ended` says whether the turn has an end token. The answer is cut if, with the template around it, it exceeds
        `tools.max_observation_tokens`. Its text never becomes a special token.
        """
        assert self.config.tools is not None
        limit = self.config.tools.max_observation_tokens
        text = self._without_special_tokens(text)

        def read(num_characters: int) -> ReadObservation:
            shown = text if num_characters >= len(text) else text[:num_characters] + CUT
            ids = self.encode(self.format.observation(shown, ended=ended))
            return ReadObservation(ids, shown)

        longest = min(len(text), _MAX_CHARACTERS_PER_TOKEN * limit)
        observation = read(longest)
        if len(observation.ids) <= limit:
            return observation
        # A longer text nearly always has more tokens, so bisect for the number of lengths (0, 1, ...) that fit.
        num_fitting = bisect_right(range(longest), limit, key=lambda length: len(read(length).ids))
        return read(max(0, num_fitting - 1))

    def require_room_for_observations(self) -> None:
        """Raise PipelineError if `tools.max_observation_tokens` leaves no room for the text of an observation."""
        self.format.require_room_for_observations(lambda text: len(self.encode(text)))

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends in `<think>`, so that its completion begins inside a thought."""
        return opens_thought(self.tokenizer.decode(list(prompt_ids[-_MAX_THINK_TOKENS:])))

    def examples(self, problems: Sequence[Problem]) -> list[TokenSequence]:
        """Return the examples for fine-tuning: the prompt of each problem with its solution and an end token.

        Each turn and each answer of an environment is tokenised separately, as in sampling.
        """
        prompts = self._encode_all([self._prompt(each.question, each.source, each.earlier) for each in problems])
        parts_B = [self.format.response_parts(problem) for problem in problems]
        ids_of_parts = iter(self._encode_all([text for parts in parts_B for text, _ in parts]))
        examples = []
        for prompt_ids, parts in zip(prompts, parts_B, strict=True):
            completion_ids: list[int] = []
            environment: list[tuple[int, int]] = []
            for _, is_of_environment in parts:
                start = len(completion_ids)
                completion_ids += next(ids_of_parts)
                if is_of_environment:
                    environment.append((start, len(completion_ids)))
            completion_ids.append(self.end_ids[0])
            examples.append(TokenSequence(self._with_begin(prompt_ids), tuple(completion_ids), tuple(environment)))
        return examples

    def _with_begin(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return a plain prompt after the begin token that its tokenizer adds to texts; a chat template writes it."""
        begin = self.tokenizer.bos_token_id
        if self.format.template or begin not in self.tokenizer.encode("") or prompt_ids[:1] == (begin,):
            return prompt_ids
        return (begin, *prompt_ids)

    @cached_property
    def _special_tokens(self) -> list[str]:
        # Some tokenizers' `all_special_tokens` lacks those without a role, such as some that frame messages.
        marked = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return sorted(marked.union(self.tokenizer.all_special_tokens))

    def _without_special_tokens(self, text: str) -> str:
        """Return a text that has no special tokens: a space after their first character breaks them up."""
        for token in self._special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
        return text

    def _prompt(self, question: str, source: str, earlier: Messages, turns: Sequence[AnsweredTurn] = ()) -> str:
        """Return the text of a prompt (see `prompt_ids`)."""
        if self.format.template:
            question = self._without_special_tokens(question)
            earlier = [(role, self._without_special_tokens(content)) for role, content in earlier]
        return self.format.prompt(question, source, earlier, turns)

    def _encode_all(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each text; one call for all takes far less time than one each."""
        if not texts:  # which the tokenizer refuses
            return []
        return [tuple(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of completion tokens without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def create(
    config: ModelConfig, problems: Sequence[Problem], *, seed: int, dtype: torch.dtype, quantise: str | None = None
) -> Checkpoint:
    """Return the base model with its weights (`quantise` as in EngineConfig), or a new one made from scratch.

    A new one has random weights, which depend on the seed alone, and a vocabulary made from `problems`.
    """
    size = config.scratch
    if size is None:
        return _read(config, dtype, quantise=quantise)
    if quantise:
        raise PipelineError(f"engine.quantise: trains only adapters, and {config.base} has random weights")
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_for(config, problems),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    # Not Qwen2: for it transformers' AutoTokenizer replaces the saved splitting rules by its own.
    qwen3 = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        head_dim=size.hidden_size // size.num_heads,
        max_position_embeddings=size.max_tokens,
        # The usual 0.02 suits models ten times as wide; at this size it halves the accuracy after the same steps.
        initializer_range=0.05,
        # Untied: vLLM's in-place weight reload silently keeps the old output head of a tied model.
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Checkpoint(_to_device(Qwen3ForCausalLM(qwen3).to(dtype)), tokenizer, config)


def load(folder: Path, *, dtype: torch.dtype, quantise: str | None = None) -> Checkpoint:
    """Return the checkpoint that a stage saved in `folder`; `quantise` is as in EngineConfig."""
    saved = jsonl.read_json(folder / PIPELINE_FILE)
    config = ModelConfig(base=saved.get("weights", str(folder)), **prompt_settings(saved))
    return _read(config, dtype, revision=saved.get("revision"), quantise=quantise)


def load_without_weights(folder: Path) -> Checkpoint:
    """Return the checkpoint in a Hugging Face folder, or the one that `folder` refers to, with a model on device meta.

    The type of its parameters is that of the model's config, or float32 if that has none. The prompt is the question
    alone, unless a stage saved another one.
    """
    path = folder / PIPELINE_FILE
    saved = jsonl.read_json(path) if path.is_file() else {}
    base, revision = saved.get("weights", str(folder)), saved.get("revision")
    if Path(base).is_dir():
        require_model_folder(Path(base))
    with _explain_loading_errors(base):
        config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            dtype = config.dtype or torch.float32
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        with suppress(OSError):  # a model without this file
            model.generation_config = GenerationConfig.from_pretrained(base, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
        _require_row_for_each_token(base, model, tokenizer)
    return Checkpoint(model, tokenizer, ModelConfig(base=base, **{"prompt": "{question}", **prompt_settings(saved)}))


def with_weights(checkpoint: Checkpoint, folder: Path, *, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint that `load_without_weights(folder)` returned, with its weights loaded."""
    path = folder / PIPELINE_FILE
    saved = jsonl.read_json(path) if path.is_file() else {}
    return _read(checkpoint.config, dtype, revision=saved.get("revision"))


@contextmanager
def _explain_loading_errors(base: str) -> Iterator[None]:
    """Turn the errors of transformers while it reads a model, except for failed allocations, into a PipelineError."""
    try:
        yield
    except UnpicklingError:
        reason = "its weights are a pickle that holds more than tensors, and no code of a model is run"
        raise PipelineError(f"model {base}: cannot be loaded ({reason}); convert them to safetensors") from None
    except LookupError as error:
        raise PipelineError(f"model {base}: cannot be loaded (its files do not fit together: {error})") from None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if is_failed_allocation(error):
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise PipelineError(f"model {base}: cannot be loaded ({reason})") from None


def _read(
    config: ModelConfig, dtype: torch.dtype, *, revision: str | None = None, quantise: str | None = None
) -> Checkpoint:
    """Return the model of the config with its tokenizer and its weights, prepared for training."""
    base = local_model(config.base)
    if Path(base).is_dir():
        require_model_folder(Path(base))
    options = _quantised_loading(quantise, dtype) if quantise else {}
    with _explain_loading_errors(base):
        model, loading = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            revision=revision,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
    if quantise:
        for layer in model.modules():
            # bitsandbytes' CPU kernel reorders the weights in place, and rounds differently from the backward pass.
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise PipelineError(f"model {base}: lacks {len(missing)} of its weights, such as {missing[0]}")
    _require_row_for_each_token(base, model, tokenizer)
    prepare_model(model)
    # The sampling defaults of a checkpoint (top-p, repetition penalty ...) would silently change the completions.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return Checkpoint(_to_device(model), tokenizer, config)


def _quantised_loading(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return arguments of `from_pretrained`: linear layers except the output layer have 4 bits, computed in `dtype`."""
    try:
        import bitsandbytes  # noqa: F401  # transformers' error for a missing one names three packages
    except (ImportError, RuntimeError) as error:
        raise PipelineError(f"engine.quantise: bitsandbytes cannot be used here ({error}); set it to null") from None
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": settings, "device_map": {"": "cuda" if torch.cuda.is_available() else "cpu"}}


def _require_row_for_each_token(base: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    num_rows, num_tokens = len(model.get_input_embeddings().weight), max(tokenizer.get_vocab().values()) + 1
    if num_tokens > num_rows:
        problem = f"its tokenizer has {num_tokens:,} tokens and its embedding {num_rows:,} rows"
        raise PipelineError(f"model {base}: {problem}; resize the embedding (`resize_token_embeddings`)")


def _to_device(model: PreTrainedModel) -> PreTrainedModel:
    model = model.eval()
    if not getattr(model, "is_quantized", False):  # else `device_map` has loaded it onto the device
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model


def save(checkpoint: Checkpoint, folder: Path, *, max_shard_size: str = "50GB") -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM` loads, with adapters merged into the weights.

    Weights without adapters come first: in a model larger than `max_shard_size`, the first files are then equal in all
    checkpoints.
    """
    weights = merged_state_dict(checkpoint.model)
    adapted = weights.keys() - checkpoint.model.state_dict().keys()
    ordered = dict(sorted(weights.items(), key=lambda item: item[0] in adapted))
    if checkpoint.config.chat is not None:  # servers read this config, not pipeline.json
        checkpoint.model.generation_config.eos_token_id = list(checkpoint.end_ids)
    with _without_quantisation(checkpoint.model):
        checkpoint.model.save_pretrained(folder, state_dict=ordered, max_shard_size=max_shard_size)
    save_tokenizer(checkpoint.tokenizer, folder)
    _write_prompt(checkpoint, folder)


@contextmanager
def _without_quantisation(model: PreTrainedModel) -> Iterator[None]:
    """Remove the marks of a quantised model while the block saves its dequantised weights."""
    marks = ((vars(model), "hf_quantizer"), (vars(model.config), "quantization_config"))
    removed = [(attributes, name, attributes.pop(name)) for attributes, name in marks if name in attributes]
    try:
        yield
    finally:
        for attributes, name, value in removed:
            attributes[name] = value


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer without the settings that depend on how and from where it was loaded."""
    for name in _LOADING_SETTINGS:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def save_base(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a base model: in full if it was initialised from scratch, else a reference to its folder or hub id."""
    base = local_model(checkpoint.config.base)
    # Record the exact version: a branch on the hub may move, and the content of a folder may change.
    if checkpoint.config.scratch:
        save(checkpoint, folder)
    elif Path(base).is_dir():
        _write_prompt(checkpoint, folder, weights=str(Path(base).resolve()), digest=lineage.digest(Path(base)))
    else:
        commit = getattr(checkpoint.model.config, "_commit_hash", None)
        _write_prompt(checkpoint, folder, weights=base, revision=commit)


def _write_prompt(checkpoint: Checkpoint, folder: Path, **others: str | None) -> None:
    """Write pipeline.json: the keys of the config that determine the prompt, and others such as the weights' origin."""
    jsonl.write_json(folder / PIPELINE_FILE, {**prompt_settings(checkpoint.config.model_dump(mode="json")), **others})
