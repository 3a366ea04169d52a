"""Damage to a registry or its storage: each is found, named and never passed on."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from components.register.registry import fetch
from components.register.snapshot import Verification, read_registry
from components.shared import lineage
from components.shared.errors import PipelineError
from pipelines import cli
from tests.damage import flip, truncate
from tests.register.conftest import Registered
from tests.register.registrations import git, make_config, make_policy, run_register, tags
from tests.report.synthetic import ARTIFACTS

TAG = "grpo-policy@v0.0.1"


@contextmanager
def damaged(path: Path, damage: Callable[[Path], None]) -> Iterator[None]:
    """Damage a file and restore it."""
    content = path.read_bytes()
    path.chmod(0o644)
    damage(path)
    yield
    path.write_bytes(content)


def _verify_all(registry: Path) -> Verification:
    with read_registry(str(registry)) as snapshot:
        return snapshot.verify_all()


def stored(storage: Path) -> list[Path]:
    """The objects in a storage; an empty one cannot be flipped or truncated."""
    return sorted(path for path in storage.rglob("*") if path.is_file() and path.stat().st_size > 0)


def refusal(registry: Path, path: str = ".") -> str:
    """The error of a command that gets a part of a version, which leaves nothing."""
    destination = registry.parent / "got"
    with pytest.raises(PipelineError) as refused:
        fetch(str(registry), TAG, destination, path=path)
    assert not list(registry.parent.glob("*got*"))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def assert_named(registry: Path, path: Path, damage: Callable[[Path], None]) -> None:
    """A damaged object of the storage is named by all that reads it, with a file or folder that needs it."""
    with damaged(path, damage):
        (fault,) = _verify_all(registry).faults
        assert str(path) in fault
        assert fault.startswith(f"{TAG}: ")
        assert ("missing" if damage is Path.unlink else "damaged") in fault
        folder = fault.removeprefix(f"{TAG}: ").partition("/")[0].partition(":")[0]
        assert folder in {"policy", "training", *ARTIFACTS}
        assert str(path) in refusal(registry)
        assert str(path) in refusal(registry, folder)


def test_damage_to_a_stored_object_is_named_and_nothing_is_served(registered: Registered, tmp_path: Path) -> None:
    """The largest file, and the list of a folder's files; what needs neither can be read meanwhile."""
    registry, objects = tmp_path / "registry", stored(tmp_path / "registry-storage")
    weights = max(objects, key=lambda path: path.stat().st_size)
    listing = next(path for path in objects if path.suffix == ".dir" and b"model.safetensors" in path.read_bytes())
    assert_named(registry, weights, flip)
    assert_named(registry, listing, Path.unlink)
    with damaged(weights, Path.unlink):
        fetch(str(registry), TAG, tmp_path / "problems", path="problems")
    assert lineage.digest(tmp_path / "problems") == lineage.digest(tmp_path / "policy-problems")
    assert _verify_all(registry).faults == []


_COLLIDING = (
    "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f8955ad340609f4b30283e488832571415a085125e8f7cdc99f"
    "d91dbdf280373c5bd8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0e99f33420f577ee8ce54b67080a80d1e"
    "c69821bcb6a8839396f9652b6ff72a70"
)
"""X. Wang and others, 2004: 128 bytes; flipping the top bits of six of them keeps the MD5."""


def test_damage_that_keeps_the_md5_of_dvc_is_found(passed: Path, tmp_path: Path) -> None:
    """By the SHA-256 of the content, the second lock."""
    content = bytes.fromhex(_COLLIDING)
    flipped = bytearray(content)
    for place in (19, 45, 59, 83, 109, 123):
        flipped[place] ^= 0x80
    assert hashlib.md5(content).digest() == hashlib.md5(flipped).digest()
    policy = make_policy(tmp_path / "policy")
    (policy / "extra/colliding.bin").write_bytes(content)
    run_register(make_config(tmp_path), policy, passed, tmp_path / "registration")
    (path,) = (each for each in stored(tmp_path / "registry-storage") if each.read_bytes() == content)
    path.chmod(0o644)
    path.write_bytes(flipped)
    fault = "policy/extra/colliding.bin in the storage has other content than was registered"
    assert _verify_all(tmp_path / "registry").faults == [f"{TAG}: {fault}"]
    assert fault in refusal(tmp_path / "registry", "policy")


def assert_git_damage_is_named(registry: Path, path: Path, damage: Callable[[Path], None]) -> None:
    """A damaged object, branch or tag of git is named by a fault, and a version that needs it is not passed on."""
    name = path.name if "refs" in path.parts else path.parent.name + path.name
    with damaged(path, damage):
        assert ("the branch" if name == "main" else name) in "\n".join(_verify_all(registry).faults)
        if name != "main":
            refusal(registry)


def test_damage_to_git_is_named(registered: Registered, tmp_path: Path) -> None:
    """A file of the version, its list of digests, its commit, tag and branch; the working tree does not matter."""
    registry = tmp_path / "registry"
    for name, damage in ((f"{TAG}:lineage.json", flip), (f"{TAG}:digests.json", truncate), (f"{TAG}^{{}}", flip)):
        found = git(registry, "rev-parse", name).strip()
        assert_git_damage_is_named(registry, registry / ".git/objects" / found[:2] / found[2:], damage)
    for ref in (f"tags/{TAG}", "heads/main"):
        assert_git_damage_is_named(registry, registry / ".git/refs" / ref, Path.unlink)
    (registry / "digests.json").write_text("{}")
    (registry / "verdict.json").unlink()
    assert _verify_all(registry).faults == []
    fetch(str(registry), TAG, tmp_path / "whole", path=".")
    assert (tmp_path / "whole" / "digests.json").read_text() != "{}"


def test_moved_tag_is_refused(registered: Registered, passed: Path, tmp_path: Path) -> None:
    """To another version, and to a commit with other content or digests."""
    config, registry = registered[0], tmp_path / "registry"
    run_register(config, make_policy(tmp_path / "other", b"others"), passed, tmp_path / "next")
    original = git(registry, "rev-parse", f"refs/tags/{TAG}").strip()
    message = git(registry, "for-each-ref", "--format=%(contents)", f"refs/tags/{TAG}")
    git(registry, "tag", "--force", "-a", "-m", message, TAG, "grpo-policy@v0.0.2^{}")
    assert "the tag was moved" in refusal(registry, "policy")
    git(registry, "update-ref", f"refs/tags/{TAG}", original)
    git(registry, "checkout", "--quiet", "--detach", TAG)
    (registry / "verdict.json").write_text('{"passed": true}')
    git(registry, "commit", "--quiet", "--all", "-m", "better")
    git(registry, "tag", "--force", "-a", "-m", message, TAG)
    (fault,) = _verify_all(registry).faults
    assert fault == f"{TAG}: verdict.json in git has other content than was registered"
    (registry / "digests.json").write_text("{}")
    git(registry, "commit", "--quiet", "--all", "-m", "all right")
    git(registry, "tag", "--force", "-a", "-m", message, TAG)
    assert "its commit" in refusal(registry, "policy")


def test_whole_version_comes_back(registered: Registered, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moved elsewhere, byte for byte, as its digests say; the bytes that were read are counted."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("registry", "registry-storage"):
        (tmp_path / name).rename(elsewhere / name)
    registry = str(elsewhere / "registry")
    assert cli.main(["models", "get", "latest", str(tmp_path / "whole"), "--registry", registry]) == 0
    whole = lineage.file_digests(tmp_path / "whole")
    for name, made in {"policy": registered[1], **{name: tmp_path / f"policy-{name}" for name in ARTIFACTS}}.items():
        folder = "training" if name == "grpo_training" else name
        expected = {f"{folder}/{path}": digest for path, digest in lineage.file_digests(made).items()}
        assert expected.items() <= whole.items()
    assert {"version.json", "digests.json", "report.html", "lineage.json", "model_card.md"} <= whole.keys()
    assert cli.main(["models", "verify", "--registry", registry]) == 0
    content = {digest: (tmp_path / "whole" / path).stat().st_size for path, digest in whole.items()}
    printed = capsys.readouterr().out
    assert f"all versions: {len(whole)} files" in printed
    num_bytes = int(printed.partition(" bytes read")[0].rpartition(" ")[2].replace(",", ""))
    assert num_bytes >= sum(content.values())


def test_version_shares_objects_with_earlier_ones(registered: Registered, passed: Path, tmp_path: Path) -> None:
    """It adds its own weights and lists of folders that differ, and replaces a shared object that was damaged."""
    before = set(stored(tmp_path / "registry-storage"))
    shared = next(path for path in stored(tmp_path / "registry-storage") if path.read_bytes().startswith(b"fine-tuned"))
    shared.chmod(0o644)
    flip(shared)
    shared.chmod(0o444)  # DVC believes that what nobody can write to is undamaged
    run_register(registered[0], make_policy(tmp_path / "other", b"others"), passed, tmp_path / "next")
    assert tags(tmp_path / "registry") == [TAG, "grpo-policy@v0.0.2"]
    assert _verify_all(tmp_path / "registry").faults == []
    added = set(stored(tmp_path / "registry-storage")) - before
    assert len([path for path in added if path.suffix != ".dir"]) == 2  # weights, and the lineage of the evaluation
