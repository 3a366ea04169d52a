"""Contents of a registry: versions and their aliases; every file of a version is verified before it is used.

A version is a closed bundle: the files of git at its tag, and the folders in the storage that its `.dvc` files name.
`digests.json` has the SHA-256 of each of these files; its own digest, the bundle's, is in `version.json` and in the
message of the tag. `Snapshot.get` refuses a file that does not agree with them.
"""

import hashlib
import io
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from components.register.storage import CONFIG, error_prefix, md5_in, storage_url, write_dvc_config
from components.shared import lineage
from components.shared.errors import PipelineError, RetryableError
from components.shared.lineage import Lineage
from components.shared.versioning import Workspace, is_url

VERSION_FILE, DIGESTS_FILE = "version.json", "digests.json"
"""The only files of a version that `digests.json` does not list."""
FORMAT = 2
"""Format of version.json; versions of older releases have no format."""
_VERSION = re.compile(r"([a-z0-9-]+)@v(\d+)\.(\d+)\.(\d+)")
_ALIAS = re.compile(r"([a-z0-9-]+)#([a-z0-9-]+)(!?)#(\d+)")
_BUNDLE_DIGEST = re.compile(r"^Bundle-Digest: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Tag:
    """An annotated tag: a version, `<name>@v<version>`, or an alias given to one, `<name>#<alias>#<count>`."""

    tag: str
    commit: str
    message: str
    by: str
    """Who created it, `Name <address>`."""
    at: str
    """When it was created, in ISO 8601."""


@dataclass(frozen=True)
class Version(Tag):
    """A registered version."""

    name: str
    number: tuple[int, int, int]

    @property
    def version(self) -> str:
        """The number as it is in the tag, such as `v0.0.1`."""
        return self.tag.rpartition("@")[2]


@dataclass(frozen=True)
class Assignment(Tag):
    """An alias that was given to a version, or taken away."""

    name: str
    alias: str
    count: int
    """Number of this change of the alias; the highest is in force."""
    withdrawn: bool
    """Whether the alias was taken away."""


class DamagedError(PipelineError):
    """A version, or a file of it, is missing or not as it was registered."""


class Verification(NamedTuple):
    """Result of reading every byte of versions."""

    faults: list[str]
    """A line for each file that is missing or damaged, with the object that holds it."""
    num_files: int
    num_bytes: int
    """Bytes read; content that several files share is read once."""


class _Bundle(NamedTuple):
    """A version as git has it."""

    tag: str
    files: dict[str, bytes]
    """Content of each file in git by path, including `.dvc` files."""
    digests: dict[str, str]
    """Registered SHA-256 of each file in git and storage by path, without version.json and digests.json."""
    faults: dict[str, str]
    """A line for each file in git that is missing or not as it was registered, by path."""

    @property
    def pointers(self) -> dict[str, str]:
        """The MD5 of each folder in the storage, without those whose `.dvc` file is damaged."""
        return {
            path.removesuffix(".dvc"): md5_in(content)
            for path, content in self.files.items()
            if path.endswith(".dvc") and path not in self.faults
        }

    @property
    def stored(self) -> dict[str, str]:
        """The SHA-256 of each file in the folders of `pointers`, by path."""
        pointers = self.pointers
        return {path: digest for path, digest in self.digests.items() if path.partition("/")[0] in pointers}

    def require(self, path: str) -> None:
        """Raise PipelineError unless the version has a path, and git has it as it was registered."""
        if not any(_is_below(each, [path]) for each in {*self.digests, *self.files, *self.faults}):
            raise PipelineError(f"{self.tag}: has no {path}")
        for faulty, fault in self.faults.items():
            # A damaged `.dvc` file is a fault of every path in its folder.
            if _is_below(faulty, [path]) or _is_below(path, [faulty.removesuffix(".dvc")]):
                raise DamagedError(fault)


@dataclass(frozen=True)
class Snapshot:
    """A registry as it was when it was read."""

    location: str
    repository: Workspace
    """The git repository itself, or a clone of it."""
    origin: str
    """Its address: a URL, or the absolute path of a folder."""

    def tags(self) -> list[Tag]:
        """Return all tags, the oldest first."""
        # An annotated tag is an object, and `*objectname` is its commit; the object of a lightweight tag is the commit.
        fields = ("refname:short", "objectname", "*objectname", "creatordate:iso-strict", "taggername", "taggeremail")
        form = "%00".join(f"%({field})" for field in (*fields, "contents")) + "%01"
        try:
            listed = self.repository.git("for-each-ref", "--sort=creatordate", f"--format={form}", "refs/tags")
        except PipelineError as error:
            raise type(error)(f"{self.location}: its tags cannot be read: {error}") from None
        tags = []
        for entry in listed.split("\1")[:-1]:
            tag, target, commit, at, name, email, message = entry.lstrip("\n").split("\0")
            tags.append(Tag(tag, commit or target, message.strip(), f"{name} {email}".strip(), at))
        return tags

    def versions(self, name: str | None = None, *, withdrawn: bool = False) -> list[Version]:
        """Return the versions of a model, or of all, sorted by number; `withdrawn` adds those that GTO deprecated."""
        tags = self.tags()
        # GTO deprecates a version by a tag such as `<name>@v0.0.1!#1`.
        deprecated = {each.tag.partition("!")[0] for each in tags if "!" in each.tag}
        versions = []
        for tag in tags:
            match = _VERSION.fullmatch(tag.tag)
            if match and name in (None, match[1]) and (withdrawn or tag.tag not in deprecated):
                number = (int(match[2]), int(match[3]), int(match[4]))
                versions.append(Version(**vars(tag), name=match[1], number=number))
        return sorted(versions, key=lambda version: (version.name, version.number))

    def names(self, name: str | None = None) -> list[str]:
        """Return the names of all models with versions, or only `name`; PipelineError if it has no versions."""
        known = sorted({version.name for version in self.versions(withdrawn=True)})
        if name is None:
            return known
        if name not in known:
            raise PipelineError(f"{self.location}: has no versions of {name}; models: {', '.join(known) or 'none'}")
        return [name]

    def version(self, spec: str) -> Version:
        """Return the version that `v0.0.1`, `latest` or an alias means, each also with `<name>@` before it."""
        versions, aliases = self.versions(), self.aliases()
        # Sorted, so the newest version of each model stays.
        tags = aliases | {f"{version.name}@latest": version.tag for version in versions}
        name, _, wanted = spec.rpartition("@")
        matching = []
        for version in versions:
            full_name = f"{version.name}@{wanted}"
            if name in ("", version.name) and version.tag in (full_name, tags.get(full_name)):
                matching.append(version)
        if not matching:
            available = ", ".join([*(version.tag for version in versions), *aliases]) or "none"
            raise PipelineError(f"{self.location}: `{spec}` is no version; versions and aliases: {available}")
        if len(matching) > 1:
            candidates = " or ".join(version.tag for version in matching)
            raise PipelineError(f"{self.location}: {spec} is ambiguous: {candidates}; give the full name")
        return matching[0]

    def aliases(self) -> dict[str, str]:
        """Return the tag of the version that each alias in force names, by `<name>@<alias>`."""
        tags = {(version.name, version.commit): version.tag for version in self.versions()}
        in_force = {f"{each.name}@{each.alias}": each for each in self.assignments()}  # the highest count comes last
        return {
            alias: tags[each.name, each.commit]
            for alias, each in in_force.items()
            if not each.withdrawn and (each.name, each.commit) in tags
        }

    def aliases_by_version(self) -> dict[str, list[str]]:
        """Return the aliases, such as `champion`, of each version that has any, by the version's tag."""
        grouped: dict[str, list[str]] = {}
        for alias, tag in sorted(self.aliases().items()):
            grouped.setdefault(tag, []).append(alias.rpartition("@")[2])
        return grouped

    def assignments(self, name: str | None = None, alias: str | None = None) -> list[Assignment]:
        """Return the assignments of aliases, sorted by count; `name` selects one model, `alias` one alias."""
        assignments = []
        for tag in self.tags():
            match = _ALIAS.fullmatch(tag.tag)
            if match and name in (None, match[1]) and alias in (None, match[2]):
                values: dict[str, Any] = {"name": match[1], "alias": match[2], "count": int(match[4])}
                assignments.append(Assignment(**vars(tag), **values, withdrawn=match[3] == "!"))
        return sorted(assignments, key=lambda each: each.count)

    def find(self, name: str, policy_digest: str) -> dict[str, Any] | None:
        """Return version.json of the newest version of a model with these weights; None if there is none.

        Versions of older releases do not count, because they have nothing but the weights.
        """
        wanted = (FORMAT, policy_digest)
        newest_first = reversed(self.registrations(self.versions(name)))
        return next((each for each in newest_first if (each.get("format"), each.get("policy_digest")) == wanted), None)

    def registrations(self, versions: Sequence[Version]) -> list[dict[str, Any]]:
        """Return version.json of each version, unverified; empty for a version without one."""
        return [json.loads(content or "{}") for (content,) in self.read_each(versions, VERSION_FILE)]

    def read(self, tag: str, path: str) -> str:
        """Return a text file of a version from git, unverified."""
        return self.repository.git("show", f"refs/tags/{tag}:{path}")

    def read_each(self, versions: Sequence[Version], *paths: str) -> Iterator[list[bytes | None]]:
        """Yield the contents of files of each version from git, unverified; None for a missing file."""
        names = "".join(f"refs/tags/{version.tag}:{path}\n" for version in versions for path in paths)
        # One git process for all files.
        output = io.BytesIO(self.repository.git_bytes("cat-file", "--batch", data=names.encode()))
        for _ in versions:
            contents = []
            for _ in paths:
                *_, size = output.readline().split()  # or `missing`
                contents.append(None if size == b"missing" else output.read(int(size) + 1)[:-1])
            yield contents

    def lineage(self, tag: str) -> Lineage:
        """Return the lineage of a registered version; PipelineError if it has another format."""
        return lineage.parse(json.loads(self.read(tag, lineage.FILE_NAME)), name=f"{tag}: {lineage.FILE_NAME}")

    def get(self, tag: str, paths: Sequence[str], destination: Path) -> None:
        """Copy files and folders of a version, `.` for all of it, into a folder.

        PipelineError, with the file and the object that holds it, unless each is as it was registered; `destination`
        may then have some of them.
        """
        bundle = self._bundle(self.version(tag))
        for path in paths:
            bundle.require(path)
        stored = {path: digest for path, digest in bundle.stored.items() if _is_below(path, paths)}
        if stored:
            folders = {path.partition("/")[0] for path in stored}
            pointers = {folder: md5 for folder, md5 in bundle.pointers.items() if folder in folders}
            for fault in self._read([bundle], pointers, stored, str(destination.absolute()), paths).faults:
                raise DamagedError(f"{bundle.tag}: {fault}")
        for path, content in bundle.files.items():
            if _is_below(path, paths):
                (destination / path).parent.mkdir(parents=True, exist_ok=True)
                (destination / path).write_bytes(content)

    def read_storage(self, config: str, pointers: Mapping[str, str], *options: Any) -> Any:
        """Return the output of the command `read` of dvc_process.py for the storage that a DVC config names."""
        with tempfile.TemporaryDirectory(dir=self.repository.scratch) as scratch:
            workspace = Workspace(Path(scratch), self.repository.scratch, self.repository.locks)
            write_dvc_config(workspace.folder, config, storage_url(config, self.location, self.origin))
            return workspace.dvc_json("read", pointers, *options)

    def verify(self, versions: Sequence[Version]) -> Verification:
        """Read every file of versions, from git and the storage, and compare it with what was registered."""
        bundles, faults = [], []
        for version in versions:
            try:
                bundles.append(self._bundle(version))
            except RetryableError:
                raise
            except PipelineError as error:
                faults.append(str(error))
        faults += [fault for bundle in bundles for fault in bundle.faults.values()]
        contents = [content for bundle in bundles for content in bundle.files.values()]
        num_bytes = sum(len(content) for content in contents)
        pointers = {f"{bundle.tag}: {folder}": md5 for bundle in bundles for folder, md5 in bundle.pointers.items()}
        if not pointers or any(CONFIG in bundle.faults for bundle in bundles):  # a damaged config has no address
            return Verification(faults, len(contents), num_bytes)
        expected = {f"{each.tag}: {path}": digest for each in bundles for path, digest in each.stored.items()}
        stored = self._read(bundles, pointers, expected)
        return Verification(faults + stored.faults, len(contents) + stored.num_files, num_bytes + stored.num_bytes)

    def verify_all(self) -> Verification:
        """Verify all versions, and look for damage and losses in the git repository itself."""
        faults = []
        try:
            self.repository.git("fsck", "--full", "--no-dangling", "--no-progress")
        except PipelineError as error:
            faults.append(f"{self.location}: its git repository is damaged: {error}")
        try:
            versions = self.versions(withdrawn=True)
        except PipelineError as error:
            return Verification([*faults, str(error)], 0, 0)
        verification = self.verify(versions)
        faults += verification.faults
        tags = {version.tag for version in versions}
        if tags and self.repository.try_git("rev-parse", "--verify", "HEAD") is None:
            faults.append(f"{self.location}: the branch of its git repository is missing, although it has versions")
        # The newest commit names its own version, and each version its parent. A named version without a tag is lost.
        for name in ("HEAD", *sorted(tags)):
            registration = json.loads(self.repository.try_git("show", f"{name}:{VERSION_FILE}") or "{}")
            for key in ("tag", "parent"):
                tag = registration.get(key)
                if tag and tag not in tags:
                    faults.append(f"{tag}: its tag is missing, although {name} names it; register it again")
                    tags.add(tag)
        return verification._replace(faults=faults)

    def _bundle(self, version: Version) -> _Bundle:
        """Read a version from git; PipelineError if it has no digests, or its tag has other ones."""
        tag = version.tag
        files, faults = self._files(version)
        for name, reason in ((VERSION_FILE, "it is damaged"), (DIGESTS_FILE, "it was registered by an older release")):
            if name not in files:
                raise DamagedError(faults.get(name, f"{tag}: has no {name}: {reason}"))
        _check_digest(version, json.loads(files[VERSION_FILE]), files[DIGESTS_FILE])
        expected: dict[str, str] = json.loads(files[DIGESTS_FILE])
        for path, content in files.items():
            if path not in (VERSION_FILE, DIGESTS_FILE) and hashlib.sha256(content).hexdigest() != expected.get(path):
                faults[path] = f"{tag}: {path} in git has other content than was registered"
        folders = {path.removesuffix(".dvc") for path in {*files, *faults} if path.endswith(".dvc")}
        for path in expected:
            if path not in files and path.partition("/")[0] not in folders:
                faults.setdefault(path, f"{tag}: {path} is missing from git")
        return _Bundle(tag, files, expected, faults)

    def _files(self, version: Version) -> tuple[dict[str, bytes], dict[str, str]]:
        """Return the contents of a version's files in git, and a line for each that git cannot read, both by path."""
        try:
            listed = self.repository.git("ls-tree", "-r", "-z", version.commit)
        except PipelineError as error:
            raise type(error)(f"{version.tag}: its commit {version.commit} cannot be read: {error}") from None
        files, faults = {}, {}
        for line in listed.split("\0")[:-1]:
            entry, _, path = line.partition("\t")
            _mode, _type, git_object = entry.split()
            try:
                files[path] = self.repository.git_bytes("cat-file", "blob", git_object)
            except PipelineError as error:
                faults[path] = f"{version.tag}: {path}: its git object {git_object} cannot be read: {error}"
        return files, faults

    def _read(
        self, bundles: Sequence[_Bundle], pointers: Mapping[str, str], expected: Mapping[str, str], *options: Any
    ) -> Verification:
        """Read folders from the storage, by name and MD5, and compare their files with the `expected` SHA-256 by path.

        The options, `destination` and `paths`, are those of the command `read` of dvc_process.py.
        """
        # The newest config comes first: the storage may have moved since a version was registered.
        configs = (bundle.files[CONFIG].decode() for bundle in bundles if CONFIG in bundle.files)
        config = self.repository.try_git("show", f"HEAD:{CONFIG}") or next(configs, None)
        if config is None:
            raise PipelineError(f"{self.location}: no version has a {CONFIG} that says where the storage is")
        read = self.read_storage(config, pointers, *options)
        faults = list(read["faults"].values())
        for path in {**expected, **read["files"]}:
            if _is_below(path, read["faults"]):
                continue  # already reported
            if path not in read["files"]:
                faults.append(f"{path} is not in its folder in the storage")
            elif read["files"][path] != expected.get(path):
                faults.append(f"{path} in the storage has other content than was registered")
        return Verification(faults, len(read["files"]), read["num_bytes"])


@contextmanager
def read_registry(location: str) -> Iterator[Snapshot]:
    """Open a registry, a folder or a URL, for reading; PipelineError if it does not exist."""
    if not is_url(location) and not Path(location).is_dir():
        raise PipelineError(f"{location}: no such registry; nothing has been registered there")
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-registry-") as scratch:
        folder = Path(scratch)
        if is_url(location):
            with error_prefix(location):
                Workspace(folder, folder).git("clone", "--quiet", "--bare", "--", location, "registry")
            yield Snapshot(location, Workspace(folder / "registry", folder), location)
        else:
            origin = Path(location).resolve()
            yield Snapshot(location, Workspace(origin, folder), str(origin))


def _check_digest(version: Version, registered: Mapping[str, Any], digests: bytes) -> None:
    """Raise PipelineError unless version.json, digests.json and the message of the tag have the same bundle digest."""
    in_message = _BUNDLE_DIGEST.search(version.message)
    bundle_digests = {
        f"the content of {DIGESTS_FILE}": hashlib.sha256(digests).hexdigest(),
        VERSION_FILE: registered.get("bundle_digest"),
        "the message of the tag": in_message[1] if in_message else None,
    }
    if registered.get("tag") != version.tag or len(set(bundle_digests.values())) > 1:
        values = ", ".join(f"{str(digest)[:12]} in {name}" for name, digest in bundle_digests.items())
        raise DamagedError(
            f"{version.tag}: the tag was moved, or its commit {version.commit[:12]} is not what was registered: "
            f"{VERSION_FILE} is of {registered.get('tag')}, and the digest of the bundle is {values}"
        )


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders, or is in one of them; every path is in `.`."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)
