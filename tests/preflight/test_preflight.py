"""Preflight against a cluster's API server and real git repositories: what is missing is named, all at once, soon."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from components.cluster.kube import Clock
from components.preflight.form import Form
from components.preflight.preflight import preflight
from components.preflight.side_by_side import side_by_side
from components.shared.errors import PipelineError, RetryableError
from tests.fake_cluster import BEFORE, ApiServer, Fault, kinds
from tests.preflight.conftest import CLAIM, claim, git


class FastClock:
    """A clock that goes forward by what it is asked to sleep, in every thread at once."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._passed_s

    def now(self) -> datetime:
        """See `Clock`."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._passed_s)

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        self._passed_s += seconds


def _lines(form: Form, deadline_s: float = 20.0, clock: Clock | None = None) -> list[str]:
    with pytest.raises(PipelineError) as raised:
        preflight(form, deadline_s=deadline_s, clock=clock)
    assert raised.value.exit_code == 2
    first, *lines = str(raised.value).splitlines()
    assert not lines or first == f"{len(lines)} to correct before this run can start"
    return lines or [first]


def _line(form: Form) -> str:
    (line,) = _lines(form)
    return line


def test_a_run_that_can_start_gets_its_sections(server: ApiServer, form: Form) -> None:
    """With everything in place the sections come back complete, and nothing is made in the cluster."""
    ready = preflight(form | {"cluster_gpu_product": "NVIDIA-H200", "cluster_node_selector": {"pool": "a"}})
    assert ready.sections["train_grpo"]["group_size"] == form["grpo_group_size"]
    assert ready.values["evaluate_node_selector"] == {"pool": "a", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert ready.values["evaluate_gpus"] == "1"
    assert not server.cluster.all(kinds.TRAIN_JOBS)


def test_the_configuration_can_be_read(server: ApiServer, form: Form) -> None:
    """The page has each typed parameter with its value, and each section in full as JSON."""
    page = preflight(form | {"grpo_group_size": 12}).summary
    assert "| grpo_group_size | `12` |" in page
    for name, section in preflight(form).sections.items():
        assert f"## {name}\n" in page
        if name == "register":
            assert json.dumps(section, indent=2) in page


def test_a_revision_becomes_a_commit_once(server: ApiServer, form: Form, repository: Path) -> None:
    """A branch, an annotated tag and a commit are looked up here; stages get the commit, which is what caches go by."""
    first, second = git(repository, "rev-list", "--reverse", "main").split()
    source = {"kind": "gsm8k", "train": "data/train.jsonl", "test": "data/test.jsonl"}
    form["section_prepare_data"]["sources"] = [source]
    form["section_report"]["gate"]["target"] = ["gsm8k"]
    for revision, commit in {"main": second, "v1": first, first: first, "refs/heads/main": second}.items():
        ready = preflight(form | {"data_repository": str(repository), "data_revision": revision})
        assert ready.sections["prepare_data"]["repository"] == {"url": str(repository), "commit": commit}
        assert commit in ready.summary


def test_a_revision_that_is_not_there_is_named_with_those_that_are(
    server: ApiServer, form: Form, repository: Path
) -> None:
    """What would be accepted is in the line; without any revision too."""
    form["section_prepare_data"]["sources"] = [{"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}]
    form["section_report"]["gate"]["target"] = ["gsm8k"]
    form["data_repository"] = str(repository)
    line = _line(form | {"data_revision": "v2"})
    assert "has no branch or tag `v2`; accepted: a commit of 40 digits, main, v1" in line
    assert _line(form).startswith("data_revision: is empty; accepted: a branch")


def test_files_come_from_a_repository(server: ApiServer, form: Form, repository: Path) -> None:
    """Files without a repository would be whatever lies in a pod; a repository without files would be ignored."""
    line = _line(form | {"data_repository": str(repository), "data_revision": "main"})
    assert line.startswith("data_repository: no source in section_prepare_data reads a file")
    form["section_prepare_data"]["sources"] = [{"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}]
    form["section_report"]["gate"]["target"] = ["gsm8k"]
    assert _line(form).startswith("data_repository: train.jsonl is read from a git and DVC repository; name it")


def test_all_that_is_wrong_is_said_at_once(server: ApiServer, form: Form, tmp_path: Path) -> None:
    """Parameters, the cluster, the volume, the queue, the runtime and the registry: one try shows everything."""
    server.cluster.remove(kinds.TRAINING_RUNTIMES, "grpo-torch")
    server.cluster.remove(kinds.CLAIMS, CLAIM)
    form |= {
        "grpo_group_size": 1,
        "cluster_queue": "team",
        "registry_repository": f"file://{tmp_path}/nowhere",
        "registry_weights_remote": "gs://bucket/weights",
        "secret_git": "mine",
    }
    subjects = [line.split(":")[0] for line in _lines(form)]
    assert sorted(subjects) == [
        "cluster_queue",
        "cluster_volume_claim",
        "grpo_group_size",
        "namespace team has no TrainingRuntime grpo-torch; apply an overlay of k8s/",
        "registry_repository",
        "registry_weights_remote",
        "secret_git",
    ]


def test_keys_that_contradict_one_another_and_what_is_missing_are_named_by_parameter(
    server: ApiServer, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's target, limits, the base model and a reward of one's own are checked before anything is spent."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    form["section_report"]["gate"]["target"] = ["gsm8k"]
    form["section_validate_data"]["min_test_rows"] = 10_000
    assert {line.split(":")[0] for line in _lines(form)} == {
        "section_report.gate.target",
        "section_validate_data.min_test_rows",
    }
    form["section_report"]["gate"]["target"] = ["word_problems"]
    form["section_validate_data"]["min_test_rows"] = 10
    form["section_train_grpo"]["reward"]["weights"] = {"accuracy": 1.0, "no_such_module:reward": 1.0}
    assert {line.split(":")[0] for line in _lines(form | {"base_model": "nobody/no-such-model"})} == {
        "base_model",
        "section_train_grpo.reward.weights.no_such_module",
    }
    form["section_train_grpo"]["reward"]["weights"] = {"accuracy": 1.0}
    form["section_train_grpo"]["sampling"]["max_new_tokens"] = 500
    (line,) = _lines(form)
    assert line.startswith("section_train_grpo.sampling.max_new_tokens: 500 tokens after a prompt of up to 48 ")


def test_a_cluster_without_trainer_is_told(server: ApiServer, form: Form) -> None:
    """Neither the kind nor its runtime: the line says which version is needed."""
    server.cluster.uninstall(kinds.TRAIN_JOBS)
    assert _line(form).startswith("this cluster has no TrainJob (trainer.kubeflow.org/v1alpha1); Kubeflow Trainer 2.2")


def test_what_may_not_be_looked_at_is_said_and_no_obstacle(
    server: ApiServer, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role that knows another volume by name does not keep a run from using this one."""
    trainer = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["*"], "verbs": ["*"]}
    pods = {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["*"]}
    server.access.rules = [trainer, pods]
    preflight(form)
    assert f"preflight: could not look at {CLAIM}: not allowed; it is taken to be fit\n" in capsys.readouterr().out


@pytest.mark.parametrize("image", ["registry.example:5000/ml/gpu", "registry.example/gpu:latest"])
def test_an_image_that_moves_is_refused(server: ApiServer, form: Form, image: str) -> None:
    """What ran could not be told afterwards, and the cache would take one build's outputs for another's."""
    for name in ("image_gpu", "image_light"):
        assert _line(form | {name: image}).startswith(f"{name}: {image} names another image another day")
    preflight(form | {"image_gpu": f"registry.example:5000/gpu@sha256:{'0' * 64}"})


def test_a_training_job_that_the_cluster_refuses_is_told(server: ApiServer, form: Form) -> None:
    """The very job is shown to the cluster: what its controllers do not take shows before anything has run."""
    server.faults.add(Fault(method="POST", path="/trainjobs", status=422))
    assert _line(form) == "the cluster refuses the training job: injected fault"


def test_a_runtime_that_is_missing_is_told_once(server: ApiServer, form: Form) -> None:
    """Each thing that is wrong is one line, and not one from every check that stumbles over it."""
    server.cluster.remove(kinds.TRAINING_RUNTIMES, "grpo-torch")
    assert _line(form) == "namespace team has no TrainingRuntime grpo-torch; apply an overlay of k8s/"


def test_ranks_must_have_the_time_to_end_that_they_may_take(server: ApiServer, form: Form) -> None:
    """Pods are killed when the grace period of their runtime is over, and with them the last checkpoint is lost."""
    form["section_train_grpo"]["checkpoint"] = {"every_steps": 1, "keep_last": 1, "keep_best": False, "grace_s": 31}
    assert _line(form) == (
        "checkpoint.grace_s: ranks have 31 s to write a checkpoint, but the TrainingRuntime grpo-torch has their pods "
        "killed after 60 s; set terminationGracePeriodSeconds there to 61 or more"
    )


def test_a_volume_must_be_shared(server: ApiServer, form: Form) -> None:
    """A claim that one node alone can write would leave all other pods pending."""
    server.cluster.add(claim("single", mode="ReadWriteOnce"), claim("lost", phase="Lost"))
    assert "single is ReadWriteOnce" in _line(form | {"cluster_volume_claim": "single"})
    assert "lost has lost its volume" in _line(form | {"cluster_volume_claim": "lost"})


def test_a_queue_that_takes_no_jobs_is_told(server: ApiServer, form: Form) -> None:
    """Kueue's own reason is in the line; a queue that works is fine."""
    status = {"conditions": [{"type": "Active", "status": "False", "message": "Cluster queue is missing"}]}
    spec = {"clusterQueue": "all"}
    kind = {"apiVersion": kinds.LOCAL_QUEUES.api_version, "kind": "LocalQueue", "spec": spec}
    server.cluster.add(
        {**kind, "metadata": {"name": "works"}}, {**kind, "metadata": {"name": "stuck"}, "status": status}
    )
    preflight(form | {"cluster_queue": "works"})
    assert _line(form | {"cluster_queue": "stuck"}) == "cluster_queue: stuck takes no jobs: Cluster queue is missing"


def test_missing_permissions_are_listed_together(server: ApiServer, form: Form) -> None:
    """What the service account may not do is asked of the cluster before anything needs it."""
    server.access.rules = [
        {
            "apiGroups": ["trainer.kubeflow.org"],
            "resources": ["trainjobs", "trainingruntimes"],
            "verbs": ["get", "list"],
        },
        {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["get", "list", "watch"]},
    ]
    line = _line(form)
    assert line.startswith("not allowed in namespace team: create trainjobs (trainer.kubeflow.org), delete trainjobs")
    assert "pods" not in line


def test_a_secret_that_is_named_must_be_there(server: ApiServer, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight has the secrets' keys in its environment as every task has; half a secret is none."""
    line = _line(form | {"secret_hub": "gated"})
    assert line == "secret_hub: no secret gated with the keys HF_TOKEN in this namespace"
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    ready = preflight(form | {"secret_hub": "gated"})
    assert ready.sections["cluster"]["secrets"] == {"gated": ["HF_TOKEN"]}
    assert "hf_verysecret" not in ready.summary + json.dumps(ready.sections)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert "secret_storage: no secret grpo-pipeline-storage with the keys AWS_SECRET_ACCESS_KEY" in _line(form)


@pytest.mark.parametrize("address", ["https://me:s3cret@git.example/x", "https://s3cret@git.example/x"])
def test_a_password_in_an_address_is_refused_and_not_repeated(server: ApiServer, form: Form, address: str) -> None:
    """Parameters are kept and shown: a password belongs into a secret, and into no log."""
    for name in ("data_repository", "registry_repository", "registry_weights_remote"):
        line = _line(form | {name: address, "grpo_group_size": 1})
        assert line == f"{name}: holds a password or a token; change it, and use a secret"


@pytest.mark.parametrize(
    ("path", "status"), [("/persistentvolumeclaims/", 429), ("/trainingruntimes/", 503), ("/trainjobs", 500)]
)
def test_an_api_server_that_is_busy_is_asked_again(server: ApiServer, form: Form, path: str, status: int) -> None:
    """Back from a restart, throttling, or waiting for a webhook: that does not end a run within a minute."""
    server.faults.add(Fault(path=path, status=status, times=4))
    preflight(form, clock=FastClock())
    assert server.faults.pending == []


def test_a_connection_that_breaks_is_made_again(server: ApiServer, form: Form) -> None:
    """Whatever was asked over it."""
    server.faults.add(Fault(path="/trainingruntimes/", drop=BEFORE, times=2), Fault("POST", "/trainjobs", drop=BEFORE))
    preflight(form, clock=FastClock())
    assert server.faults.pending == []


@pytest.mark.parametrize(
    ("fault", "subject"),
    [
        (Fault("POST", "/trainjobs", status=500, times=1000), "training job"),
        (Fault("POST", "/trainjobs", status=504, times=1000), "training job"),
        (Fault(path="/persistentvolumeclaims/", status=503, times=1000), "cluster_volume_claim"),
    ],
    ids=["webhook", "time-out", "API server"],
)
def test_a_cluster_in_trouble_is_no_mistake_of_the_form(
    server: ApiServer, form: Form, fault: Fault, subject: str
) -> None:
    """After a minute it is named as what it is, with the exit code for what may work another time."""
    server.faults.add(fault)
    clock = FastClock()
    with pytest.raises(RetryableError) as raised:
        preflight(form, clock=clock)
    first, line = str(raised.value).splitlines()
    assert first.startswith("the cluster cannot be asked now")
    assert line.startswith(f"{subject}: the API server did not answer within 60 s: ")
    assert 60 <= clock.monotonic() <= 120


def test_mistakes_are_named_beside_the_trouble_of_the_cluster(server: ApiServer, form: Form) -> None:
    """What is wrong for certain decides, and the rest is not kept back."""
    server.faults.add(Fault(path="/persistentvolumeclaims/", status=503, times=1000))
    lines = _lines(form | {"image_gpu": "registry.example/gpu:latest"}, clock=FastClock())
    assert [line.split(":")[0] for line in lines] == ["image_gpu", "cluster_volume_claim"]


def test_what_would_go_with_the_pod_is_refused(server: ApiServer, form: Form) -> None:
    """A registry or a remote in a folder of the container's own would be lost with it."""
    assert _line(form | {"registry_repository": "/registry"}).startswith("registry_repository: /registry would go")
    assert _line(form | {"registry_weights_remote": "weights"}).startswith("registry_weights_remote: weights would go")


def test_a_registry_at_a_url_needs_a_place_for_weights(server: ApiServer, form: Form, repository: Path) -> None:
    """Git does not hold weights: beside a folder there is room for them, beside a URL there is none."""
    form["registry_repository"] = f"file://{repository}"
    assert _line(form).startswith("registry_weights_remote: is empty")
    preflight(form | {"registry_weights_remote": "/work/weights"})


def test_the_model_registry_has_to_answer(server: ApiServer, form: Form) -> None:
    """It is asked for with the client that registers; what it is told of must be found from elsewhere."""
    form |= {"registry_kubeflow_url": server.url, "registry_weights_remote": "https://dvc.example/weights"}
    preflight(form)
    assert _line(form | {"registry_weights_remote": ""}).startswith("registry_weights_remote: is no URL")
    line = _line(form | {"registry_kubeflow_url": "http://127.0.0.1:9"})
    assert line.startswith("registry_kubeflow_url: http://127.0.0.1:9")


def test_an_api_server_that_hangs_costs_seconds(server: ApiServer, form: Form) -> None:
    """The check that waits for it is given up, and the others are made all the same."""
    server.faults.add(Fault(path="/persistentvolumeclaims/", delay_s=5.0))
    assert _lines(form, deadline_s=2.0) == [
        "cluster_volume_claim: no answer within 2 s; the network or a service is down"
    ]


def test_no_check_waits_for_another() -> None:
    """Each begins although those before it hang, and all that hang are given up at one deadline."""
    answered, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        answered.wait()

    names = [f"check {number}" for number in range(20)]
    found = side_by_side(dict.fromkeys(names, hang), 0.2)
    assert [str(found[name]) for name in names] == ["no answer within 0.2 s; the network or a service is down"] * 20
    assert all(begun.acquire(timeout=60) for _ in names)
    answered.set()


def test_no_cluster_is_one_line(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a pod and without a kubeconfig the checks of the parameters are made all the same."""
    monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", str(tmp_path / "none"))
    lines = _lines(form | {"grpo_group_size": 1})
    assert [line.split(":")[0] for line in lines] == ["grpo_group_size", "cluster"]


def test_a_bug_in_a_check_is_no_verdict() -> None:
    """An error that is not meant for people ends preflight: it must not pass for an answer."""
    with pytest.raises(ZeroDivisionError):
        side_by_side({"broken": lambda: 1 / 0, "fine": list}, 5.0)
