"""What the server takes and refuses, asked by the real Kubernetes client."""

import re
from typing import Any

import pytest
from kubernetes import client

from tests.cluster.jobs import NS, WHERE, create, delete, get, patch, patch_as, queued_job, refused, train_job
from tests.fake_cluster import ApiServer, kinds


def _patched(*containers: dict[str, Any], job: str = "node", manager: str = "grpo-pipeline/launch") -> dict[str, Any]:
    pod = {"spec": {"containers": list(containers)}}
    jobs = [{"name": job, "template": {"spec": {"template": pod}}}]
    return train_job(
        runtimePatches=[{"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}]
    )


def test_what_is_created_is_as_the_server_completes_it(api: client.ApiClient) -> None:
    """Defaults of the definition and of the webhooks are filled in, and what the server alone knows."""
    made = create(api, field_validation="Strict")
    assert made["spec"]["suspend"] is False
    assert made["spec"]["managedBy"] == "trainer.kubeflow.org/trainjob-controller"
    assert made["spec"]["runtimeRef"]["apiGroup"] == "trainer.kubeflow.org"
    assert {"uid", "resourceVersion", "creationTimestamp", "generation"} <= set(made["metadata"])
    assert get(api)["metadata"]["uid"] == made["metadata"]["uid"]


def test_kueue_suspends_what_names_a_queue(api: client.ApiClient) -> None:
    """The label alone makes the new job wait."""
    assert create(api, queued_job())["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (train_job("Grpo"), "422 .*lowercase RFC 1123"),
        (train_job("1-grpo"), "422 .*RFC 1035"),
        (train_job("g" * 64), "422 .*no more than 63"),
        (train_job(""), "422 .*name or generateName is required"),
        (train_job(metadata={"labels": {"a": "not allowed!"}}), "422 .*a valid label must be"),
        (train_job(metadata={"labels": {"a": "x" * 64}}), "422 .*no more than 63"),
        (train_job(metadata={"labels": {"a/b/c": "x"}}), "422 .*prefix part"),
        (train_job(metadata={"labels": {"a": 1}}), "422 .*Invalid value"),
        (train_job(metadata={"annotations": {"a": "x" * 300_000}}), "422 .*Too long"),
        (train_job(metadata={"ownerReferences": [{"kind": "Pod", "name": "a"}]}), "422 .*uid must not be empty"),
        (train_job(metadata={"namespace": "other"}), "400 .*does not match the namespace"),
        (train_job(metadata={"resourceVersion": "1"}), "500 .*should not be set"),
        ({**train_job(), "kind": "TrainJobs"}, "400 .*does not match the expected kind"),
        ({**train_job(), "apiVersion": "trainer.kubeflow.org/v1"}, "400 .*expected API version"),
        ({**train_job(), "spec": {}}, "422 .*spec.runtimeRef: Required value"),
        (train_job(trainer={"numNodes": "2"}), "422 .*must be of type integer"),
        (train_job(trainer={"env": [{"name": "A", "value": 1}]}), "422 .*must be of type string"),
        (train_job(trainer={"resourcesPerNode": {"limits": {"cpu": "8 cores"}}}), "422 .*quantities must match"),
        (train_job(trainer={"env": [{"name": "A"}, {"name": "A"}]}), "422 .*Duplicate value"),
        (train_job(activeDeadlineSeconds=0), "422 .*greater than or equal to 1"),
        (train_job(managedBy="me"), "422 .*ManagedBy must be"),
        (train_job(runtimeRef={"name": "none"}), "403 .*denied the request.*must be created before"),
        (train_job(trainer={"env": [{"name": "PET_NNODES", "value": "2"}]}), r"403 .*reserved envs.*\[PET_NNODES\]"),
        (_patched({"name": "node", "env": [{"name": "A", "value": "1"}]}), "403 .*must not have envs"),
        (_patched({"name": "main"}), "403 .*must not have container that doesn't exist"),
        (_patched({"name": "node"}, job="rollout"), "403 .*must not have replicatedJob"),
        (_patched({"name": "node"}, manager="me"), "403 .*domain-prefixed path"),
    ],
)
def test_what_the_real_server_refuses_is_refused(api: client.ApiClient, document: Any, said: str) -> None:
    """Names, labels, types, the definition's rules (422) and the webhook's (403)."""
    assert re.match(said, refused(create, api, document), re.DOTALL)


def test_unknown_fields_at_any_depth_are_refused_or_dropped(server: ApiServer, api: client.ApiClient) -> None:
    """Strict refuses and names each path; otherwise they are gone, with a warning."""
    document = _patched({"name": "node", "volumeMount": []})
    document["spec"]["podTemplateOverrides"] = []
    said = refused(create, api, document, field_validation="Strict")
    assert said.startswith("400 ")
    assert 'unknown field "spec.podTemplateOverrides"' in said
    assert '.containers[0].volumeMount"' in said
    _, status, headers = client.CustomObjectsApi(api).create_namespaced_custom_object_with_http_info(*WHERE, document)
    assert status == 201
    assert 'unknown field \\"spec.podTemplateOverrides\\"' in headers["Warning"]
    assert "podTemplateOverrides" not in get(api)["spec"]


def test_a_dry_run_checks_and_keeps_nothing(server: ApiServer, api: client.ApiClient) -> None:
    """It answers as the real thing would, and nothing is there afterwards."""
    assert create(api, dry_run="All", field_validation="Strict")["metadata"]["name"] == "grpo-1"
    assert refused(create, api, train_job("Bad"), dry_run="All").startswith("422 ")
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    create(api)
    delete(api, dry_run="All")
    assert len(server.cluster.all(kinds.TRAIN_JOBS)) == 1


def test_a_name_is_taken_once(api: client.ApiClient) -> None:
    """The second creation is a conflict that says so."""
    create(api)
    assert "409" in (said := refused(create, api))
    assert '"AlreadyExists"' in said


def test_what_is_not_there_is_not_found(server: ApiServer, api: client.ApiClient) -> None:
    """Objects, namespaces, and kinds whose definition is not installed."""
    assert "404 " in refused(get, api)
    custom = client.CustomObjectsApi(api)
    elsewhere = ("trainer.kubeflow.org", "v1alpha1", "nowhere", "trainjobs")
    assert 'namespaces "nowhere" not found' in refused(custom.create_namespaced_custom_object, *elsewhere, train_job())
    server.cluster.undefine(kinds.TRAIN_JOBS)
    assert "could not find the requested resource" in refused(create, api)
    definitions = client.ApiextensionsV1Api(api)
    assert "404" in refused(definitions.read_custom_resource_definition, kinds.TRAIN_JOBS.resource)


@pytest.mark.parametrize("field", ["trainer", "activeDeadlineSeconds", "runtimeRef"])
def test_what_is_immutable_cannot_be_changed(api: client.ApiClient, field: str) -> None:
    """The definition forbids it, whatever else the patch does."""
    create(api, train_job(trainer={"numNodes": 2}, activeDeadlineSeconds=60))
    new: Any = {"trainer": {"numNodes": 3}, "activeDeadlineSeconds": 61, "runtimeRef": {"name": "b"}}[field]
    said = refused(patch, api, {"spec": {field: new}})
    assert said.startswith("422 ")
    assert f"spec.{field}: Invalid value" in said
    assert "field is immutable" in said


def test_patches_of_the_runtime_change_only_while_suspended(server: ApiServer, api: client.ApiClient) -> None:
    """A running job's pods would not be what it says."""
    create(api, _patched({"name": "node"}))
    new = {"spec": {"runtimePatches": [{"manager": "grpo-pipeline/other"}]}}
    assert "can only be modified when the TrainJob is suspended" in refused(patch, api, new)
    create(api, queued_job("grpo-2"))
    assert patch(api, new, "grpo-2")["spec"]["runtimePatches"][0]["manager"] == "grpo-pipeline/other"


def test_a_stale_version_is_a_conflict(api: client.ApiClient) -> None:
    """Who read the object before another one wrote it has to read it again."""
    old = create(api)
    patch(api, {"metadata": {"annotations": {"a": "1"}}})
    old["metadata"]["annotations"] = {"a": "2"}
    said = refused(client.CustomObjectsApi(api).replace_namespaced_custom_object, *WHERE, "grpo-1", old)
    assert said.startswith("409 ")
    assert "the object has been modified" in said
    fresh = {**get(api), "metadata": {**get(api)["metadata"], "annotations": {"a": "3"}}}
    assert client.CustomObjectsApi(api).replace_namespaced_custom_object(*WHERE, "grpo-1", fresh)


def test_patches_merge_or_edit_but_not_strategically(api: client.ApiClient) -> None:
    """Merge patch and JSON patch work; a custom kind has no strategic one."""
    create(api, train_job(metadata={"labels": {"a": "1", "b": "2"}}))
    assert patch(api, {"metadata": {"labels": {"a": None}}})["metadata"]["labels"] == {"b": "2"}
    edit = [
        {"op": "add", "path": "/metadata/labels/c~1d", "value": "3"},
        {"op": "remove", "path": "/metadata/labels/b"},
    ]
    as_edit = "application/json-patch+json"
    assert patch_as(api, as_edit, edit)["metadata"]["labels"] == {"c/d": "3"}
    test = [{"op": "test", "path": "/spec/suspend", "value": True}]
    assert "422" in refused(patch_as, api, as_edit, test)
    strategic = "application/strategic-merge-patch+json"
    said = refused(patch_as, api, strategic, {"metadata": {}})
    assert said.startswith("415 ")


def test_status_is_written_through_its_own_path_only(api: client.ApiClient) -> None:
    """A plain write leaves the status alone, and a write of the status the rest."""
    create(api, train_job(suspend=True))
    status = {"trainerStatus": {"progressPercentage": 40}}
    assert "trainerStatus" not in patch(api, {"status": status}).get("status", {})
    custom = client.CustomObjectsApi(api)
    changed = custom.patch_namespaced_custom_object_status(
        *WHERE, "grpo-1", {"status": status, "spec": {"suspend": False}}
    )
    assert changed["status"]["trainerStatus"]["progressPercentage"] == 40
    assert changed["spec"]["suspend"] is True


def test_a_write_that_changes_nothing_makes_no_version(api: client.ApiClient) -> None:
    """So it wakes no watch; a change of what is wanted counts the generation, one of metadata does not."""
    made = create(api)
    assert patch(api, {"metadata": {"labels": {}}})["metadata"]["generation"] == 1
    same = patch(api, {"spec": {"suspend": False}})
    assert same["metadata"]["generation"] == 1
    assert patch(api, {"spec": {"suspend": True}})["metadata"]["generation"] == 2
    assert int(get(api)["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_lists_come_in_pages_of_one_moment(server: ApiServer, api: client.ApiClient) -> None:
    """What is created meanwhile is on no later page; a page is refused once the history is lost."""
    for number in range(5):
        create(api, train_job(f"grpo-{number}"))
    custom = client.CustomObjectsApi(api)
    first = custom.list_namespaced_custom_object(*WHERE, limit=2)
    assert first["metadata"]["remainingItemCount"] == 3
    create(api, train_job("grpo-0a"))
    second = custom.list_namespaced_custom_object(*WHERE, limit=2, _continue=first["metadata"]["continue"])
    names = [each["metadata"]["name"] for each in first["items"] + second["items"]]
    assert names == ["grpo-0", "grpo-1", "grpo-2", "grpo-3"]
    server.cluster.forget_history()
    token = second["metadata"]["continue"]
    said = refused(custom.list_namespaced_custom_object, *WHERE, limit=2, _continue=token)
    assert said.startswith("410 ")
    assert "continue parameter is too old" in said


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("run=a", ["one"]),
        ("run==a", ["one"]),
        ("run!=a", ["three", "two"]),
        ("run in (a, b)", ["one", "two"]),
        ("run notin (a, b)", ["three"]),
        ("run", ["one", "two"]),
        ("!run", ["three"]),
        ("run in (a,b),stage=sft", ["two"]),
    ],
)
def test_labels_select(api: client.ApiClient, selector: str, names: list[str]) -> None:
    """Every form of a selector."""
    labels: dict[str, dict[str, str]] = {"one": {"run": "a"}, "two": {"run": "b", "stage": "sft"}, "three": {}}
    for name, given in labels.items():
        create(api, train_job(name, metadata={"labels": given}))
    found = client.CustomObjectsApi(api).list_namespaced_custom_object(*WHERE, label_selector=selector)
    assert [each["metadata"]["name"] for each in found["items"]] == names


def test_fields_select_where_the_kind_has_them(server: ApiServer, api: client.ApiClient) -> None:
    """Pods by phase, events by what they are about; custom kinds by name only."""
    create(api)
    server.clock.advance(5)
    core = client.CoreV1Api(api)
    assert len(core.list_namespaced_pod(NS, field_selector="status.phase=Running").items) == 1
    assert core.list_namespaced_pod(NS, field_selector="status.phase!=Running").items == []
    pod = core.list_namespaced_pod(NS).items[0].metadata.name
    found = core.list_namespaced_event(NS, field_selector=f"involvedObject.name={pod},type=Normal").items
    assert {each.reason for each in found} == {"Scheduled", "Started"}
    custom = client.CustomObjectsApi(api)
    assert custom.list_namespaced_custom_object(*WHERE, field_selector="metadata.name=grpo-1")["items"]
    said = refused(custom.list_namespaced_custom_object, *WHERE, field_selector="status.phase=Running")
    assert "field label not supported: status.phase" in said
    assert "unable to parse requirement" in refused(
        custom.list_namespaced_custom_object, *WHERE, label_selector="a=b=c"
    )


def test_deletion_takes_what_is_owned_in_the_background(server: ApiServer, api: client.ApiClient) -> None:
    """JobSet, jobs and pods follow the TrainJob within seconds."""
    create(api)
    server.clock.advance(5)
    assert server.cluster.all(kinds.PODS)
    delete(api, propagation_policy="Background")
    assert server.cluster.all(kinds.TRAIN_JOBS) == []
    assert server.cluster.all(kinds.PODS)
    server.clock.advance(5)
    assert [server.cluster.all(kind) for kind in (kinds.JOB_SETS, kinds.JOBS, kinds.PODS)] == [[], [], []]


def test_deletion_in_the_foreground_waits_for_what_is_owned(server: ApiServer, api: client.ApiClient) -> None:
    """The TrainJob stays, marked, until its pods are gone."""
    create(api)
    server.clock.advance(5)
    delete(api, propagation_policy="Foreground")
    assert "deletionTimestamp" in get(api)["metadata"]
    server.clock.advance(10)
    assert server.cluster.all(kinds.PODS) == []
    assert "404" in refused(get, api)


def test_deletion_may_leave_orphans(server: ApiServer, api: client.ApiClient) -> None:
    """With the policy Orphan nothing follows."""
    create(api)
    server.clock.advance(5)
    delete(api, propagation_policy="Orphan")
    server.clock.advance(10)
    assert server.cluster.all(kinds.PODS)


def test_deletion_under_a_condition(api: client.ApiClient) -> None:
    """Another object of the same name is not deleted in its place."""
    made = create(api)
    wrong = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    said = refused(delete, api, body=wrong)
    assert said.startswith("409 ")
    assert "Precondition failed: UID" in said
    right = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=made["metadata"]["uid"]))
    assert delete(api, body=right)["status"] == "Success"


def test_what_owns_a_job_takes_it_along(server: ApiServer, api: client.ApiClient) -> None:
    """A TrainJob that a pod owns goes with the pod, and one whose owner never was goes at once."""
    pod = server.cluster.add_pod("launcher")
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "launcher", "uid": pod["metadata"]["uid"]}
    create(api, train_job(metadata={"ownerReferences": [owner]}))
    create(api, train_job("grpo-2", metadata={"ownerReferences": [{**owner, "uid": "never"}]}))
    server.clock.advance(5)
    assert [each["metadata"]["name"] for each in server.cluster.all(kinds.TRAIN_JOBS)] == ["grpo-1"]
    server.cluster.remove(kinds.PODS, "launcher")
    server.clock.advance(5)
    assert server.cluster.all(kinds.TRAIN_JOBS) == []


def test_many_are_deleted_by_label(server: ApiServer, api: client.ApiClient) -> None:
    """Only what the selector names."""
    create(api, train_job("one", metadata={"labels": {"run": "a"}}))
    create(api, train_job("two"))
    client.CustomObjectsApi(api).delete_collection_namespaced_custom_object(*WHERE, label_selector="run=a")
    assert [each["metadata"]["name"] for each in server.cluster.all(kinds.TRAIN_JOBS)] == ["two"]


def test_core_kinds_are_held_against_their_schemas(api: client.ApiClient) -> None:
    """Config maps, secrets, claims and leases can be made, and a mistake in one is found."""
    core = client.CoreV1Api(api)
    core.create_namespaced_config_map(NS, {"metadata": {"name": "a"}, "data": {"k": "v"}}, field_validation="Strict")
    core.create_namespaced_secret(NS, {"metadata": {"name": "a"}, "stringData": {"k": "v"}})
    lease = client.V1Lease(metadata=client.V1ObjectMeta(name="a"), spec=client.V1LeaseSpec(holder_identity="me"))
    client.CoordinationV1Api(api).create_namespaced_lease(NS, lease)
    wrong = {"metadata": {"name": "b"}, "dat": {}}
    assert 'unknown field "dat"' in refused(core.create_namespaced_config_map, NS, wrong, field_validation="Strict")
    claim = {"metadata": {"name": "c"}, "spec": {"accessModes": "ReadWriteMany"}}
    assert "422" in refused(core.create_namespaced_persistent_volume_claim, NS, claim)
