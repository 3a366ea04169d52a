"""`grpo-pipeline chat`: asks a model questions, and prints each answer while it is generated.

A model that was trained with tools uses its environment, whose answers are printed as well.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, ChatConfig
from components.shared.problem import Problem, Split
from pipelines.run.screen import printable
from pipelines.use import model_folder, weights_of

if TYPE_CHECKING:
    from components.environments.pool import Environments
    from components.policy.checkpoint import Checkpoint
    from components.rollout.sampler import Completion
    from components.shared.chat import Message

_NOT_UTF8 = "chat: the question is not UTF-8 text"
_OBSERVATION_PREFIX = "  | "  # prefix of each line from an environment


def chat(model: str, registry: str, *, question: str | None, temperature: float, max_new_tokens: int) -> None:
    """Ask a model one question, or all questions on standard input as one conversation, and print the answers."""
    if max_new_tokens < 1 or temperature < 0:
        raise PipelineError("chat: --max-new-tokens must be 1 or more, and --temperature 0 or more")
    if question is not None:
        _require_text(question)
    from components.environments.pool import Environments
    from components.policy.checkpoint import load_without_weights

    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(model, registry))
        checkpoint = load_without_weights(folder)
        tools, environments = checkpoint.format.tools, None
        if tools and tools.environment != "feedback":  # that environment needs the expected answer
            environments = stack.enter_context(closing(Environments(tools)))
        loaded = Model(checkpoint, folder, temperature, max_new_tokens, environments)
        if question is not None:
            print(f"> {printable(question)}\n" if sys.stdout.isatty() else "", end="")
            loaded.answer(question)
            return
        if sys.stdin.isatty():
            print("One question per line; Ctrl-C stops an answer, Ctrl-D ends.")
        for line in _lines():
            try:
                loaded.answer(line)
            except (KeyboardInterrupt, _TooLongError) as reason:
                print(f" ({str(reason) or 'stopped'})")


def _lines() -> Iterator[str]:
    """Yield the lines of the input that are not empty, until it ends or Ctrl-C; on a terminal, prompt for each."""
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except UnicodeDecodeError:
            raise PipelineError(_NOT_UTF8) from None
        if line.strip():
            _require_text(line)
            yield line


def _require_text(question: str) -> None:
    """Raise PipelineError if a question is empty or has bytes that are not UTF-8, which Python reads as surrogates."""
    if not question.strip():
        raise PipelineError("chat: the question is empty")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise PipelineError(_NOT_UTF8) from None


class _TooLongError(PipelineError):
    """A question leaves no room for an answer in the context of the model."""


class Model:
    """A model and the conversation with it so far."""

    def __init__(
        self,
        checkpoint: "Checkpoint",
        folder: Path,
        temperature: float,
        max_new_tokens: int,
        environments: "Environments | None",
    ) -> None:
        import torch
        import transformers

        from components.rollout.sampler import Sampling
        from components.rollout.trajectory import RolloutContext

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        # A stage saves in the file whether prompts use the chat template. A model from elsewhere uses it if it has one.
        if not (folder / PIPELINE_FILE).is_file() and checkpoint.tokenizer.chat_template:
            checkpoint = replace(checkpoint, config=checkpoint.config.model_copy(update={"chat": ChatConfig()}))
        self.checkpoint, self._max_new_tokens = checkpoint, max_new_tokens
        # This is transformers' own class, because the model class of the training expects packed sequences.
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            weights_of(folder), dtype=checkpoint.model.dtype, trust_remote_code=False
        ).to("cuda" if torch.cuda.is_available() else "cpu")
        sampling_settings = {"temperature": temperature, "top_k": 0} if temperature else {}  # 0 disables top-k
        self._settings = transformers.GenerationConfig(
            do_sample=temperature > 0,
            eos_token_id=list(checkpoint.end_ids),
            pad_token_id=checkpoint.end_ids[0],
            **sampling_settings,
        )
        sampling = Sampling(
            num_samples=1, temperature=temperature, max_new_tokens=max_new_tokens, seed=0, environments=environments
        )
        self.rollout = RolloutContext(checkpoint, sampling)
        self.conversation: list[Message] = []

    def answer(self, question: str) -> None:
        """Print the answer to a question, turn by turn, with the environment's answers in between.

        Raises _TooLongError, and forgets the question, if it leaves no room for an answer.
        """
        from components.rollout.trajectory import Status, Trajectory

        earlier = tuple((message["role"], message["content"]) for message in self.conversation)
        fields = {"id": "chat", "source": "chat", "split": Split.TEST, "subject": "", "level": None, "solution": ""}
        problem = Problem.model_validate({**fields, "question": question, "earlier": earlier, "answer": "unknown"})
        prompt_ids, max_tokens = self.prompt_ids(question), self.rollout.max_tokens
        if len(prompt_ids) >= max_tokens:
            del self.conversation[len(earlier) :]
            size = f"with what precedes it, the question has {len(prompt_ids):,} tokens"
            raise _TooLongError(f"chat: {size}, and the model reads {max_tokens:,} with the answer; ask a shorter one")
        with closing(Trajectory(self.rollout, problem, prompt_ids)) as trajectory:
            while trajectory.status is not Status.DONE:
                if trajectory.pending_answer is None:
                    ids = self.generate((*trajectory.prompt_ids, *trajectory.ids), trajectory.tokens_left)
                    trajectory.extend(ids, [0.0] * len(ids))  # log-probabilities, which nothing reads
                    continue
                answer = trajectory.pending_answer.result()
                trajectory.receive(answer)
                if trajectory.status is Status.SAMPLING:  # the model reads the answer
                    for line in printable(answer.observation.text).splitlines():
                        print(f"{_OBSERVATION_PREFIX}{line}")
        completion = trajectory.completion()
        self.conversation += self._answer_messages(completion)
        if completion.failure is not None:
            print(f"(its environment failed: {completion.failure})")
        elif not completion.finished:
            print(self._reached_limit(completion))

    def _streamer(self) -> Any:
        """Return a streamer that prints sampled tokens as text, without special tokens and control characters."""
        import transformers

        streamer = transformers.TextStreamer(self.checkpoint.tokenizer, skip_prompt=True, skip_special_tokens=True)
        print_text = streamer.on_finalized_text
        streamer.on_finalized_text = lambda text, stream_end=False: print_text(printable(text), stream_end)
        return streamer

    def generate(self, ids: tuple[int, ...], max_new_tokens: int) -> list[int]:
        """Return the sampled tokens of one turn, at most `max_new_tokens`, and print them as they are sampled."""
        import torch
        import transformers

        turn_stop = self.rollout.turn_stop

        def has_ended(ids_1T: Any, scores: Any, **_: Any) -> Any:
            return torch.tensor([turn_stop.ends(ids_1T[0, len(ids) :].tolist())], device=ids_1T.device)

        prompt = torch.tensor([ids], device=self._model.device)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=self._settings,
            max_new_tokens=max_new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([has_ended]),
            streamer=self._streamer(),
        )
        sampled: list[int] = output[0, len(ids) :].tolist()
        return sampled

    def prompt_ids(self, question: str) -> tuple[int, ...]:
        """Add a question to the conversation, and return the tokens of all of it.

        Without chat template, each question is separate: return the tokens of its prompt.
        """
        prompt_format = self.checkpoint.format
        if prompt_format.template is None:
            return self.checkpoint.prompt_ids(question)
        messages = prompt_format.messages(question)
        self.conversation += messages[-1:] if self.conversation else messages  # the system message only once
        thinking, tools = self.checkpoint.config.thinking, prompt_format.schemas
        text = prompt_format.template.render(self.conversation, is_prompt=True, thinking=thinking, tools=tools)
        return self.checkpoint.encode(text)

    def _answer_messages(self, completion: "Completion") -> "Iterator[Message]":
        """Yield the messages that an answer adds to the conversation."""
        # Fenced calls and the answers to them are parts of one message.
        if self.checkpoint.format.call_format == "fenced" or not completion.turns:
            yield {"role": "assistant", "content": completion.text}
            return
        for turn in completion.turns:
            yield {"role": "assistant", "content": turn.text}
            if turn.observation:
                yield from self.checkpoint.format.replies(turn.observation)

    def _reached_limit(self, completion: "Completion") -> str:
        """Return a remark that names the limit at which a completion was truncated."""
        tools = self.checkpoint.config.tools
        if completion.num_tokens >= self._max_new_tokens:
            return f"(truncated after {self._max_new_tokens:,} tokens; --max-new-tokens sets the limit)"
        if tools and len(completion.turns) >= tools.max_turns:
            return f"(truncated after {tools.max_turns:,} turns, as in training)"
        return "(truncated: the context of the model is full)"
