"""Registration in Kubeflow Model Registry, by its real client over HTTP."""

import contextlib
import dataclasses
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.register.catalogue import Catalogue, Entry, Run
from components.shared.environment import RUN_ID_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from tests.fake_cluster import AFTER, BEFORE, ApiServer, Fault, self_signed
from tests.register.http_storage import http_storage
from tests.register.test_register import make_config, make_policy, reports, run_register

__all__ = ["reports"]  # a fixture

ENTRY = Entry(
    name="grpo-policy",
    version="v0.0.1",
    uri="s3://models/files/md5/26/3f.dir",
    policy_digest="4264",
    properties={
        "policy_digest": "4264",
        "accuracy_grpo": 0.95,
        "num_test_problems": 600,
        "gate_passed": True,
        "registry": "https://git.example/models",
        "registry_tag": "grpo-policy@v0.0.1",
    },
    run=Run("run-1", "nightly", "team"),
)
TABLES = ("registered_models", "model_versions", "model_artifacts")


@pytest.fixture(params=["v1", "v1alpha3"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """A model registry, speaking the version of the API that the client does, or the older one."""
    with ApiServer() as server:
        server.registry.api_versions = (request.param,)
        yield server


def announce(server: ApiServer, entry: Entry = ENTRY, **environment: str) -> bool:
    """Make a version known, as the stage does."""
    return Catalogue(server.url, environment).announce(entry)


def registered(server: ApiServer) -> list[dict[str, Any]]:
    """What there is: one model, one version, one artifact."""
    found = [server.registry.documents(table) for table in TABLES]
    assert [len(each) for each in found] == [1, 1, 1]
    return [each[0] for each in found]


def test_a_version_is_known_with_numbers_address_and_origin(server: ApiServer) -> None:
    """Numbers are numbers, the address is the storage's, and the artifact names the Kubeflow run."""
    assert announce(server)
    model, version, artifact = registered(server)
    assert (model["name"], version["name"], version["state"]) == ("grpo-policy", "v0.0.1", "LIVE")
    properties = version["customProperties"]
    assert properties["accuracy_grpo"] == {"metadataType": "MetadataDoubleValue", "double_value": 0.95}
    assert properties["num_test_problems"] == {"metadataType": "MetadataIntValue", "int_value": "600"}
    assert properties["gate_passed"] == {"metadataType": "MetadataBoolValue", "bool_value": True}
    assert properties["run_id"]["string_value"] == "run-1"
    assert artifact["uri"] == ENTRY.uri
    origin = ("modelSourceKind", "modelSourceClass", "modelSourceGroup", "modelSourceId", "modelSourceName")
    assert [artifact[key] for key in origin] == ["kfp", "pipelinerun", "team", "run-1", "nightly"]


def test_the_real_high_level_client_finds_it() -> None:
    """A user's ModelRegistry client gets version and address back."""
    from model_registry import ModelRegistry

    with ApiServer() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        announce(server)
        client = ModelRegistry(server.url, author="a user")
        version = client.get_model_version("grpo-policy", "v0.0.1")
        assert version is not None
        assert version.custom_properties is not None
        assert version.custom_properties["accuracy_grpo"] == 0.95
        artifact = client.get_model_artifact("grpo-policy", "v0.0.1")
        assert artifact is not None
        assert artifact.uri == ENTRY.uri


def test_again_changes_nothing(server: ApiServer) -> None:
    """The same weights under the same version are found, also by another run."""
    announce(server)
    before = [dict(each) for each in registered(server)]
    assert not announce(server, dataclasses.replace(ENTRY, run=Run("run-2", "later", "team")))
    assert registered(server) == before


@pytest.mark.parametrize("drop", [BEFORE, AFTER])
@pytest.mark.parametrize("number", range(7))
def test_a_retry_completes_what_was_cut_off_anywhere(server: ApiServer, drop: str, number: int) -> None:
    """Whichever request is the last of a run, before or after its effect, the next run has all of it, once."""
    server.faults.add(Fault(drop=drop, skip=number))
    with contextlib.suppress(RetryableError):  # a question is asked again by the client itself
        announce(server)
    assert server.faults.injected
    server.faults.clear()
    announce(server)
    registered(server)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_retries_end_with_one_version(seed: int) -> None:
    """Under random drops, errors with and without effect and throttling: retryable until it is all there, once."""
    with ApiServer(seed=seed) as server:
        kinds_of_fault = ({"drop": BEFORE}, {"drop": AFTER}, {"status": 500, "effect": True}, {"status": 503})
        server.faults.add(*(Fault(chance=0.15, times=3, **kind) for kind in kinds_of_fault))
        server.faults.add(Fault(status=429, retry_after_s=1, chance=0.1, times=3))
        for _ in range(20):
            with contextlib.suppress(RetryableError):
                announce(server)
                break
        else:
            pytest.fail("it never succeeds")
        registered(server)


def test_two_runs_at_once_make_one_version(server: ApiServer) -> None:
    """A conflict with somebody who was faster is no failure if they registered the same."""
    announce(server)
    # Each question finds nothing, as if asked a moment before the other run made it.
    for path in ("/registered_model?", "/model_version?"):
        server.faults.add(Fault("GET", path.replace("?", r"\?"), status=404))
    assert not announce(server)
    registered(server)


def test_other_weights_under_the_same_version_are_refused(server: ApiServer) -> None:
    """The message names both digests and what to do; nothing is changed."""
    announce(server)
    before = registered(server)
    other = dataclasses.replace(ENTRY, policy_digest="9999", properties={**ENTRY.properties, "policy_digest": "9999"})
    with pytest.raises(PipelineError, match=r"v0\.0\.1.*digest 4264.*9999.*register\.name") as refused:
        announce(server, other)
    assert refused.value.exit_code == 2
    assert registered(server) == before


def test_another_address_of_the_same_weights_is_refused(server: ApiServer) -> None:
    """Weights that have moved are not silently registered at the old place."""
    announce(server)
    with pytest.raises(PipelineError, match=r"weights are at s3://moved/.*has the address s3://models/"):
        announce(server, dataclasses.replace(ENTRY, uri="s3://moved/files"))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_cannot_now_is_asked_again_by_a_retry(server: ApiServer, status: int) -> None:
    """What may pass is retryable: Kubeflow runs the step again."""
    server.faults.add(Fault("POST", "/model_versions", status=status))
    with pytest.raises(RetryableError, match=str(status)):
        announce(server)
    announce(server)
    registered(server)


def test_a_server_of_another_age_is_named() -> None:
    """The message says which version of the API the server speaks."""
    with ApiServer() as server:
        server.registry.api_versions = ("v1alpha2",)
        with pytest.raises(PipelineError, match="has version v1alpha2 of the API; supported: v1 and v1alpha3"):
            announce(server)
        server.registry.api_versions = ()
        with pytest.raises(PipelineError, match="not a model registry"):
            announce(server)


def test_the_token_is_from_a_file_or_the_environment(server: ApiServer, tmp_path: Path) -> None:
    """A wrong token is refused with its origin, never with itself."""
    server.registry.token = "right"
    file = tmp_path / "token"
    file.write_text("right\n")
    announce(server, MODEL_REGISTRY_TOKEN_FILE=str(file))
    announce(server, MODEL_REGISTRY_TOKEN="right")
    other = tmp_path / "of-the-pod"
    other.write_text("for Kubeflow Pipelines")
    announce(server, MODEL_REGISTRY_TOKEN="right", KF_PIPELINES_SA_TOKEN_PATH=str(other))
    with pytest.raises(PipelineError, match="this one is from MODEL_REGISTRY_TOKEN") as refused:
        announce(server, MODEL_REGISTRY_TOKEN="wr0ng")
    assert "wr0ng" not in str(refused.value)
    with pytest.raises(PipelineError, match="there is none; set MODEL_REGISTRY_TOKEN_FILE"):
        announce(server)


def test_a_refusal_by_the_mesh_is_one_line(server: ApiServer) -> None:
    """Istio's RBAC answer reaches the reader."""
    server.faults.add(Fault(status=403))
    with pytest.raises(PipelineError, match="the model registry denies access"):
        announce(server)


def test_own_certificates_are_trusted_if_they_are_named(tmp_path: Path) -> None:
    """A server with a certificate of the company's own is refused without MODEL_REGISTRY_CA_FILE, and reached with."""
    certificate = self_signed(tmp_path)
    with ApiServer(certificate=certificate) as server:
        with pytest.raises(RetryableError, match="certificate"):
            announce(server)
        assert announce(server, MODEL_REGISTRY_CA_FILE=str(certificate.file))


@pytest.mark.parametrize("address", ["model-registry:8080", "http://user:secret@host", "ftp://host", ""])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    """The message shows how one looks."""
    with pytest.raises(PipelineError, match=r"not a valid address; use one such as http://"):
        Catalogue(address, {})


@pytest.mark.slow
def test_the_stage_registers_in_both(tmp_path: Path, reports: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After git and DVC have the version the catalogue has it too, with scores, digests and an address that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_ID_VARIABLE, "run-1")
    monkeypatch.setenv(RUN_NAME_VARIABLE, "nightly")
    policy = make_policy(tmp_path / "policy")
    with ApiServer() as server, http_storage() as storage:
        config = make_config(Path(), storage=storage, model_registry=server.url)
        version = run_register(config, policy, reports["passed"], tmp_path / "registration")
        _, known, artifact = registered(server)
        properties = {
            name: value
            for name, each in known["customProperties"].items()
            for key, value in each.items()
            if key != "metadataType"
        }
        assert known["name"] == version["version"]
        assert properties["policy_digest"] == version["policy_digest"]
        assert properties["accuracy_grpo"] > properties["accuracy_sft"] > properties["accuracy_base"]
        assert properties["gain"] == pytest.approx(properties["accuracy_grpo"] - properties["accuracy_sft"])
        assert 0 <= properties["p_value"] < 0.01
        assert properties["registry_tag"] == "grpo-policy@v0.0.1"
        assert len(properties["git_sha"].split()[0]) == 40
        assert properties["run_id"] == "run-1"
        assert artifact["uri"] == f"{storage}/files/md5/{properties['dvc_md5'][:2]}/{properties['dvc_md5'][2:]}"
        with urllib.request.urlopen(artifact["uri"]) as manifest:
            assert b"model.safetensors" in manifest.read()
        again = run_register(config, policy, reports["passed"], tmp_path / "again")
        assert again == version
        registered(server)


@pytest.mark.slow
def test_weights_in_a_folder_are_not_announced(
    tmp_path: Path, reports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of this machine is no address: the stage says so before it registers anything."""
    monkeypatch.chdir(tmp_path)
    with ApiServer() as server:
        config = make_config(Path(), model_registry=server.url)
        with pytest.raises(PipelineError, match=r"register\.storage: the weights are in the folder"):
            run_register(config, make_policy(tmp_path / "policy"), reports["passed"], tmp_path / "registration")
        assert server.registry.documents("registered_models") == []
        assert not (tmp_path / "registry" / "version.json").exists()
