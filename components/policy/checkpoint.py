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
from components.shared import jsonl, lineage, tokenizer
from components.shared.chat import CUT, AnsweredTurn, ChatTemplate, PromptFormat, no_template, opens_thought
from components.shared.errors import PipelineError, out_of_memory
from components.shared.imports import without_packages
from components.shared.model import PIPELINE_FILE, ModelConfig, asking, local_model, require_model_folder
from components.shared.problem import Problem

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

_NOT_OF_THE_TOKENIZER = ("is_local", "local_files_only", "auto_map")
"""What transformers adds to a tokenizer's settings as it loads it; the last names code, which is never run."""
_END_OF_PROMPT = 16
"""Tokens at the end of a prompt that `<think>` and a line break after it take at most."""
_MAX_CHARACTERS_PER_TOKEN = 16
"""Of an observation: what is longer is cut before its tokens are counted."""


class ReadObservation(NamedTuple):
    """What a model reads of an answer of its environment."""

    ids: tuple[int, ...]
    """With what its template puts around the text."""
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
        """How questions are put to the model; PipelineError where its tokenizer lacks the chat template."""
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
        """The tokens that end a completion: the one of the chat template, and those of the model or its tokenizer."""
        end = self.model.generation_config.eos_token_id
        if end is None:
            end = self.tokenizer.eos_token_id
        of_model = end if isinstance(end, list) else [end]
        of_turn = self.encode(self.format.end.lstrip())[:1]
        is_special = of_turn and of_turn[0] in self.tokenizer.added_tokens_decoder  # else an answer may well have it
        return tuple(dict.fromkeys([*(of_turn if is_special else ()), *of_model]))

    @property
    def is_padded(self) -> bool:
        """Whether the model takes padded rows alone (padded.py)."""
        return bool(padded_because(self.model))

    def cost_of_padding(self) -> Iterator[str]:
        """Yield what it costs that the model takes padded rows, and why it does; nothing for other models."""
        if self.is_padded:
            yield f"padded rows, each prompt once per completion: {padded_because(self.model)}"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.model.device
        return device

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""
        return self._encode([text])[0]

    def prompt_ids(
        self,
        question: str,
        source: str = "",
        earlier: Sequence[tuple[str, str]] = (),
        turns: Sequence[AnsweredTurn] = (),
    ) -> tuple[int, ...]:
        """Return the tokens of the prompt that asks a question from a source of problems, after earlier messages.

        With `turns`, they are those of the prompt of the turn after them. They begin with the begin token if the model
        has one; a chat template sets it, and all special tokens, itself: none comes from a question or a turn.
        """
        turns = [turn._replace(response=self._without_special_tokens(turn.response)) for turn in turns]
        return self._begun(self.encode(self._prompt(question, source, earlier, turns)))

    def read_observation(self, text: str, *, ended: bool) -> ReadObservation:
        """Return what the model reads after a turn: the answer of its environment, up to where the model writes.

        Of an answer that is too long, the end is left out (`tools.max_observation_tokens`); what a template puts around
        it stays whole. No text of an environment becomes a special token.
        """
        assert self.config.tools is not None
        limit = self.config.tools.max_observation_tokens
        text = self._without_special_tokens(text)

        def first(num_characters: int) -> ReadObservation:
            shown = text if num_characters >= len(text) else text[:num_characters] + CUT
            ids = self.encode(self.format.observation(shown, ended=ended))
            return ReadObservation(ids, shown)

        longest = min(len(text), _MAX_CHARACTERS_PER_TOKEN * limit)
        read = first(longest)
        if len(read.ids) <= limit:
            return read
        # A longer text has more tokens, by and large; the shortest has those of the template at least.
        return first(max(0, bisect_right(range(longest), limit, key=lambda number: len(first(number).ids)) - 1))

    def require_observations(self) -> None:
        """Raise PipelineError where the limit of observations leaves no room for what they say."""
        self.format.require_observations(lambda text: len(self.encode(text)))

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends in `<think>`, so that what follows begins inside a thought."""
        return opens_thought(self.tokenizer.decode(list(prompt_ids[-_END_OF_PROMPT:])))

    def examples(self, problems: Sequence[Problem]) -> list[TokenSequence]:
        """Return each problem with its solution and an end token: the targets of fine-tuning.

        Every turn and every answer of an environment is tokenised by itself, as it is when a model acts.
        """
        prompts = self._encode([self._prompt(each.question, each.source, each.earlier) for each in problems])
        parts_B = [self.format.response_parts(problem) for problem in problems]
        tokens = iter(self._encode([text for parts in parts_B for text, _ in parts]))
        examples = []
        for prompt, parts in zip(prompts, parts_B, strict=True):
            ids: list[int] = []
            environment: list[tuple[int, int]] = []
            for _, is_of_environment in parts:
                start = len(ids)
                ids += next(tokens)
                if is_of_environment:
                    environment.append((start, len(ids)))
            completion_ids = (*ids, self.end_ids[0])
            examples.append(TokenSequence(self._begun(prompt), completion_ids, tuple(environment)))
        return examples

    @property
    def _begin(self) -> tuple[int, ...]:
        if self.format.template:
            return ()
        return tuple(token for token in self.tokenizer.encode("") if token == self.tokenizer.bos_token_id)

    def _begun(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prompt with the begin token, which the text of `prompt` may have already."""
        return ids if ids[:1] == self._begin else (*self._begin, *ids)

    @cached_property
    def _special_tokens(self) -> list[str]:
        # Some tokenizers list only those with a role, such as the end of a text, and not all that frame messages.
        marked = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return sorted(marked.union(self.tokenizer.all_special_tokens))

    def _without_special_tokens(self, text: str) -> str:
        """Return a text in which no special token is read."""
        for token in self._special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}" if len(token) > 1 else " ")
        return text

    def _prompt(
        self,
        question: str,
        source: str,
        earlier: Sequence[tuple[str, str]],
        turns: Sequence[AnsweredTurn] = (),
    ) -> str:
        if self.format.template:
            question = self._without_special_tokens(question)
            earlier = [(role, self._without_special_tokens(content)) for role, content in earlier]
        return self.format.prompt(question, source, earlier, turns)

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Return the tokens of texts, in one call: each takes longer than most texts."""
        return [tuple(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of completion tokens without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def create(
    config: ModelConfig, problems: Sequence[Problem], *, seed: int, dtype: torch.dtype, quantise: str | None = None
) -> Checkpoint:
    """Return the base model: from a folder or hub, or initialised from scratch with a vocabulary from `problems`.

    `quantise` is as in EngineConfig; PipelineError for a model from scratch, whose weights are random.
    """
    size = config.scratch
    if size is None:
        return _read(config, dtype, quantise=quantise)
    if quantise:
        raise PipelineError(f"engine.quantise: {config.base} has random weights, which adapters do not make a model of")
    torch.manual_seed(seed)
    text = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.tokenizer_for(config, problems),
        pad_token=tokenizer.PAD,
        eos_token=tokenizer.EOS,
        unk_token=tokenizer.UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    # Qwen3 and not Qwen2, for which transformers' AutoTokenizer replaces the saved splitting rules by its own.
    qwen3 = Qwen3Config(
        vocab_size=len(text),
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
        eos_token_id=text.eos_token_id,
        bos_token_id=None,
        pad_token_id=text.pad_token_id,
    )
    return Checkpoint(_to_device(Qwen3ForCausalLM(qwen3).to(dtype)), text, config)


def load(folder: Path, *, dtype: torch.dtype, quantise: str | None = None) -> Checkpoint:
    """Return the checkpoint that a stage saved in `folder`; `quantise` is as in EngineConfig."""
    described = jsonl.read_json(folder / PIPELINE_FILE)
    base = described.get("weights", str(folder))
    config = ModelConfig(base=base, **asking(described))
    return _read(config, dtype, revision=described.get("revision"), quantise=quantise)


def load_without_weights(folder: Path) -> Checkpoint:
    """Return the checkpoint in any Hugging Face folder, or the one that `folder` refers to, with a model of no values.

    It has the tokenizer, the end tokens and the type that the config names, float32 where it names none. The prompt is
    the question alone, unless a stage saved another one.
    """
    path = folder / PIPELINE_FILE
    described = jsonl.read_json(path) if path.is_file() else {}
    base, revision = described.get("weights", str(folder)), described.get("revision")
    if Path(base).is_dir():
        require_model_folder(Path(base))
    with _explained(base):
        shape = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            dtype = shape.dtype or torch.float32
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=False)
        with suppress(OSError):  # it need not be there
            model.generation_config = GenerationConfig.from_pretrained(base, revision=revision)
        text = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
        _require_row_for_each_token(base, model, text)
    return Checkpoint(model, text, ModelConfig(base=base, **{"prompt": "{question}", **asking(described)}))


def with_weights(checkpoint: Checkpoint, folder: Path, *, dtype: torch.dtype) -> Checkpoint:
    """Return a checkpoint that was loaded from `folder` without weights with its weights."""
    path = folder / PIPELINE_FILE
    described = jsonl.read_json(path) if path.is_file() else {}
    return _read(checkpoint.config, dtype, revision=described.get("revision"))


@contextmanager
def _explained(base: str) -> Iterator[None]:
    """Turn what transformers raises while it reads a model, for want of memory apart, into a PipelineError."""
    try:
        yield
    except UnpicklingError:
        reason = "its weights are a pickle that holds more than tensors, and no code of a model is run"
        raise PipelineError(f"model {base}: cannot be loaded ({reason}); convert them to safetensors") from None
    except LookupError as error:
        raise PipelineError(f"model {base}: cannot be loaded (its files do not fit together: {error})") from None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error) is not None:
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise PipelineError(f"model {base}: cannot be loaded ({reason})") from None


def _read(
    config: ModelConfig, dtype: torch.dtype, *, revision: str | None = None, quantise: str | None = None
) -> Checkpoint:
    base = local_model(config.base)
    if Path(base).is_dir():
        require_model_folder(Path(base))
    with _explained(base):
        model, loading = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            revision=revision,
            output_loading_info=True,
            trust_remote_code=False,
            **(_quantisation(quantise, dtype) if quantise else {}),
        )
        text = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
    for layer in model.modules() if quantise else ():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # Its kernel for processors takes the weights apart in place, and rounds otherwise than the backward pass.
            layer.support_avx512bf16_for_cpu = False
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise PipelineError(f"model {base}: lacks {len(missing)} of its weights, such as {missing[0]}")
    _require_row_for_each_token(base, model, text)
    prepare_model(model)
    # The sampling defaults of a checkpoint (top-p, repetition penalty ...) would silently change what is sampled.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return Checkpoint(_to_device(model), text, config)


def _quantisation(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what loads every linear layer but the output layer in 4 bits, and computes in `dtype`."""
    try:
        import bitsandbytes  # noqa: F401  # without it transformers' error names three packages
    except (ImportError, RuntimeError) as error:
        raise PipelineError(f"engine.quantise: bitsandbytes cannot be used here ({error}); set it to null") from None
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": settings, "device_map": {"": "cuda" if torch.cuda.is_available() else "cpu"}}


def _require_row_for_each_token(base: str, model: PreTrainedModel, text: PreTrainedTokenizerBase) -> None:
    rows, tokens = len(model.get_input_embeddings().weight), max(text.get_vocab().values()) + 1
    if tokens > rows:
        problem = f"its tokenizer has {tokens:,} tokens and its embedding {rows:,} rows"
        raise PipelineError(f"model {base}: {problem}; resize the embedding (`resize_token_embeddings`)")


def _to_device(model: PreTrainedModel) -> PreTrainedModel:
    if getattr(model, "is_quantized", False):  # it has been loaded there
        return model.eval()
    moved: PreTrainedModel = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return moved


def save(checkpoint: Checkpoint, folder: Path, *, max_shard_size: str = "50GB") -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM` loads, adapters merged into the weights.

    With adapters, the weights that have none go into the first files: of a model that is larger than `max_shard_size`
    these are equal from one checkpoint to the next.
    """
    weights = merged_state_dict(checkpoint.model)
    adapted = weights.keys() - checkpoint.model.state_dict().keys()
    ordered = dict(sorted(weights.items(), key=lambda item: item[0] in adapted))
    if checkpoint.config.chat is not None:  # for those who serve the folder without reading pipeline.json
        checkpoint.model.generation_config.eos_token_id = list(checkpoint.end_ids)
    with _as_if_plain(checkpoint.model):
        checkpoint.model.save_pretrained(folder, state_dict=ordered, max_shard_size=max_shard_size)
    save_tokenizer(checkpoint.tokenizer, folder)
    _write_prompt(checkpoint, folder)


@contextmanager
def _as_if_plain(model: PreTrainedModel) -> Iterator[None]:
    """Have transformers save a quantised model as one that is not: its weights are given in full."""
    places = ((vars(model), "hf_quantizer"), (vars(model.config), "quantization_config"))
    kept = [values.pop(name, None) for values, name in places]
    try:
        yield
    finally:
        for (values, name), value in zip(places, kept, strict=True):
            if value is not None:
                values[name] = value


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer without what transformers notes in it of how and from where it was loaded."""
    for name in _NOT_OF_THE_TOKENIZER:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def save_base(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a base model: in full if it was initialised from scratch, else a reference to its folder or hub."""
    base = local_model(checkpoint.config.base)
    # A branch of a hub moves, and so may the content of a folder: the exact version is recorded.
    if checkpoint.config.scratch:
        save(checkpoint, folder)
    elif Path(base).is_dir():
        _write_prompt(checkpoint, folder, weights=str(Path(base).resolve()), digest=lineage.digest(Path(base)))
    else:
        commit = getattr(checkpoint.model.config, "_commit_hash", None)
        _write_prompt(checkpoint, folder, weights=base, revision=commit)


def _write_prompt(checkpoint: Checkpoint, folder: Path, **others: str | None) -> None:
    jsonl.write_json(folder / PIPELINE_FILE, {**asking(checkpoint.config.model_dump(mode="json")), **others})
