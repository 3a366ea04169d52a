"""The line that an accuracy is published with, and the harness's scores in it."""

import hashlib
from typing import Any

import pytest

from components.evaluate import harness
from components.evaluate.published import published_lines
from components.evaluate.scores import scores

FACTS = {
    "name": "gsm8k-8shot",
    "prompt": "Question: {question}\nAnswer:",
    "system_prompt": None,
    "chat_template_digest": None,
    "answer": "marked",
    "max_new_tokens": 1024,
    "dtype": "bfloat16",
    "engine": "vllm 0.32.0",
    "split": "test",
    "problems": 4,
    "of": 1319,
    "problems_digest": "0123456789abcdef",
    "subset_seed": 7,
    "shots": 8,
    "stop": ["Question:"],
    "examples_digest": "fedcba9876543210",
    "contaminated": None,
    "records_digest": "a" * 64,
    "lm_eval": {"version": "0.4.13", "by_source": {"gsm8k": {"gsm8k strict-match": 0.5}}},
}


def _digest(text: Any) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _summary(num_samples: int, **changes: Any) -> dict[str, Any]:
    records = [
        {
            "id": str(number),
            "source": "gsm8k",
            "subject": "",
            "level": None,
            "question": "How many?",
            "answer": "1",
            "response": "#### 1",
            "num_steps": 1,
            "sample": sample,
            "extracted": "1",
            "verdict": "right" if number < 2 else "wrong",
            "reason": "same text" if number < 2 else "different number",
            "flexible": {"extracted": "1", "verdict": "right"},
            "num_tokens": 3,
            "finished": number > 0,
            "worked": True,
        }
        for number in range(4)
        for sample in range(1 + num_samples)
    ]
    return {**scores(records, num_samples=num_samples, temperature=0.7), "protocol": FACTS | changes}


def test_a_published_line_has_all_that_another_number_must_share() -> None:
    """On what, in which words, how decoded and counted, and what to check it by."""
    assert published_lines(_summary(2)) == {
        "gsm8k": (
            "gsm8k: 50.0 % (15.0 to 85.0) strict, 100.0 % (51.0 to 100.0) flexible, greedy; "
            "pass@1 50.0 % (15.0 to 85.0), pass@2 50.0 % (15.0 to 85.0), maj@2 50.0 % (15.0 to 85.0) of 2 samples at "
            "T=0.7; 4 problems of test (4 of 1,319 drawn by seed 7, digest 0123456789ab); "
            f"gsm8k-8shot (prompt {_digest(FACTS['prompt'])}, answer marked, 8 examples fedcba987654, "
            'stopped at "Question:"); '
            "at most 1,024 tokens, 25.0 % truncated, 0 unscorable; bfloat16, vllm 0.32.0; contamination not checked; "
            "records aaaaaaaaaaaa; lm-evaluation-harness 0.4.13: 50.0 % gsm8k strict-match"
        )
    }


def test_a_line_names_the_chat_template_and_says_what_was_not_done() -> None:
    """Without samples it has none of their figures."""
    changes = {
        "chat_template_digest": "c" * 64,
        "system_prompt": "Be brief.",
        "shots": 0,
        "stop": [],
        "subset_seed": None,
    }
    line = published_lines(_summary(0, **changes, lm_eval=None, contaminated=3))["gsm8k"]
    assert f"chat template cccccccccccc, system prompt {_digest('Be brief.')}" in line
    assert "4 problems of test (digest" in line
    assert "3 contaminated training problems removed" in line
    assert line.endswith("lm-evaluation-harness not run")
    assert "pass@" not in line


def test_a_line_of_answers_with_tools_says_which_and_how_they_were_used() -> None:
    """An accuracy without tools has no such part."""
    asked = {"environment": "python", "arguments": {}, "call_format": "fenced", "max_turns": 4}
    summary = _summary(0, tools={**asked, "max_observation_tokens": 256})
    share = {"count": 3, "total": 4, "fraction": 0.75}
    used = {"with_call": share, "failed": {**share, "count": 1}, "calls_per_answer": 1.25}
    summary["tools"] = {key: {"by_source": {"gsm8k": value}} for key, value in used.items()}
    line = published_lines(summary)["gsm8k"]
    assert (
        "; with the tool python (fenced calls, at most 4 turns, 256 tokens of each observation): 75.0 % of answers "
        "with a call, 1.25 calls per answer, 1 failed; "
    ) in line
    assert "tool" not in published_lines(_summary(0))["gsm8k"]


def test_the_harness_scores_greedy_answers_of_sources_that_it_has_tasks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is installed."""
    record = {"source": "gsm8k", "sample": 0, "answer": "1", "response": "#### 1"}
    records = [record, {**record, "sample": 1}, {**record, "source": "words"}, {**record, "response": "2"}]
    assert harness.harness_scores(records) is None

    def verdicts(family: str, cases: list[tuple[str, str]]) -> list[dict[str, bool]]:
        assert family == "gsm8k"
        return [{"strict": gold in response} for gold, response in cases]

    monkeypatch.setattr(harness, "_version", lambda: "1")
    monkeypatch.setattr(harness, "verdicts", verdicts)
    assert harness.harness_scores(records) == {"version": "1", "by_source": {"gsm8k": {"strict": 0.5}}}
