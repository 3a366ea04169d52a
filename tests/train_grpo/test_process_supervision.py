import math
from collections.abc import Sequence
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.grading.verifier import Verdict
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Turn
from components.shared.tokenizer import tokenizer_for
from components.train_grpo.process_supervision import line_steps, turn_steps
from tests import tiny
from tests.train_grpo.groups import grade, trajectory


def _completion(ids: Sequence[int], text: str) -> Completion:
    return Completion(TokenSequence((0,), tuple(ids)), (0.0,) * len(ids), text, finished=True)


@pytest.mark.parametrize("prose", ["", "€ 5 \U0001f34eé ", "\ufffd\ufffd"])
def test_a_step_ends_at_the_token_that_completes_its_newline(prose: str) -> None:
    """Characters before it may take several tokens of a byte-level BPE."""
    tokenizer = tokenizer_for(tiny.MODEL.model_copy(update={"base": "scratch:math"}), tiny.PROBLEMS)
    lines = [f"{prose} so 3+5=8. \U0001f34e\n", f"10+9=18. {prose}\n", f"{prose}#### 18"]
    ids = [tokenizer.encode(line).ids for line in lines]
    steps = line_steps(_completion([*chain(*ids)], "".join(lines)), grade(Verdict.RIGHT), tokenizer.decode)
    assert [(step.end, step.text) for step in steps] == list(zip(accumulate(map(len, ids)), lines, strict=True))


def test_what_an_environment_wrote_has_no_steps() -> None:
    """Each turn ends one; with `turn` it is one."""
    turns = Turn(5, "ab\ncd", "out\nput\n"), Turn(8, "e\nf")
    response = trajectory(*turns)
    ids = response.tokens.sampled_ids
    letters = dict(zip(ids, "ab\ncde\nf", strict=True))
    steps = line_steps(response, grade(Verdict.WRONG), lambda some: "".join(letters[each] for each in some))
    assert [(step.end, step.text) for step in steps] == [(3, "ab\n"), (5, "cd"), (7, "e\n"), (8, "f")]
    of_turns = turn_steps(response, grade(Verdict.WRONG))
    assert [(step.end, step.text) for step in of_turns] == [(5, "ab\ncd"), (response.num_tokens, "e\nf")]
    assert of_turns[-1].label == 0.0


@given(st.lists(st.sampled_from(["3+5=8", "x", "\n", "\n", " ", "2*3=6\n", "\r\n", "#### 8", "\ufffd", "€"])))
def test_every_token_belongs_to_one_step(pieces: list[str]) -> None:
    """Whatever is written, and however it is cut into tokens; the texts of the steps are the text."""
    pieces.append("")
    completion = _completion(range(len(pieces)), "".join(pieces))
    steps = line_steps(completion, grade(Verdict.RIGHT), lambda some: "".join(pieces[token] for token in some))
    ends = [step.end for step in steps]
    assert ends == sorted(set(ends))
    assert ends[-1] == len(pieces)
    assert "".join(step.text for step in steps) == "".join(pieces)
    assert all(math.isnan(step.label) for step in steps[:-1])
    assert steps[-1].label == 1.0
