"""The base model's section: which models there are, and how a question is put to one."""

import pytest

from components.shared.answer_policy import AnswerPolicy
from components.shared.config import validate
from components.shared.errors import PipelineError
from components.shared.model import SCRATCH_MODELS, ModelConfig


@pytest.mark.parametrize("preset", sorted(SCRATCH_MODELS))
def test_a_preset_is_a_model_that_can_be_made(preset: str) -> None:
    """Its width divides into heads, whose halves rotate."""
    size = ModelConfig(base=f"scratch:{preset}", prompt="{question}", answer=AnswerPolicy.DECLARED).scratch
    assert size == SCRATCH_MODELS[preset]
    assert size.hidden_size % size.num_heads == 0
    assert size.hidden_size // size.num_heads % 2 == 0


@pytest.mark.parametrize("base", ["models/qwen", "Qwen/Qwen2.5-0.5B", "scratch", "my/scratch:tiny"])
def test_any_other_name_is_an_existing_model(base: str) -> None:
    """A folder or a hub id, of which nothing is made."""
    assert ModelConfig(base=base, prompt="{question}", answer=AnswerPolicy.DECLARED).scratch is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"base": "scratch:tny"},
            "model.base: no such preset; accepted: scratch:tiny, scratch:words, scratch:math, got 'scratch:tny'",
        ),
        ({"base": "scratch:"}, "model.base: no such preset; "),
        ({"base": ""}, "model.base: string should have at least 1 character"),
        ({"prompt": "What is it?"}, "model.prompt: must contain `{question}`, got 'What is it?'"),
        ({"prompt": "{ question }"}, "model.prompt: must contain `{question}`"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values: dict[str, str], message: str) -> None:
    """Before anything is fetched or trained."""
    with pytest.raises(PipelineError) as refused:
        validate(
            ModelConfig, {"base": "scratch:tiny", "prompt": "{question}", "answer": "declared"} | values, name="model"
        )
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("question", ["What is {x} in {question}?", "{}", "{0}", r"\frac{1}{2} % \1 $", ""])
def test_a_question_is_put_word_for_word(question: str) -> None:
    """Braces in a question are LaTeX and no places to fill, nor are other braces in the prompt."""
    model = ModelConfig(
        base="scratch:tiny", prompt="{system} Q: {question}\nA: \\boxed{}", answer=AnswerPolicy.DECLARED
    )
    assert model.ask(question) == "{system} Q: " + question + "\nA: \\boxed{}"
