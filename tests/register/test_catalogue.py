"""Announcement in Kubeflow Model Registry, by its real client over HTTP."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from components.register import component
from components.register.catalogue import Catalogue, Entry, Status, incomplete_steps, scores
from components.register.snapshot import read_registry
from components.shared import jsonl, lineage
from components.shared.environment import CATALOGUE_TOKEN_VARIABLE, RUN_ID_VARIABLE, RUN_NAME_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from components.shared.statistics import score
from pipelines.cli import main
from tests.fake_cluster import AFTER, BEFORE, ApiServer, Fault, self_signed
from tests.register.registrations import git, inputs_of, inputs_of_task, make_config, make_policy, run_register
from tests.register.s3_storage import s3_storage

SOURCE = {"kind": "kfp", "class": "pipelinerun", "group": "team", "id": "run-1", "name": "nightly"}
ENTRY = Entry(
    name="grpo-policy",
    version="v0.0.1",
    uri="s3://models/serve/grpo-policy/v0.0.1",
    description="answers 95.0 % of 600 problems of words",
    properties={"policy_digest": "4264", "accuracy_grpo": 0.95, "num_test_problems": 600, "gate_passed": True},
    source={f"model_source_{key}": value for key, value in SOURCE.items()},
)
TABLES = ("registered_models", "model_versions", "model_artifacts")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """A model registry with the client's version of the API, or the one in the parameter."""
    with ApiServer() as server:
        server.registry.api_versions = (getattr(request, "param", "v1"),)
        yield server


def _announce(server: ApiServer, entry: Entry = ENTRY, **environment: str) -> bool:
    return Catalogue(server.url, environment).announce(entry)


def announced(server: ApiServer) -> list[dict[str, Any]]:
    """Return the one model, version and artifact that the server has."""
    documents = [server.registry.documents(table) for table in TABLES]
    assert [len(each) for each in documents] == [1, 1, 1]
    return [dict(each[0]) for each in documents]


@pytest.mark.parametrize("server", ["v1", "v1alpha3"], indirect=True)
def test_announcement_has_numbers_address_and_run(server: ApiServer) -> None:
    """Numbers are numbers, the artifact names the Kubeflow run, and an announcement by another run changes nothing."""
    assert _announce(server)
    assert not _announce(server, dataclasses.replace(ENTRY, source={**ENTRY.source, "model_source_id": "run-2"}))
    model, version, artifact = announced(server)
    assert (model["name"], version["name"], version["state"]) == ("grpo-policy", "v0.0.1", "LIVE")
    properties = version["customProperties"]
    assert properties["accuracy_grpo"] == {"metadataType": "MetadataDoubleValue", "double_value": 0.95}
    assert properties["num_test_problems"] == {"metadataType": "MetadataIntValue", "int_value": "600"}
    assert properties["gate_passed"] == {"metadataType": "MetadataBoolValue", "bool_value": True}
    assert properties["run_id"]["string_value"] == "run-1"
    assert (artifact["name"], artifact["uri"]) == ("grpo-policy", ENTRY.uri)
    assert {key: artifact[f"modelSource{key.capitalize()}"] for key in SOURCE} == SOURCE


@pytest.mark.parametrize("drop", [BEFORE, AFTER])
@pytest.mark.parametrize("number", range(7))
def test_retry_completes_an_interrupted_announcement(server: ApiServer, drop: str, number: int) -> None:
    """Whichever request is the last of a run, before or after its effect, the next run completes it without repeats."""
    server.faults.add(Fault(drop=drop, skip=number))
    with contextlib.suppress(RetryableError):  # the client itself repeats a GET
        _announce(server)
    assert server.faults.injected
    server.faults.clear()
    _announce(server)
    announced(server)


def test_two_runs_at_once_make_one_version(server: ApiServer) -> None:
    """A conflict with a run that was faster is no failure if both announce the same."""
    _announce(server)
    # Each question is answered as if it had been asked just before the other run's request.
    for path in ("/registered_model?", "/model_version?"):
        server.faults.add(Fault("GET", path.replace("?", r"\?"), status=404))
    assert not _announce(server)
    announced(server)


def test_aliases_and_withdrawn_versions_are_brought_up_to_date(server: ApiServer) -> None:
    """All else that the catalogue knows of a version stays, and what it does not have is passed over."""
    _announce(server)
    before, catalogue = announced(server)[1]["customProperties"], Catalogue(server.url, {})
    statuses = {"v0.0.1": Status(("candidate", "champion"), withdrawn=False), "v0.0.2": Status((), withdrawn=False)}
    assert [catalogue.update("grpo-policy", statuses) for _ in range(2)] == [1, 0]
    _, version, _ = announced(server)
    assert version["customProperties"].pop("aliases")["string_value"] == "candidate, champion"
    assert version["customProperties"] == before
    assert version["state"] == "LIVE"
    assert catalogue.update("grpo-policy", {"v0.0.1": Status((), withdrawn=True)}) == 1
    _, version, _ = announced(server)
    assert (version["customProperties"]["aliases"]["string_value"], version["state"]) == ("none", "ARCHIVED")
    assert catalogue.update("other", statuses) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"properties": {"policy_digest": "9999"}}, r"v0\.0\.1.*digest 4264.*9999.*register\.name"),
        ({"uri": "s3://moved/files"}, r"weights are at s3://moved/.*has the address s3://models/"),
    ],
)
def test_different_entry_of_a_version_is_refused(server: ApiServer, changes: dict[str, Any], message: str) -> None:
    """Other weights, or the same at another address: the message says what to do, and nothing is changed."""
    _announce(server)
    before = announced(server)
    with pytest.raises(PipelineError, match=message) as refused:
        _announce(server, dataclasses.replace(ENTRY, **changes))
    assert refused.value.exit_code == 2
    assert announced(server) == before


@pytest.mark.parametrize(("status", "kind"), [(429, RetryableError), (503, RetryableError), (403, PipelineError)])
def test_error_of_the_server_is_one_line(server: ApiServer, status: int, kind: type[PipelineError]) -> None:
    """A temporary one is retryable; a refusal by Istio is not."""
    server.faults.add(Fault("POST", "/model_versions", status=status))
    with pytest.raises(PipelineError, match=f"answers {status}") as refused:
        _announce(server)
    assert type(refused.value) is kind
    assert "\n" not in str(refused.value)


def test_other_versions_of_the_api_are_refused(server: ApiServer) -> None:
    """The message names those that are supported."""
    server.registry.api_versions = ("v1alpha2",)
    with pytest.raises(PipelineError, match="none of the versions v1, v1alpha3"):
        _announce(server)


def test_token_is_from_a_file_or_the_environment(server: ApiServer, tmp_path: Path) -> None:
    """A wrong token is rejected with its origin, never with itself."""
    server.registry.token = "right"
    file = tmp_path / "token"
    file.write_text("right\n")
    _announce(server, MODEL_REGISTRY_TOKEN_FILE=str(file))
    _announce(server, MODEL_REGISTRY_TOKEN="right")
    other = tmp_path / "of-the-pod"
    other.write_text("for Kubeflow Pipelines")
    _announce(server, MODEL_REGISTRY_TOKEN="right", KF_PIPELINES_SA_TOKEN_PATH=str(other))
    with pytest.raises(PipelineError, match="this one is from MODEL_REGISTRY_TOKEN") as refused:
        _announce(server, MODEL_REGISTRY_TOKEN="wr0ng")
    assert "wr0ng" not in str(refused.value)
    with pytest.raises(PipelineError, match="there is none; set MODEL_REGISTRY_TOKEN_FILE"):
        _announce(server)
    with pytest.raises(PipelineError, match=f"{tmp_path / 'nothing'}: no readable file with the token"):
        _announce(server, MODEL_REGISTRY_TOKEN_FILE=str(tmp_path / "nothing"))


def test_private_certificate_is_trusted_if_it_is_named(tmp_path: Path) -> None:
    """The server is refused without MODEL_REGISTRY_CA_FILE, and reached with it."""
    certificate = self_signed(tmp_path)
    with ApiServer(certificate=certificate) as server:
        with pytest.raises(RetryableError, match="certificate"):
            _announce(server)
        assert _announce(server, MODEL_REGISTRY_CA_FILE=str(certificate))


def test_invalid_address_is_refused() -> None:
    """Whoever names another network in a params file does not get the token of the pod in the clear."""
    invalid, unencrypted = "not a valid address; use one such as http://", "token unencrypted; use https"
    for address in ("registry:8080", "http://user:secret@host", "", "http://registry.example.com"):
        with pytest.raises(PipelineError, match=unencrypted if "example" in address else invalid):
            Catalogue(address, {CATALOGUE_TOKEN_VARIABLE: "secret"})


def test_accuracy_on_several_targets_pools_their_problems() -> None:
    """The large source counts for more than the small one; other sources do not count, and each has its own figure."""
    by_source = {"large": score(90, 900), "small": score(90, 100), "other": score(0, 500)}
    target = {"source": "large + small", "sources": ["large", "small"], "gain": 0.1, "p_value": 0.01}
    verdict = {"passed": True, "target": {**target, "grpo": score(180, 1000)}}
    properties = scores(verdict, {"models": {"grpo": by_source}})
    assert properties["accuracy_grpo"] == 0.18
    assert [properties[f"accuracy_grpo.{source}"] for source in by_source] == [0.1, 0.9, 0.0]
    assert properties["num_test_problems"] == 1000


@pytest.mark.slow
def test_kubeflow_component_registers_in_both(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After git and DVC the catalogue has the version too, with scores, digests and an address that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_ID_VARIABLE, "run-1")
    monkeypatch.setenv(RUN_NAME_VARIABLE, "")
    policy = make_policy(tmp_path / "policy")
    with ApiServer() as server, s3_storage() as storage:
        storage.set_environment(monkeypatch)
        config = make_config(Path(), storage="s3://bucket/models", model_registry=server.url)
        inputs = inputs_of_task(inputs_of(passed, policy), tmp_path / "tasks")
        registration, page_artifact = (dsl.Artifact(uri=str(tmp_path / name)) for name in ("made", "page.html"))
        outputs = {"registration": registration, "registration_page": page_artifact, "run_name": "nightly"}
        component.register.python_func(config=config.model_dump(), **inputs, **outputs)
        assert registration.metadata["registered"] == 1
        version = jsonl.read_json(tmp_path / "made" / "registration" / "version.json")
        served, page = "s3://bucket/models/serve/grpo-policy/v0.0.1", (tmp_path / "page.html").read_text()
        for shown in (version["tag"], "s3://bucket/models", served, server.url, "nightly"):
            assert f"<code>{shown}</code>" in page
        _, known, artifact = announced(server)
        properties = known["customProperties"]
        told = {"registry_tag": "grpo-policy@v0.0.1", "run_id": "run-1", "aliases": "candidate", "parent": "none"}
        told |= {name: version[name] for name in ("policy_digest", "bundle_digest")}
        assert {name: properties[name]["string_value"] for name in told} == told
        assert len(properties["git_sha"]["string_value"].split()[0]) == 40
        assert (known["name"], artifact["modelSourceName"]) == (version["version"], "nightly")
        assert (artifact["uri"], artifact["state"]) == (served, "LIVE")
        folder = f"{served.removeprefix('s3:/')}/"
        files = {path.removeprefix(folder): body for path, body in storage.objects.items() if path.startswith(folder)}
        assert {path: hashlib.sha256(body).hexdigest() for path, body in files.items()} == lineage.file_digests(policy)
        # A copy that was interrupted, or damaged since, is completed before anybody hears of it.
        storage.objects[f"{folder}model.safetensors"] = b"half"
        assert run_register(config, policy, passed, tmp_path / "again") == version
        assert storage.objects[f"{folder}model.safetensors"] == files["model.safetensors"]
        announced(server)


@pytest.mark.slow
def test_next_registration_announces_what_an_earlier_one_did_not(
    passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a served copy of it; until then it is named. A version for no catalogue is neither named nor announced."""
    monkeypatch.chdir(tmp_path)
    with s3_storage() as storage:
        storage.set_environment(monkeypatch)
        config = make_config(Path(), storage="s3://bucket/models")
        run_register(config, make_policy(tmp_path / "private", b"private"), passed, tmp_path / "private-registration")
        config = config.model_copy(update={"model_registry": server.url})
        server.faults.add(Fault("POST", status=403, times=100))
        with pytest.raises(PipelineError):
            run_register(config, make_policy(tmp_path / "first"), passed, tmp_path / "registration")
        git(Path(config.registry), "tag", "--delete", "grpo-policy#candidate#2")
        undone = "note: grpo-policy@v0.0.2 {}; press Retry on its run, or register again\n"
        not_candidate = undone.format("never became the candidate")
        for method, announcement in (("GET", ""), ("POST", undone.format(f"is not announced to {server.url}"))):
            server.faults.clear()
            server.faults.add(Fault(method, status=403, times=100))
            capsys.readouterr()
            assert main(["models", "list"]) == 0
            assert capsys.readouterr().out.endswith(not_candidate + announcement)
        server.faults.clear()
        run_register(config, make_policy(tmp_path / "second", b"others"), passed, tmp_path / "next")
        addresses = [each["uri"] for each in server.registry.documents("model_artifacts")]
        assert addresses == [f"s3://bucket/models/serve/grpo-policy/v0.0.{number}" for number in (2, 3)]
        with read_registry(config.registry) as snapshot:
            assert list(incomplete_steps(snapshot, "grpo-policy", server.url)) == []


def test_weights_need_a_url(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer) -> None:
    """Other machines cannot reach a path of this one: that is an error before anything is registered."""
    monkeypatch.chdir(tmp_path)
    config = make_config(Path(), model_registry=server.url)
    with pytest.raises(PipelineError, match=r"register\.storage: the weights are in the folder"):
        run_register(config, make_policy(tmp_path / "policy"), passed, tmp_path / "registration")
    assert server.registry.documents("registered_models") == []
    assert not (tmp_path / "registry" / "version.json").exists()
