"""What the registry knows before a policy is judged: the champion's answers, and earlier uses of the test problems."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.register.snapshot import Snapshot, read_registry
from components.register.test_set_uses import policies_seen
from components.shared import jsonl
from components.shared.versioning import is_url

_ALIAS = "champion"
_EVALUATION = "evaluation/grpo"
_PROTOCOL_KEYS = (
    *("name", "prompt", "prompts", "system_prompt", "thinking", "chat_template_digest", "examples_digest"),
    *("answer", "stop", "max_new_tokens", "tools"),
)
"""Two evaluations are comparable if their protocols agree in these keys."""


@dataclass(frozen=True)
class Champion:
    """The version that has the alias `champion`."""

    tag: str
    policy_digest: str
    records: list[dict[str, Any]]
    """Rows of its evaluation's records.jsonl; empty if its version does not have them."""
    protocol: Mapping[str, Any]
    """Prompt, token limit and other settings of its evaluation."""


def read_registry_facts(registry: str, name: str, test_set: str) -> tuple[Champion | None, set[str]]:
    """Return a model's champion, and the digests of the policies that were judged on the test set with this digest.

    None and an empty set if there is no registry yet; PipelineError or RetryableError if it cannot be read.
    """
    if not is_url(registry) and not Path(registry).is_dir():
        return None, set()
    with read_registry(registry) as snapshot:
        tag = snapshot.aliases().get(f"{name}@{_ALIAS}")
        champion = _champion(snapshot, tag) if tag else None
        return champion, policies_seen(snapshot, test_set)


def same_protocol(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two evaluations prompted their models in the same way."""
    return all(one.get(key) == other.get(key) for key in _PROTOCOL_KEYS)


def _champion(snapshot: Snapshot, tag: str) -> Champion:
    """Return the champion with this tag; a version of release 0.1.0 has no digests.json and no answers."""
    policy_digest = json.loads(snapshot.read(tag, "version.json"))["policy_digest"]
    file_digests = json.loads(snapshot.repository.try_git("show", f"refs/tags/{tag}:digests.json") or "{}")
    if f"{_EVALUATION}/records.jsonl" not in file_digests:
        return Champion(tag, policy_digest, [], {})
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-champion-") as folder:
        snapshot.get(tag, [_EVALUATION], Path(folder))
        scores = jsonl.read_json(Path(folder) / _EVALUATION / "scores.json")
        records = [row for _, row in jsonl.read_rows(Path(folder) / _EVALUATION / "records.jsonl")]
    return Champion(tag, policy_digest, records, scores.get("protocol", {}))
