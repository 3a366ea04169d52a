"""A model that writes blocks of code by chance, and environments that answer it in this process."""

import math
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from components.environments.environment import Observation
from components.environments.pool import Answer, Environments
from components.policy.checkpoint import Checkpoint
from components.policy.padded import use_padded_rows
from components.rollout.sampler import Completion, Sampler, Sampling
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ChatConfig, ModelConfig
from components.shared.problem import Problem
from components.shared.tools import ToolsConfig, find_calls
from tests import tiny

WORDS = ["<end>", "<stop>", "```python\n", "```output\n", "\n```\n", "\n", "1", "2", "3", "+", "a", "b", "...", "?"]
MAX_TURNS, CONTEXT = 5, 60
QUESTIONS = ["1+2", "a", "3+3+1+2", "b?"]
PROBLEMS = tiny.asked(QUESTIONS)

_SIZES: dict[str, Any] = {
    **{"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0},
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": CONTEXT},
}


def gpt2() -> PreTrainedModel:
    """Positions are learned."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT, "initializer_range": 0.5}
    names = {"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(tie_word_embeddings=False, **names, **sizes))


def qwen3() -> PreTrainedModel:
    """Heads of 32: vLLM has no attention for smaller ones on CPUs."""
    changes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "initializer_range": 0.2}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SIZES, **changes}, tie_word_embeddings=False))


def mistral() -> PreTrainedModel:
    """Two heads of queries share one of keys."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None, "initializer_range": 0.4}
    config = transformers.MistralConfig(**{**_SIZES, **heads, "eos_token_id": 2, "pad_token_id": None})
    return transformers.MistralForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Takes padded rows: three of four layers are recurrences, which keep states and no keys."""
    experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16, "num_hidden_layers": 4, "initializer_range": 0.1}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1}
    linear |= {"linear_num_value_heads": 2, "head_dim": 8}
    return use_padded_rows(
        transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**_SIZES, **experts, **linear})), "it recurs"
    )


def checkpoint(
    make: Callable[[], PreTrainedModel] = mistral, template: str | None = None, **words_instead: str
) -> Checkpoint:
    """Return a model that writes blocks of code by chance; with a chat template, and with words in place of others."""
    torch.manual_seed(4)
    vocabulary = [words_instead.get(word, word) for word in WORDS]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="?"))
    pattern = "|".join(word.replace("+", r"\+").replace("?", r"\?").replace(".", r"\.") for word in vocabulary)
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    tools = ToolsConfig(environment="python", max_turns=MAX_TURNS, max_observation_tokens=12)
    tokenizer.chat_template = template
    chat = None if template is None else ChatConfig()
    config = ModelConfig(base="words", prompt="{question}\n", answer=AnswerPolicy.DECLARED, chat=chat, tools=tools)
    model = make().eval()
    model.generation_config.eos_token_id = [0, 1]
    return Checkpoint(model, tokenizer, config)


def answer(problem: Problem, past: Sequence[str], text: str) -> Answer:
    """Return what an environment answers that is done, fails or goes on by chance, but always in the same way."""
    chance = random.Random(repr((problem.question, list(past), text)))
    outcome, length = chance.random(), chance.randrange(25)
    if outcome < 0.05:
        return Answer(Observation(done=True), failure="it crashed")
    observed = "".join(chance.choice("123+ab\n") for _ in range(length))
    return Answer(Observation(observed, done=outcome < 0.1, rewards={"past": float(len(past))}))


class ActingEnvironments:
    """Environments in this process, which answer at once or when their time comes."""

    def __init__(self, delay_s: Callable[[], float] | None = None) -> None:
        self.config = ToolsConfig(environment="python", max_turns=MAX_TURNS)
        self.delay_s, self.open = delay_s, 0
        self.turns: list[str] = []
        """All turns that were answered."""

    def begin(self, problem: Problem, past: Sequence[str] = ()) -> Any:
        """See `Environments`."""
        self.open += 1
        turns = list(past)

        def step(text: str) -> "Future[Answer]":
            future, result = Future[Answer](), answer(problem, turns, text)
            turns.append(text)
            self.turns.append(text)
            if self.delay_s is None:
                future.set_result(result)
            else:
                threading.Timer(self.delay_s(), future.set_result, [result]).start()
            return future

        return SimpleNamespace(step=step, close=self._close)

    def _close(self) -> None:
        self.open -= 1


def sampling(environments: ActingEnvironments | None = None, **changes: Any) -> Sampling:
    """Return how trajectories of all kinds are sampled."""
    settings = {"num_samples": 8, "temperature": 0.7, "max_new_tokens": 22, "seed": 3, **changes}
    return Sampling(environments=cast(Environments, environments), **settings)


def _plain(text: str) -> str:
    """Return a text without the special token of this tokenizer that has one character."""
    return text.replace("?", " ")


Draw = Callable[[int, Tensor], int]
"""Returns the token at a sampled place, given the probabilities."""


@dataclass
class Naive:
    """A trajectory by the whole sequence, again for each token."""

    ids: list[int]
    spans: list[tuple[int, int]]
    logprobs: list[float]
    turns: list[tuple[str, str, bool]]
    """Of each the text, what was read of its answer, and whether it asked for one."""
    prompt: list[int]
    """The prompt, or since the last fork the one of that turn."""
    messages: list[dict[str, str]]
    """The conversation; the last is what the model has written of a message that goes on."""
    forks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    end: str = ""

    @classmethod
    def run(
        cls, checkpoint: Checkpoint, problem: Problem, sampling: Sampling, draw: Draw, context: int = CONTEXT
    ) -> "Naive":
        """Return the trajectory whose tokens are drawn so."""
        asked = {"role": "user", "content": _plain(checkpoint.config.ask(problem.question).strip())}
        messages = [asked, {"role": "assistant", "content": ""}]
        one = cls([], [], [], [], list(checkpoint.prompt_ids(problem.question)), messages)
        turn = list[int]()
        while not one.end:
            if len(one.logprobs) == sampling.max_new_tokens or len(one.context) >= context:
                one.turns += [(checkpoint.decode(turn), "", False)] if turn else []
                one.end = "tokens" if len(one.logprobs) == sampling.max_new_tokens else "context"
                break
            turn.append(one._sample(checkpoint, sampling.temperature or 1.0, draw))
            text, ended = checkpoint.decode([token for token in turn if token > 1]), turn[-1] in (0, 1)
            if ended or (text.endswith("\n```\n") and find_calls(text, "fenced")):
                one._answer(checkpoint, problem, text, context, ended, sampling)
                turn = []
        return one

    @property
    def context(self) -> list[int]:
        """What the model has read and written since the last fork."""
        return self.prompt + self.ids[self.forks[-1][0] if self.forks else 0 :]

    def _sample(self, checkpoint: Checkpoint, temperature: float, draw: Draw) -> int:
        with torch.no_grad():
            logits_V = checkpoint.model(torch.tensor([self.context])).logits[0, -1].double() / temperature
        probability_V = logits_V.softmax(-1)
        token = draw(len(self.logprobs), probability_V)
        self.ids.append(token)
        self.logprobs.append(math.log(float(probability_V[token])))
        return token

    def _answer(
        self, checkpoint: Checkpoint, problem: Problem, text: str, room: int, ended: bool, sampling: Sampling
    ) -> None:
        answered = answer(problem, [past for past, *_ in self.turns], text)
        observed, shown = checkpoint.read_observation(answered.observation.text, ended=ended)
        rewritten = self._rewritten(checkpoint, text, shown, ended)
        read = [*self.context, *observed] if rewritten is None else rewritten
        ends = {
            "failed": answered.failure is not None,
            "done": answered.observation.done,
            "turns": len(self.turns) + 1 == MAX_TURNS,
            "tokens": len(self.logprobs) == sampling.max_new_tokens,
            "context": len(read) >= room,
        }
        self.end = next((name for name, is_so in ends.items() if is_so), "")
        is_call = bool(find_calls(text, "fenced")) or not (answered.failure or answered.observation.done)
        self.turns.append((text, "" if self.end else shown, is_call))
        if not self.end:
            self.spans.append((len(self.ids), len(self.ids) + len(observed)))
            self.ids += observed
            if rewritten is not None:
                self.forks.append((len(self.ids), tuple(rewritten)))
                self.prompt = rewritten

    def _rewritten(self, checkpoint: Checkpoint, text: str, shown: str, ended: bool) -> list[int] | None:
        """Return the prompt that transformers writes for the next turn, if it does not begin with what was read."""
        if checkpoint.config.chat is None:
            return None
        self.messages[-1]["content"] += _plain(text)
        if not ended:
            self.messages[-1]["content"] += f"```output\n{shown}\n```\n"
            return None
        self.messages.append({"role": "user", "content": shown})
        ids = checkpoint.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        self.messages.append({"role": "assistant", "content": ""})
        return None if ids[: len(self.context)] == self.context else list(ids)

    def require(self, completion: Completion) -> None:
        """Fail unless a completion is this trajectory."""
        assert completion.tokens.completion_ids == tuple(self.ids)
        assert completion.tokens.environment == tuple(span for span in self.spans if span[0] < span[1])
        assert completion.tokens.forks == tuple(self.forks)
        assert completion.logprobs == pytest.approx(self.logprobs, abs=1e-4)
        assert [(turn.text, turn.observation, turn.is_call) for turn in completion.turns] == self.turns
        assert completion.finished == (self.end == "done")
        assert (completion.failure is not None) == (self.end == "failed")


def generate(sampler: Sampler, sampling: Sampling) -> list[Completion]:
    """Return the completions of all problems, one group after the other."""
    return list(chain.from_iterable(sampler.generate(PROBLEMS, sampling)))


def require_true(
    completions: Sequence[Completion], plain: Checkpoint, sampling: Sampling, context: int = CONTEXT
) -> set[str]:
    """Fail unless each is what the tokens that it sampled make it to be; return how they end."""

    def reference(problem: Problem, ids: Sequence[int]) -> Naive:
        return Naive.run(plain, problem, sampling, lambda place, _: ids[place], context)

    problems = [problem for problem in PROBLEMS for _ in range(sampling.num_samples)]
    pairs = zip(problems, completions, strict=True)
    references = [reference(problem, completion.tokens.sampled_ids) for problem, completion in pairs]
    for each, completion in zip(references, completions, strict=True):
        each.require(completion)
    return {each.end for each in references}
