"""Uses of a test set, counted in the registry's git."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from components.register.register import STAGE
from components.register.snapshot import read_registry
from components.register.test_set_uses import count_test_set_use, policies_seen
from components.report.champion import read_registry_facts
from components.shared import jsonl, lineage, stage
from components.shared.errors import GateMissedError
from tests.register.registrations import git, inputs_of, make_config, make_policy, set_hook, tags


def _verdict_on(test_set: str = "t1", *, passed: bool = True) -> dict[str, Any]:
    return {"passed": passed, "looks": {"test_set": test_set}}


def _seen(registry: Path, test_set: str = "t1") -> set[str]:
    with read_registry(str(registry)) as snapshot:
        return policies_seen(snapshot, test_set)


def test_each_policy_counts_once_for_each_test_set(tmp_path: Path) -> None:
    """Whether it passed or not; on a separate branch, without a version or a visible change."""
    registry = tmp_path / "registry"
    missed = _verdict_on(passed=False)
    for policy, verdict in (("p1", _verdict_on()), ("p1", missed), ("p2", missed)):
        count_test_set_use(str(registry), "model", policy, verdict)
    count_test_set_use(str(registry), "model", "p3", _verdict_on("t2"))
    count_test_set_use(str(registry), "model", "p4", {"passed": True, "looks": None})
    assert (_seen(registry), _seen(registry, "t2"), _seen(registry, "t3")) == ({"p1", "p2"}, {"p3"}, set())
    assert git(registry, "rev-list", "--count", "looks").strip() == "4"  # and the empty commit before them
    assert tags(registry) == []
    assert sorted(path.name for path in registry.iterdir()) == [".git"]


def test_several_writers_at_a_url_lose_no_use(shared: Path) -> None:
    """Whoever comes second adds to what the first one pushed."""
    policies = [f"p{number}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda policy: count_test_set_use(f"file://{shared}", "model", policy, _verdict_on()), policies))
    with read_registry(f"file://{shared}") as snapshot:
        assert policies_seen(snapshot, "t1") == set(policies)


def test_registry_that_refuses_is_only_warned_about(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning has the server's reason."""
    set_hook(shared, "update", "#!/bin/sh\necho main and tags only >&2; exit 1\n")
    count_test_set_use(f"file://{shared}", "model", "p1", _verdict_on())
    printed = capsys.readouterr().out
    assert "warning: this use of the test problems is not counted" in printed
    assert "main and tags only" in printed


def test_missed_gate_is_a_use_and_the_next_report_counts_it(tmp_path: Path, passed: Path) -> None:
    """Nothing is registered, and the registry knows of the policy."""
    config, policy = make_config(tmp_path), make_policy(tmp_path / "policy")
    inputs = inputs_of(passed, policy)
    report = inputs["report"]
    for name in ("verdict", "summary"):
        content = jsonl.read_json(report / f"{name}.json")
        verdict = content if name == "verdict" else content["verdict"]
        verdict.update(passed=False, reasons=["too little"])
        verdict["sources"][0].update(passed=False, reason="too little")
        jsonl.write_json(report / f"{name}.json", content)
    with pytest.raises(GateMissedError, match="missed the gate and was not registered: too little"):
        stage.run(STAGE, config, {**inputs, "registration": tmp_path / "out"})
    assert tags(tmp_path / "registry") == []
    test_set = jsonl.read_json(report / "verdict.json")["looks"]["test_set"]
    assert read_registry_facts(config.registry, config.name, test_set) == (None, {lineage.digest(policy)})
    assert read_registry_facts(str(tmp_path / "nowhere"), config.name, test_set) == (None, set())
