import html
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.cluster.kube import Clock
from components.preflight import component
from components.preflight.config import load_params, stage_sections
from components.preflight.form import Form
from components.preflight.inputs import run_concurrently
from components.preflight.preflight import preflight
from components.shared.deployment import DeploymentConfig
from components.shared.environment import KUBECONFIG_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from tests.fake_cluster import BEFORE, ApiServer, Fault, kinds
from tests.preflight.conftest import (
    CLAIM,
    DEPLOYMENT,
    GSM8K,
    NOT_CHECKED,
    claim,
    git,
    node,
    ready,
    refused,
    with_overrides,
)
from tests.presets import ROOT


def fast_clock() -> Clock:
    """Return a clock that goes forward by what it is asked to sleep, in every thread at once."""
    sleeps_s: list[float] = []
    return Clock(lambda: sum(sleeps_s), sleeps_s.append)


_SMALL_NODE = node("small", {"cpu": "8", "memory": "24Gi", "nvidia.com/gpu": "1"})


def _lines(form: Form, *, deployment: dict[str, Any] | None = None, clock: Clock | None = None) -> list[str]:
    return refused(form, DeploymentConfig.model_validate(deployment or {}), clock)


def _line(form: Form, **deployment: Any) -> str:
    (line,) = _lines(form, deployment=deployment)
    return line


def _subjects(lines: list[str]) -> list[str]:
    return sorted(line.split(":")[0] for line in lines)


def test_a_run_that_can_start_gets_its_sections(server: ApiServer, form: Form) -> None:
    """With everything in place the sections come back complete, can be read, and nothing is made in the cluster."""
    toleration = {"key": "gpu", "operator": "Exists"}
    cluster = {"node_selector": {"pool": "a"}, "tolerations": [toleration]}
    engines = {"vllm": {"num_engines": 2, "gpus_per_engine": 4}}
    sections: dict[str, Any] = {"cluster": cluster, "train_grpo": {"group_size": 12}, "evaluate": engines}
    made = ready(form | {"cluster_gpu_type": "NVIDIA-H200"}, **sections)
    assert made.sections["train_grpo"]["group_size"] == 12
    assert made.outputs["evaluate_node_selector"] == {"pool": "a", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert [each["key"] for each in made.outputs["evaluate_tolerations"]] == ["gpu"]
    assert made.outputs["evaluate_gpus"] == "8"
    assert made.outputs["cluster_config"]["volume"] == CLAIM
    assert not server.cluster.all(kinds.TRAIN_JOBS)
    assert f"<th>grpo_num_steps</th><td><code>{form['grpo_num_steps']}</code>" in made.page
    for name, section in made.sections.items():
        shown = json.dumps(section, indent=2, ensure_ascii=False)
        assert f"<summary>{name}</summary><pre>{shown}</pre>" in html.unescape(made.page)


def test_the_task_hands_the_sections_on(server: ApiServer, form: Form, tmp_path: Path) -> None:
    """The outputs are what a laptop's run has as parameters, and beside them what a cluster needs."""
    page, task = SimpleNamespace(path=str(tmp_path / "page.html")), component.preflight
    paths = {name: str(tmp_path / name) for name in task.component_spec.outputs if name != "configuration"}
    task.python_func(**form, deployment=DEPLOYMENT.model_dump(mode="json"), **paths, configuration=page)
    outputs = {name: Path(path).read_text() for name, path in paths.items()}
    expected = stage_sections(load_params(ROOT / "params.yaml"))
    for stage in ("train_grpo", "report", "register"):
        expected[stage]["registry"] = "/work/registry"
    assert {stage: json.loads(outputs.pop(f"{stage}_config")) for stage in expected} == expected
    assert json.loads(outputs.pop("cluster_config"))["volume"] == "grpo-pipeline"
    asked = {"evaluate_gpus": "1", "evaluate_memory": "7Gi", "evaluate_node_selector": "{}"}
    assert outputs == {**asked, "evaluate_tolerations": "[]", "unchanged": "false"}
    assert "<title>Configuration of this run</title>" in Path(page.path).read_text()


def test_a_revision_becomes_a_commit_once(server: ApiServer, form: Form, repository: Path) -> None:
    """A branch, an annotated tag and a commit are looked up here; stages get the commit, which is what caches go by."""
    first, second = git(repository, "rev-list", "--reverse", "main").split()
    form = with_overrides(form, **GSM8K, report={"gate": {"target": ["gsm8k"]}})
    form["data_repository"] = str(repository)
    for revision, commit in {"main": second, "v1": first, first: first, "refs/heads/main": second}.items():
        made = preflight(form | {"data_revision": revision}, DEPLOYMENT)
        assert made.sections["prepare_data"]["repository"] == {"url": str(repository), "commit": commit}
        assert commit in made.page
    line = _line(form | {"data_revision": "v2"})
    assert "has no branch or tag `v2`; accepted: a commit of 40 digits, main, v1" in line
    assert _line(form).startswith("data_revision: is empty; accepted: a branch")


def test_everything_wrong_is_reported_at_once(server: ApiServer, form: Form, tmp_path: Path) -> None:
    """Parameters, the cluster, the volume, the queue, the runtime and the registry: one try shows everything."""
    server.cluster.remove(kinds.TRAINING_RUNTIMES, "grpo-torch")
    server.cluster.remove(kinds.CLAIMS, CLAIM)
    form |= {"grpo_num_steps": 0, "cluster_queue": "team", "weights_storage": "gs://bucket/weights"}
    deployment = {"image_gpu": "registry.example/gpu:latest", "secrets": {"git": "mine"}}
    assert _subjects(_lines({**form, "registry": f"file://{tmp_path}/nowhere"}, deployment=deployment)) == [
        "cluster_queue",
        "deployment.image_gpu",
        "deployment.secrets.git",
        "deployment.volume",
        "grpo_num_steps",
        "namespace team has no TrainingRuntime grpo-torch; apply an overlay of k8s/",
        "registry",
        "weights_storage",
    ]


def test_a_base_model_that_does_not_exist_is_the_only_complaint(
    server: ApiServer, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs depend on the model and are not guessed; a note names what was not checked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server.cluster.add(_SMALL_NODE)
    for base in ("nobody/no-such-model", "/models/none"):
        with pytest.raises(PipelineError) as raised:
            ready(form | {"base_model": base}, train_grpo={"reward": {"weights": {"reward_model": 1.0}, "model": {}}})
        line, note = str(raised.value).splitlines()
        assert line.startswith(f"base_model: {base}: ")
        assert note == f"{NOT_CHECKED}capacity"


def test_memory_for_a_model_that_cannot_be_seen_is_said_to_be_a_guess(server: ApiServer, form: Form) -> None:
    """The volume is not mounted where preflight runs; what somebody has set is no guess."""
    server.cluster.add(_SMALL_NODE)
    form |= {"base_model": "/work/models/large", "cluster_gpus_per_node": 0}
    guess = "; /work/models/large cannot be looked into before the run starts: set the memory that it takes"
    assert [line.endswith(guess) for line in _lines(form)] == [True, True]
    assert guess not in _line(with_overrides(form, cluster={"memory_per_node_gib": 60, "evaluate_memory_gib": 1}))


_LATEST, _UNTAGGED = "registry.example/gpu:latest", "registry.example:5000/ml/gpu"
_FROM_FILES = {**GSM8K, "report": {"gate": {"target": ["gsm8k"]}}}


@pytest.mark.parametrize(
    ("values", "overrides", "deployment", "line"),
    [
        ({"registry": "/registry"}, {}, {}, "registry: /registry would be lost with the pod"),
        ({"weights_storage": "weights"}, {}, {}, "weights_storage: weights would be lost with the pod"),
        ({"cluster_queue": "stuck"}, {}, {}, "cluster_queue: stuck admits no jobs: Cluster queue is missing"),
        ({}, {}, {"volume": "single"}, "deployment.volume: single is ReadWriteOnce"),
        ({}, {}, {"image_gpu": _LATEST}, f"deployment.image_gpu: {_LATEST} is a mutable reference"),
        ({}, {}, {"image_light": _UNTAGGED}, f"deployment.image_light: {_UNTAGGED} is a mutable reference"),
        (
            *({}, {"train_grpo": {"checkpoint": {"grace_s": 631}}}, {}),
            "checkpoint.grace_s: ranks have 631 s to write a checkpoint, but the TrainingRuntime grpo-torch has their "
            "pods killed after 660 s; set terminationGracePeriodSeconds there to 661 or more",
        ),
        (
            *({}, {"train_grpo": {"sampling": {"max_new_tokens": 500}}}, {}),
            "overrides.train_grpo.sampling.max_new_tokens: 500 tokens after a prompt of up to 48 ",
        ),
        ({}, {"cluster": {"training_timeout_s": 30 * 24 * 3600}}, {}, "overrides.cluster: the time limits add up to"),
        ({}, {"validate_data": {"min_test_rows": 10_000}}, {}, "overrides.validate_data.min_test_rows: is 10,000"),
        (
            *({}, {"train_grpo": {"reward": {"weights": {"no_such_module:reward": 1.0}}}}, {}),
            "overrides.train_grpo.reward.weights.no_such_module",
        ),
        ({}, _FROM_FILES, {}, "data_repository: is empty, and train.jsonl is read from a git and DVC"),
        (
            *({"data_repository": "REPOSITORY", "data_revision": "main"}, {}, {}),
            "data_repository: no source in prepare_data.sources reads a file",
        ),
        ({"registry": "REPOSITORY"}, {}, {}, "weights_storage: is not set"),
        ({}, {"register": {"model_registry": "http://127.0.0.1:9"}}, {}, "model registry: http://127.0.0.1:9"),
    ],
)
def test_what_a_run_cannot_use_is_named_by_its_parameter(
    server: ApiServer, form: Form, repository: Path, values: Form, overrides: Any, deployment: Any, line: str
) -> None:
    """Locations that a pod would take with it, volumes, queues, images, limits and files: a line each."""
    server.cluster.add(claim("single", mode="ReadWriteOnce"), *_QUEUES)
    filled = {name: repository.as_uri() if value == "REPOSITORY" else value for name, value in values.items()}
    assert _line(with_overrides(form | filled, **overrides), **deployment).startswith(line)


_STUCK = {"conditions": [{"type": "Active", "status": "False", "message": "Cluster queue is missing"}]}
_QUEUES: list[dict[str, Any]] = [
    {
        **{"apiVersion": kinds.LOCAL_QUEUES.api_version, "kind": "LocalQueue", "metadata": {"name": name}},
        **{"spec": {"clusterQueue": "all"}, "status": status},
    }
    for name, status in {"stuck": _STUCK, "works": {}}.items()
]


def test_what_a_run_can_use_passes(server: ApiServer, form: Form, repository: Path) -> None:
    """A queue that works, a digest, storage elsewhere, and models in folders of the volume, which is not mounted."""
    server.cluster.add(*_QUEUES)
    form |= {"cluster_queue": "works", "base_model": "/work/models/mine"}
    ready(form | {"registry": repository.as_uri(), "weights_storage": "/work/weights"})
    form = with_overrides(form, register={"model_registry": server.url})
    assert _line(form).startswith("weights_storage: is not a URL")
    deployment = DeploymentConfig(image_gpu=f"registry.example:5000/gpu@sha256:{'0' * 64}")
    ready(form | {"weights_storage": "https://dvc.example/weights"}, deployment)


@pytest.mark.parametrize("address", ["https://me:s3cret@git.example/x", "https://s3cret@git.example/x"])
def test_a_password_in_an_address_is_refused_and_not_repeated(form: Form, address: str) -> None:
    """Parameters are stored and displayed: a password belongs into a secret, and into no log."""
    form |= {"grpo_num_steps": 0, "weights_storage": address}
    assert _lines(with_overrides(form, register={"model_registry": address})) == [
        f"{name}: contains a password or a token; revoke it, and set credentials in the environment or a secret"
        for name in ("weights_storage", "overrides.register.model_registry")
    ]


def test_a_queue_that_may_not_be_read_is_no_queue(server: ApiServer, form: Form) -> None:
    """Without Kueue's component of the manifests the run would train outside every quota; the params may say so."""
    trainer = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["*"], "verbs": ["*"]}
    pods = {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["*"]}
    waiting = {"apiGroups": ["kueue.x-k8s.io", "visibility.kueue.x-k8s.io"], "verbs": ["*"]}
    resources = ["workloads", "localqueues/pendingworkloads"]
    server.access.rules = [trainer, pods, {**waiting, "resources": resources}]
    server.cluster.add(*_QUEUES)
    form = {**form, "cluster_queue": "works"}
    assert _line(form).startswith("cluster_queue: not allowed to read LocalQueue works in namespace team; add k8s/")
    server.cluster.uninstalled |= {kinds.LOCAL_QUEUES, kinds.WORKLOADS}
    assert _line(form).startswith(
        "cluster_queue: this cluster has no Kueue with kueue.x-k8s.io/v1beta2, and thus no queue works; install"
    )


def test_a_training_job_that_the_cluster_refuses_is_reported(server: ApiServer, form: Form) -> None:
    """The very job is shown to the cluster: what its controllers refuse shows before anything has run."""
    for status, message in {422: "spec.trainer: Invalid value", 404: 'namespaces "team" not found'}.items():
        server.faults.add(Fault(method="POST", path="/trainjobs", status=status, message=message))
        assert _line(form) == f"the cluster refuses the training job: {message} ({status})"
    server.cluster.uninstalled.add(kinds.TRAIN_JOBS)
    assert _line(form).startswith("this cluster has no TrainJob (trainer.kubeflow.org/v1alpha1) of Kubeflow Trainer 2")


def test_missing_permissions_are_listed_together(server: ApiServer, form: Form) -> None:
    """What the service account may not do is asked of the cluster before anything needs it."""
    trainer = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs", "trainingruntimes"]}
    pods = {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["get", "list", "watch"]}
    server.access.rules = [{**trainer, "verbs": ["get", "list"]}, pods]
    line = _line(form)
    assert line.startswith("not allowed in namespace team: create trainjobs (trainer.kubeflow.org), delete trainjobs")
    assert not {"pods", "workloads"} & set(re.findall(r"\w+", line))
    (queued, *_) = _lines({**form, "cluster_queue": "research"})
    assert "list workloads (kueue.x-k8s.io), get localqueues/pendingworkloads" in queued


def test_a_secret_that_is_named_must_exist(server: ApiServer, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight has the secrets' keys in its environment as every task has; half a secret does not count."""
    gated: dict[str, Any] = {"secrets": {"hub": "gated"}}
    line = _line(form, **gated)
    assert line == "deployment.secrets.hub: no secret gated with the keys HF_TOKEN in this namespace"
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    made = ready(form, DeploymentConfig.model_validate(gated))
    assert made.sections["cluster"]["secrets"] == {"gated": ["HF_TOKEN"]}
    assert "hf_verysecret" not in made.page + json.dumps(made.sections)
    monkeypatch.setenv("WANDB_API_KEY", "wandb_verysecret")
    made = ready(form, DeploymentConfig.model_validate(gated))
    assert made.sections["cluster"]["secrets"] == {"gated": ["HF_TOKEN"], "grpo-pipeline-tracking": ["WANDB_API_KEY"]}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert "secrets.storage: no secret grpo-pipeline-storage with the keys AWS_SECRET_ACCESS_KEY" in _line(form)


def test_a_busy_api_server_is_asked_again(server: ApiServer, form: Form) -> None:
    """Throttling, waiting for a webhook, broken connections: no reason to end a run."""
    server.faults.add(
        Fault(path="/persistentvolumeclaims/", status=429, times=4),
        Fault(path="/trainjobs", status=500, times=4),
        Fault(path="/trainingruntimes/", drop=BEFORE, times=2),
    )
    preflight(form, DEPLOYMENT, clock=fast_clock())
    assert server.faults.pending == []


def test_a_cluster_in_trouble_is_no_mistake_of_the_form(
    server: ApiServer, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute it is reported as such, to be tried again; a mistake that is certain decides all the same."""
    server.faults.add(Fault("POST", "/trainjobs", status=504, times=1000))
    clock = fast_clock()
    with pytest.raises(RetryableError) as raised:
        preflight(form, DEPLOYMENT, clock=clock)
    first, line = str(raised.value).splitlines()
    assert first.startswith("the cluster does not answer, so this run could not be checked")
    assert line.startswith("training job: the API server did not answer within 60 s: ")
    assert 60 <= clock.monotonic() <= 120
    lines = _lines(form, deployment={"image_gpu": _LATEST}, clock=fast_clock())
    assert [line.split(":")[0] for line in lines] == ["deployment.image_gpu", "training job"]
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(tmp_path / "none"))
    assert _subjects(_lines(form | {"grpo_num_steps": 0})) == ["cluster", "grpo_num_steps"]


def test_no_check_waits_for_another() -> None:
    """Each begins although those before it hang, and all that hang are abandoned at one deadline; a bug is raised."""
    answered, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        answered.wait()

    names = [f"check {number}" for number in range(20)]
    results = run_concurrently(dict.fromkeys(names, hang), 0.2)
    assert [str(results[name]) for name in names] == ["no answer within 0.2 s; the network or a service is down"] * 20
    assert all(begun.acquire(timeout=60) for _ in names)
    answered.set()
    with pytest.raises(ZeroDivisionError):
        run_concurrently({"broken": lambda: 1 / 0, "fine": list}, 5.0)
