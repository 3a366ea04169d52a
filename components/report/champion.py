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
_ASKED = (
    *("name", "prompt", "prompts", "system_prompt", "thinking", "chat_template_digest", "examples_digest"),
    *("answer", "stop", "max_new_tokens", "tools"),
)
"""Facts of an evaluation; two evaluations are comparable if they agree in them."""


@dataclass(frozen=True)
class Champion:
    """The version of the alias `champion`."""

    tag: str
    policy_digest: str
    records: list[dict[str, Any]]
    """Its answers in its evaluation; empty if its version does not have them."""
    protocol: Mapping[str, Any]
    """How it was asked."""


def read_registry_facts(registry: str, name: str, test_set: str) -> tuple[Champion | None, set[str]]:
    """Return the champion of a model, and the digests of the policies that were judged on a test set.

    The test set is named by its digest. PipelineError or RetryableError where there is a registry that cannot be read.
    """
    if not is_url(registry) and not Path(registry).is_dir():
        return None, set()
    with read_registry(registry) as snapshot:
        tag = snapshot.aliases().get(f"{name}@{_ALIAS}")
        champion = _champion(snapshot, tag) if tag else None
        return champion, policies_seen(snapshot, test_set)


def same_protocol(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations asked in the same way."""
    return all(one.get(key) == other.get(key) for key in _ASKED)


def _champion(snapshot: Snapshot, tag: str) -> Champion:
    digest = json.loads(snapshot.read(tag, "version.json"))["policy_digest"]
    stored = json.loads(snapshot.repository.try_git("show", f"refs/tags/{tag}:digests.json") or "{}")
    if f"{_EVALUATION}/records.jsonl" not in stored:
        return Champion(tag, digest, [], {})
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-champion-") as folder:
        snapshot.get(tag, [_EVALUATION], Path(folder))
        scores = jsonl.read_json(Path(folder) / _EVALUATION / "scores.json")
        records = [row for _, row in jsonl.read_rows(Path(folder) / _EVALUATION / "records.jsonl")]
    return Champion(tag, digest, records, scores.get("protocol", {}))
