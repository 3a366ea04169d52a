"""`grpo-pipeline reproduce`: makes a registered version again, and compares every artifact.

The version's lineage has all that is needed: the commit of the code and its uncommitted changes, digests or commits of
raw files and models, the settings of every stage, and the environment variables of numerical libraries.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from components.prepare_data.prepare import HUB_PREFIX
from components.register.snapshot import read_registry
from components.shared import lineage
from components.shared.environment import WORK_VARIABLE
from components.shared.errors import PipelineError
from components.shared.execution import Environment, environment_differences, is_numerical
from components.shared.lineage import Lineage, Material
from components.shared.versioning import Workspace
from pipelines.run.process import process

_CHECKOUT = Path(__file__).parents[1]
_MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "LD_PRELOAD", "NCCL_")
"""Prefixes of variables that depend on the machine, not on the computation, and are taken from here."""
_RUN_SCRIPT = "import sys; from pipelines.cli import main; sys.exit(main())"
_DIGEST_SCRIPT = "from components.shared.lineage import code_digest; print(code_digest())"
_RUN_FOLDER = "run"
_GRACE_S = 120.0  # time for a stopped run to save a checkpoint
DIFFERENT = 5  # exit code if an artifact differs


def reproduce(version: str, registry: str, into: Path | None) -> int:
    """Make a version again in the folder `into`, print whether each artifact is equal, and return 0 or `DIFFERENT`.

    PipelineError if its code, data or model cannot be found, or the run fails.
    """
    with read_registry(registry) as snapshot:
        tag = snapshot.version(version).tag
        made_by = snapshot.lineage(tag)
    folder = (into or Path("outputs/reproductions") / tag).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PipelineError(f"{folder}: is not empty; choose a new folder with --into")
    run = folder / _RUN_FOLDER
    run.mkdir(parents=True)
    code = check_out_code(made_by, folder / "code")
    variables = {**_variables(made_by.environment("train_grpo")), "PYTHONPATH": f"{run}{os.pathsep}{code}"}
    materials = {name: material for work in made_by.works for name, material in work.materials.items()}
    for name, material in sorted(materials.items()):
        variables |= provide(name, material, made_by, folder)
    write_params(made_by, run / "params.yaml", folder)
    print(f"running the graph of {tag} in {run}", flush=True)
    with process([sys.executable, "-P", "-c", _RUN_SCRIPT, "run"], variables, grace_s=_GRACE_S, folder=run) as graph:
        graph.wait()
    print(f"the paths that the run has named above are relative to {run}")
    reports = sorted(run.glob("outputs/latest/artifacts/**/report/report"))
    reproduction = lineage.read(reports[-1]) if reports else None
    if reproduction is None:
        raise PipelineError(f"{run}: the run did not get as far as its report; correct what it says, and try again")
    return show(tag, made_by, reproduction)


def check_out_code(made_by: Lineage, folder: Path) -> Path:
    """Return a folder with the code that made a version: this checkout, or a git worktree in `folder`.

    PipelineError if its commit is not in this repository, or its uncommitted changes were not recorded.
    """
    # The code of the last stage is right for all: a stage is reused only if its own code has not changed since it ran.
    code = made_by.work.code
    if lineage.code_digest() == code:
        print(f"code      this checkout, digest {code[:12]}")
        return _CHECKOUT
    revision, git = made_by.revision(), Workspace(_CHECKOUT, _CHECKOUT)
    if revision is None or revision.commit is None:
        raise PipelineError(f"the code with digest {code[:12]} came from no commit, and this checkout has other code")
    if git.try_git("cat-file", "-e", f"{revision.commit}^{{commit}}") is None:
        raise PipelineError(f"this repository lacks commit {revision.commit}, which the code was at; fetch it with git")
    git.git("worktree", "prune")
    git.git("worktree", "add", "--quiet", "--detach", str(folder), revision.commit)
    if revision.patch:
        patch = folder.with_name("uncommitted.patch")
        patch.write_text(revision.patch, encoding="utf-8")
        Workspace(folder, folder).git("apply", "--whitespace=nowarn", str(patch))
    elif revision.patch_digest:
        raise PipelineError(f"the changes on top of commit {revision.commit} were too long to be recorded with it")
    command, variables = [sys.executable, "-P", "-c", _DIGEST_SCRIPT], {**os.environ, "PYTHONPATH": str(folder)}
    digest = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    if digest.stdout.strip() != code:
        raise PipelineError(f"{folder}: {revision} has code with another digest than {code[:12]}, which was recorded")
    print(f"code      {revision}, digest {code[:12]}, in {folder}")
    return folder


def _variables(environment: Environment | None) -> dict[str, str]:
    """Return environment variables for the graph: those of numerical libraries as recorded, all others as here."""
    from_here = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_MACHINE_VARIABLES) or not (is_numerical(name) or name == WORK_VARIABLE)
    }
    recorded = environment.variables if environment else {}
    return {**recorded, **from_here}


def provide(name: str, material: Material, made_by: Lineage, folder: Path) -> dict[str, str]:
    """Put a raw file or a model where a run in `folder` reads it; return environment variables for the run.

    PipelineError if neither this checkout nor its DVC remote nor the hub has the recorded content.
    """
    if material.repository and material.repository.startswith(HUB_PREFIX):
        print(f"data      {name} at commit {material.commit}")
        dataset, _, revision = name.rpartition("@")
        return _pin_hub(dataset, material.commit, folder / "hub", repo_type="dataset", branch=revision)
    if material.repository and material.sha256 is None:
        print(f"model     {name} at commit {material.commit}")
        return _pin_hub(name, material.commit, folder / "hub")
    if material.repository:  # prepare_data fetches the file at its commit
        print(f"data      {name} from {material.repository} at {material.commit}")
    else:
        _link_local(name, material, made_by, folder)
    return {}


def _link_local(name: str, material: Material, made_by: Lineage, folder: Path) -> None:
    """Link a file of this checkout or of its DVC remote to where a run in `folder` reads it; check its content."""
    path = Path(name)
    if ":" in name:  # a function of the user, `module:function`
        path = Path(f"{name.partition(':')[0].replace('.', '/')}.py")
    source = _CHECKOUT / path  # or `path` itself, if that is absolute
    fault = f"{name}: the content that the version was made from, SHA-256 {material.sha256}, is not at {source}"
    if not _has(source, material) and not path.is_absolute():
        try:
            source = _from_dvc(path, material, made_by, folder)
        except PipelineError as error:
            raise type(error)(f"{fault}, and DVC does not provide it ({error}); put it there") from None
    if not _has(source, material):
        raise PipelineError(f"{fault}; put it there")
    if not path.is_absolute():
        target = folder / _RUN_FOLDER / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
        if material.dvc_md5:  # the manifest of the problems names it
            pointer = {"outs": [{"md5": material.dvc_md5, "path": path.name}]}
            target.with_name(f"{path.name}.dvc").write_text(yaml.safe_dump(pointer), encoding="utf-8")
    print(f"data      {name}, SHA-256 {(material.sha256 or '')[:12]}, from {source}")


def _has(path: Path, material: Material) -> bool:
    """Return whether a file or folder exists and has the recorded content."""
    return path.exists() and lineage.digest(path) == material.sha256


def _from_dvc(path: Path, material: Material, made_by: Lineage, folder: Path) -> Path:
    """Return a raw file or folder from DVC's cache or remote: as it was at the version's commit, or by its MD5."""
    files, dvc, md5 = folder / "data", Workspace(_CHECKOUT, folder), material.dvc_md5
    cached = _CHECKOUT / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}" if md5 else None
    if cached and _has(cached, material):
        return cached
    revision, target = made_by.revision("prepare_data"), files / path
    commit = (revision and revision.commit) or "HEAD"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        dvc.dvc_get(str(_CHECKOUT), path.as_posix(), commit, target)
    except PipelineError:
        if not md5:
            raise
    if md5 and not _has(target, material):  # its pointer was committed after the run, or never
        for fault in dvc.dvc_json("read", {path.as_posix(): md5}, str(files))["faults"].values():
            raise PipelineError(fault)
    return target


def _pin_hub(
    name: str, commit: str | None, hub: Path, *, repo_type: str = "model", branch: str = "main"
) -> dict[str, str]:
    """Make a hub cache in which a branch or tag is at a commit; return the environment variables that select it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    try:
        snapshot = Path(snapshot_download(name, repo_type=repo_type, revision=commit))
    except Exception as error:  # of the network, the hub or its client, which raises errors of many kinds
        reason = str(error).strip().split("\n", 1)[0]
        raise PipelineError(f"{name} at commit {commit}: cannot be fetched from the hub ({reason})") from None
    model = hub / repo_folder_name(repo_id=name, repo_type=repo_type)
    reference = model / "refs" / branch
    reference.parent.mkdir(exist_ok=True, parents=True)
    reference.write_text(str(commit), encoding="utf-8")
    (model / "snapshots").mkdir(exist_ok=True)
    (model / "snapshots" / str(commit)).symlink_to(snapshot)
    return {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}


def write_params(made_by: Lineage, path: Path, folder: Path) -> None:
    """Write the settings of every stage of a version as a params file, with a new registry in `folder`."""
    sections: dict[str, Any] = {work.stage: work.config for work in made_by.works}
    sections["register"] = {"registry": str(folder / "registry"), "name": "reproduced"}
    path.write_text(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True), encoding="utf-8")


def artifacts(made_by: Lineage) -> dict[str, str]:
    """Return the digest of each output that another stage reads, by `stage/output`, in the order of the stages."""
    digests: dict[str, str] = {}
    for maker in made_by.works:
        for reader in made_by.works:
            for name, artifact in sorted(reader.inputs.items()):
                if made_by.maker(artifact) is maker:
                    output = "training" if name.endswith("_training") else name  # `sft_training`, `grpo_training`
                    digests[f"{maker.stage}/{output}"] = artifact.digest
    return digests


def show(tag: str, recorded: Lineage, reproduction: Lineage) -> int:
    """Print how the artifacts of a version compare with those of its reproduction; return 0 or `DIFFERENT`."""
    before, after = artifacts(recorded), artifacts(reproduction)
    different = []
    for name, digest in before.items():
        if after.get(name) == digest:
            print(f"{name}: {digest[:12]} equal")
        else:
            print(f"{name}: {digest[:12]} DIFFERENT: {after.get(name)}")
            different.append(name)
    if not different:
        print(f"reproduced: all {len(before)} artifacts of {tag} have equal bytes")
        return 0
    stage, _, name = different[0].partition("/")
    print(f"not reproduced: {stage} is the first stage of {tag} with other bytes, in {name}")
    print(_possible_causes(stage, recorded, reproduction))
    return DIFFERENT


def _possible_causes(stage: str, recorded: Lineage, reproduction: Lineage) -> str:
    """Return how the software or hardware of a stage differs from the recorded one."""
    before, after = recorded.environment(stage), reproduction.environment(stage)
    if before is None or after is None:
        return "software and hardware are not recorded"
    lines = environment_differences(before, after)
    first_run, second_run = recorded.run(stage), reproduction.run(stage)
    if first_run and second_run and first_run.threads != second_run.threads:
        lines.append(f"threads: {first_run.threads} -> {second_run.threads}")
    return f"what differs: {'; '.join(lines)}" if lines else "software and hardware are as recorded"
