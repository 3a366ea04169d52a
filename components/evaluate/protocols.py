r"""Named protocols: dataset and method of a measurement, so that a number means the same wherever it is printed.

Solved examples are drawn from the training split of the dataset with a fixed seed, since we may not distribute those of
papers; you can replace them by your own file (docs/how-to/evaluation.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from components.shared import jsonl
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.problem import Split, draw, problems_file, read_problems
from components.shared.tools import ToolsConfig

Dataset = Literal["gsm8k", "math500", "math"]
"""A kind of source of prepare_data, whose test split is measured."""

PIPELINE = "pipeline"
"""The protocol with the prompt of training."""
EXAMPLES_FILE = "examples.jsonl"
"""In the folder of the problems: `question` and `solution` of examples that replace those of the training split."""
_EXAMPLES_SEED = 1
_QUESTION = "{question}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Dataset and method of a measurement."""

    dataset: Dataset | None
    """None for any problems."""
    prompt: str | None
    """Prompt with the placeholder `{question}`; None for the prompt in the model's pipeline.json."""
    answer: AnswerPolicy | None
    """Where an answer has to state its result to count as right; None for the place that pipeline.json names."""
    max_new_tokens: int
    """Tokens after which an answer is truncated."""
    chat: bool = False
    """Whether the prompt is a user message in the chat template of the model's tokenizer."""
    num_shots: int = 0
    """Solved examples before the question."""
    example: str = ""
    """Template of a solved example, with `{question}` and `{solution}`."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends: a base model would otherwise continue with another question."""
    tools: ToolsConfig | None = None
    """The environment in which the model answers; None for no environment, or for that of pipeline.json."""

    @property
    def summary(self) -> str:
        """One line on the measurement."""
        if self.prompt is None:
            return "the problems of a run, with the prompt that the model was trained with"
        examples = f"{self.num_shots} solved examples" if self.num_shots else "no examples"
        way = "chat template" if self.chat else "plain text"
        tools = f", tool {self.tools.environment} in up to {self.tools.max_turns} turns" if self.tools else ""
        form = "after ####" if self.answer is AnswerPolicy.MARKED else "in a box"
        return f"{self.dataset}, {way}, {examples}{tools}, answer {form}, {self.max_new_tokens:,} tokens"

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of problems that the protocol accepts; empty if it accepts all."""
        if self.dataset is None:
            return ()
        return ("gsm8k",) if self.dataset == "gsm8k" else ("math", "math500")


_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_CHAT = f"{_QUESTION}\n{_BOXED}"
_GSM8K_EXAMPLE = "Question: {question}\nAnswer: {solution}\n\n"
_MATH_EXAMPLE = "Problem:\n{question}\n\nSolution:\n{solution}\n\n"
# DeepSeekMath's instruction, in English (arXiv 2402.03300, appendix A.1), as its chat template writes it.
_DEEPSEEKMATH = f"User: {_CHAT}\n\nAssistant:"
# The same with tools, which the Qwen2.5-Math models know as well.
_DEEPSEEKMATH_TOOLS = (
    f"User: {_QUESTION}\nPlease integrate natural language reasoning with programs to solve the problem above, and put "
    "your final answer within \\boxed{}.\n\nAssistant:"
)
# For any chat model: it may not know tool calls, but it can write a fenced block of code.
_PYTHON_CHAT = (
    f"{_QUESTION}\nReason step by step, and let Python compute: what a block of code that begins with ```python and "
    "ends with ``` prints is shown to you before you go on. Put your final answer within \\boxed{}."
)
_PYTHON = ToolsConfig(environment="python", call_format="fenced")

_boxed = partial(Protocol, answer=AnswerPolicy.BOXED)
_gsm8k = partial(_boxed, dataset="gsm8k", max_new_tokens=1024)
_math = partial(_boxed, dataset="math", max_new_tokens=2048)
_math500 = partial(_boxed, dataset="math500", max_new_tokens=2048)

PROTOCOLS = {
    PIPELINE: Protocol(dataset=None, prompt=None, answer=None, max_new_tokens=1024),
    "gsm8k-chat": _gsm8k(prompt=_CHAT, chat=True),
    "gsm8k-8shot": Protocol(
        dataset="gsm8k",
        prompt="Question: {question}\nAnswer:",
        num_shots=8,
        example=_GSM8K_EXAMPLE,
        stop=("Question:",),
        answer=AnswerPolicy.MARKED,
        max_new_tokens=512,
    ),
    "gsm8k-deepseekmath": _gsm8k(prompt=_DEEPSEEKMATH),
    "math500-chat": _math500(prompt=_CHAT, chat=True),
    "math-chat": _math(prompt=_CHAT, chat=True),
    "math-4shot": _boxed(
        dataset="math",
        prompt="Problem:\n{question}\n\nSolution:",
        num_shots=4,
        example=_MATH_EXAMPLE,
        stop=("Problem:",),
        max_new_tokens=1024,
    ),
    "math-deepseekmath": _math(prompt=_DEEPSEEKMATH),
    "gsm8k-python-chat": _gsm8k(prompt=_PYTHON_CHAT, chat=True, tools=_PYTHON),
    "gsm8k-python-deepseekmath": _gsm8k(prompt=_DEEPSEEKMATH_TOOLS, tools=_PYTHON),
    "math500-python-chat": _math500(prompt=_PYTHON_CHAT, chat=True, tools=_PYTHON),
    "math-python-chat": _math(prompt=_PYTHON_CHAT, chat=True, tools=_PYTHON),
    "math-python-deepseekmath": _math(prompt=_DEEPSEEKMATH_TOOLS, tools=_PYTHON),
}
"""Every protocol by its name."""


class Example(NamedTuple):
    """A question with its worked solution."""

    question: str
    solution: str


def examples_for(protocol: Protocol, problems: Path) -> list[Example]:
    """Return a protocol's examples, from `EXAMPLES_FILE` or the training split; PipelineError if there are too few."""
    if not protocol.num_shots:
        return []
    examples_file = problems / EXAMPLES_FILE
    if examples_file.is_file():
        return [_example(row, f"{examples_file}:{number}") for number, row in jsonl.read_rows(examples_file)]
    train_file = problems_file(problems, Split.TRAIN)
    train = read_problems(problems, Split.TRAIN) if train_file.is_file() else []
    subset = draw([each for each in train if each.source in protocol.sources], protocol.num_shots, _EXAMPLES_SEED)
    if len(subset) < protocol.num_shots:
        raise PipelineError(
            f"{train_file}: has {len(subset)} problems from {' or '.join(protocol.sources)}, of which "
            f"{protocol.num_shots} are shown as examples"
        )
    return [Example(each.question, each.solution) for each in subset]


def prompt_with(protocol: Protocol, examples: Sequence[Example]) -> str | None:
    """Return the prompt of a protocol, which begins with its examples; None for the model's own prompt."""
    if protocol.prompt is None:
        return None
    shots = ""
    for question, solution in examples:
        shots += protocol.example.replace("{solution}", solution).replace(_QUESTION, question)
    return shots + protocol.prompt


def _example(row: dict[str, object], where: str) -> Example:
    """Return the example in a row of `EXAMPLES_FILE`; PipelineError, beginning with `where`, if there is none."""
    question, solution = row.get("question"), row.get("solution")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise PipelineError(f"{where}: expected an object with the strings `question` and `solution`")
    return Example(question, solution)
