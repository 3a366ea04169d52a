"""An accuracy as it can be published: with all that another one has to share to be comparable."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DIGEST_CHARACTERS = 12


def published_lines(scores: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each source: the accuracies, on what and how they were measured, and what to check them by.

    `scores` has the keys of scores.py, and `protocol`: the facts of questions.py with `records_digest` and `lm_eval`.
    """
    return {source: _line(scores, source) for source in scores["greedy"]["by_source"]}


def _line(scores: Mapping[str, Any], source: str) -> str:
    facts, strict = scores["protocol"], scores["greedy"]["by_source"][source]
    flexible = scores["flexible"]["by_source"][source]
    parts = [
        f"{source}: {_percent(strict)} strict, {_percent(flexible)} flexible, greedy",
        *_sampled(scores, source),
        f"{strict['total']:,} problems of {_selection(facts)}",
        _prompt(facts),
        *_tools(scores, source),
        f"at most {facts['max_new_tokens']:,} tokens, {100 * scores['truncated']['by_source'][source]['fraction']:.1f} "
        f"% truncated, {scores['unscorable']['by_source'][source]['count']:,} unscorable",
        f"{facts['dtype']}, {facts['engine']}",
        "contamination not checked"
        if facts["contaminated"] is None
        else f"{facts['contaminated']:,} contaminated training problems removed",
        f"records {_short(facts['records_digest'])}",
        _harness(facts.get("lm_eval"), source),
    ]
    return "; ".join(parts)


def _sampled(scores: Mapping[str, Any], source: str) -> list[str]:
    """Mean, pass and majority of the sampled answers; nothing without samples."""
    if scores["sampled"] is None:
        return []
    figures = [
        f"{name}@{k} {_percent(estimate)}"
        for name in ("pass", "maj")
        for k, estimate in scores[f"{name}_at_k"]["by_source"][source].items()
        if name == "pass" or k != "1"  # a majority of one is one
    ]
    sampled = scores["sampled"]
    return [f"{', '.join(figures)} of {sampled['num_samples']} samples at T={sampled['temperature']:g}"]


def _selection(facts: Mapping[str, Any]) -> str:
    parts = [f"digest {_short(facts['problems_digest'])}"]
    if facts["subset_seed"] is not None:
        parts.insert(0, f"{facts['problems']:,} of {facts['of']:,} drawn by seed {facts['subset_seed']}")
    return f"{facts['split']} ({', '.join(parts)})"


def _prompt(facts: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(facts["prompt"].encode()).hexdigest()
    parts = [f"prompt {_short(digest)}", f"answer {facts['answer']}"]
    if facts["shots"]:
        parts.append(f"{facts['shots']} examples {_short(facts['examples_digest'])}")
    if facts["chat_template_digest"]:
        system = facts["system_prompt"]
        digest = "none" if system is None else _short(hashlib.sha256(system.encode()).hexdigest())
        parts.append(f"chat template {_short(facts['chat_template_digest'])}, system prompt {digest}")
    if facts["stop"]:
        parts.append(f"stopped at {' or '.join(map(json.dumps, facts['stop']))}")
    return f"{facts['name']} ({', '.join(parts)})"


def _tools(scores: Mapping[str, Any], source: str) -> list[str]:
    """The environment and how it was used: an accuracy with tools stands beside none without."""
    tools = scores["protocol"].get("tools")
    if not tools:
        return []
    used, failed = (scores["tools"][key]["by_source"][source] for key in ("with_call", "failed"))
    arguments = f", arguments {json.dumps(tools['arguments'], sort_keys=True)}" if tools["arguments"] else ""
    return [
        f"with the tool {tools['environment']} ({tools['call_format']} calls{arguments}, at most {tools['max_turns']} "
        f"turns, {tools['max_observation_tokens']:,} tokens of each observation): {100 * used['fraction']:.1f} % of "
        f"answers with a call, {scores['tools']['calls_per_answer']['by_source'][source]:.2f} calls per answer, "
        f"{failed['count']:,} failed"
    ]


def _harness(lm_eval: Mapping[str, Any] | None, source: str) -> str:
    """What lm-evaluation-harness makes of the same records."""
    if lm_eval is None or source not in lm_eval["by_source"]:
        return "lm-evaluation-harness not run"
    figures = ", ".join(f"{100 * value:.1f} % {name}" for name, value in lm_eval["by_source"][source].items())
    return f"lm-evaluation-harness {lm_eval['version']}: {figures}"


def _percent(measured: Mapping[str, Any]) -> str:
    low, high = measured["interval"]
    return f"{100 * measured['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _short(digest: str) -> str:
    return digest[:_DIGEST_CHARACTERS]
