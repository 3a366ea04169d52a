import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from components.preflight.config import load_params
from tests.fake_cluster import ApiServer, Fault, Json
from tests.pipelines.conftest import Program
from tests.presets import ROOT

LIGHT, GPU = (f"registry.example.com/ml/grpo-pipeline/python-{kind}:0123abc" for kind in ("light", "gpu"))


@pytest.fixture
def params(tmp_path: Path) -> Path:
    """A params file with images in a registry."""
    path = tmp_path / "Team A.yaml"
    path.write_text(f"extends: {ROOT}/params/smoke.yaml\ndeployment: {{image_light: '{LIGHT}', image_gpu: '{GPU}'}}\n")
    return path


@pytest.fixture
def command(program: Program, params: Path) -> Program:
    """`grpo-pipeline publish` of that file."""
    return partial(program, "publish", "--params", str(params))


def versions(server: ApiServer) -> list[Json]:
    """The versions of the one pipeline there is."""
    (pipeline,) = server.kfp.pipelines.values()
    assert pipeline["name"] == "grpo-post-training"
    assert all(each["pipeline_id"] == pipeline["pipeline_id"] for each in server.kfp.versions.values())
    return list(server.kfp.versions.values())


def test_publishing_uploads_the_graph_as_a_version_and_prints_its_page(server: ApiServer, command: Program) -> None:
    """With the images and the values of the params file in it, and a name that says where it is from."""
    (published, page), error = command()
    (version,) = versions(server)
    assert error == ""
    assert published == f"grpo-post-training  version {version['name']} published"
    assert re.fullmatch(r"team-a-[0-9a-f]{12}(-dirty)?-[0-9a-f]{12}", version["name"])
    ids = f"{version['pipeline_id']}/version/{version['pipeline_version_id']}"
    assert page == f"{server.url}/#/pipelines/details/{ids}"
    assert re.fullmatch(rf"Team A\.yaml at [0-9a-f]{{12}}(-dirty)?; {GPU}, {LIGHT}", version["description"])
    spec = version["pipeline_spec"]["pipeline_spec"]
    used = {each["container"]["image"] for each in spec["deploymentSpec"]["executors"].values()}
    assert used == {LIGHT, GPU}
    smoke = load_params(ROOT / "params/smoke.yaml")
    default = spec["root"]["inputDefinitions"]["parameters"]["grpo_num_steps"]["defaultValue"]
    assert default == smoke.train_grpo.num_steps


def test_the_same_content_is_uploaded_once(server: ApiServer, command: Program, params: Path) -> None:
    """Also under another revision; anything else is a new version of the same pipeline."""
    command()
    (version,) = versions(server)
    version["display_name"] = version["name"].replace("team-a-", "team-a-other-")
    lines, _ = command()
    assert lines[0] == f"grpo-post-training  unchanged: version {version['display_name']} has the same content"
    assert lines[1].endswith(f"/version/{version['pipeline_version_id']}")
    assert len(versions(server)) == 1
    params.write_text(params.read_text() + "train_grpo: {num_steps: 9}\n")
    command()
    assert len(versions(server)) == 2


def test_an_interrupted_first_publication_is_finished_by_the_next(server: ApiServer, command: Program) -> None:
    """The pipeline is there and has no version yet."""
    server.faults.add(Fault("POST", "/upload_version", status=503))
    assert "cannot answer now, try again later" in command(code=75)[1]
    assert versions(server) == []
    command()
    assert len(versions(server)) == 1


def test_several_users_publish_in_their_own_namespaces(server: ApiServer, command: Program) -> None:
    """A pipeline of the same name elsewhere is another one."""
    server.kfp.multi_user, server.kfp.namespaces = True, ("team-a", "team-b")
    for namespace in ("team-a", "team-b", "team-a"):
        command("--namespace", namespace)
    assert [each["namespace"] for each in server.kfp.pipelines.values()] == ["team-a", "team-b"]
    assert len(server.kfp.versions) == 2


def test_images_that_only_this_machine_has_are_not_published(server: ApiServer, program: Program) -> None:
    """Unless they are on the nodes already."""
    _, error = program("publish", code=2)
    for kind in ("gpu", "light"):
        image = f"use-grpo-pipeline-publish.invalid/grpo-pipeline/python-{kind}:dev"
        assert f"no registry has {image}; set IMAGE_REGISTRY and IMAGE_TAG" in error
    assert server.kfp.pipelines == {}
    program("publish", "--local-images")
    assert len(versions(server)) == 1


def test_built_images_are_published(server: ApiServer, command: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the place of those of the params file; a failed build publishes nothing."""
    calls = []
    tag = "registry.example.com/new/grpo-pipeline/python-{}:4567def"

    def run(call: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "images.build" not in call:
            return subprocess.CompletedProcess(call, 0, stdout="0123456789ab")
        calls.append(call[1:])
        out = "\n".join([tag.format("light"), tag.format("gpu"), "IMAGE_REGISTRY=x IMAGE_TAG=y", ""])
        return subprocess.CompletedProcess(call, 2 if "cpu" in call else 0, stdout=out)

    monkeypatch.setattr(subprocess, "run", run)
    build = partial(command, "--build", "--base", "python@sha256:0", "--registry", "registry.example.com/new")
    assert "the images were not built and pushed" in build("--variant", "cpu", code=2)[1]
    assert server.kfp.pipelines == {}
    build()
    push = ["-m", "images.build", "--push", "--registry", "registry.example.com/new", "--base", "python@sha256:0"]
    assert calls[-1] == [*push, "--variant", "cuda"]
    made_of = f"Team A.yaml at 0123456789ab; {tag.format('gpu')}, {tag.format('light')}"
    assert versions(server)[0]["description"] == made_of
    assert "--build: name the registry" in command("--build", "--registry", "", code=2)[1]
