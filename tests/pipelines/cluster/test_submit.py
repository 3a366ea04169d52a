import os
import re
from pathlib import Path

import pytest
from kubernetes import client, config

from components.cluster import kube
from components.preflight.config import DeploymentConfig, load_params
from components.preflight.form import form_of
from pipelines.cli import main
from pipelines.cluster.package import read
from pipelines.cluster.parameters import parameters
from pipelines.graph import write
from tests.fake_cluster import ApiServer, Json, kinds, runtime

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "params/smoke.yaml"


def only_run(server: ApiServer) -> Json:
    """The one run there is."""
    (run,) = server.kfp.runs.values()
    return run


def test_submit_starts_a_run_with_both_documents_and_every_parameter(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server refuses a pipeline without its Kubernetes part; what nobody set has its default."""
    arguments = ["submit", "--pipeline", str(pipeline), "--params", str(SMOKE), "--set", "cluster_queue=grpo-pipeline"]
    assert main([*arguments, "--set", "train_grpo.group_size=16", "--name", "first"]) == 0
    run = only_run(server)
    sent = run["runtime_config"]["parameters"]
    assert set(sent) == set(read(pipeline).types)
    expected = form_of(load_params(SMOKE))
    expected["overrides"]["train_grpo"]["group_size"] = 16
    assert sent == {**expected, "cluster_queue": "grpo-pipeline"}
    printed = capsys.readouterr().out
    assert printed == f"first  {run['run_id']}\n{server.url}/#/runs/details/{run['run_id']}\n"
    (experiment,) = server.kfp.experiments.values()
    assert experiment["display_name"] == "grpo-pipeline"


def test_submit_compiles_by_itself_for_the_deployment_of_the_params_file(server: ApiServer, tmp_path: Path) -> None:
    """Without a file the pipeline is that of this code, with the images and the volume that are set."""
    params = tmp_path / "smoke.yaml"
    params.write_text(f"extends: {SMOKE}\ndeployment: {{volume: shared}}\n")
    assert main(["submit", "--params", str(params)]) == 0
    run = only_run(server)
    assert "'constant': 'shared'" in str(run["pipeline_spec"]["platform_spec"])
    assert re.fullmatch(r"smoke-\d{8}T\d{6}Z", run["display_name"])
    assert run["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] == "grpo-post-training"


def test_images_that_no_registry_can_have_are_pointed_out(
    server: ApiServer, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first task of such a run would not even begin, and so say nothing."""
    assert main(["submit", "--pipeline", str(pipeline)]) == 0
    assert capsys.readouterr().err.startswith("note: no registry has grpo-pipeline/python-gpu:dev; set IMAGE_REGISTRY")
    named = tmp_path / "named.yaml"
    images = {"image_gpu": "registry.example.com/gpu:0123abc", "image_light": "registry.example.com/light:0123abc"}
    deployment = DeploymentConfig.model_validate(images)
    write(named, load_params(SMOKE).model_copy(update={"deployment": deployment}))
    assert main(["submit", "--pipeline", str(named)]) == 0
    assert capsys.readouterr().err == ""


def test_a_second_run_goes_into_the_same_experiment(server: ApiServer, pipeline: Path) -> None:
    """Experiments are made once; another name makes another."""
    for experiment in ("weekly", "weekly", "other"):
        assert main(["submit", "--pipeline", str(pipeline), "--experiment", experiment]) == 0
    assert sorted(each["display_name"] for each in server.kfp.experiments.values()) == ["other", "weekly"]


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("train_sft_model_base=Qwen/Qwen3-0.6B", "train_sft_model_base", "Qwen/Qwen3-0.6B"),
        ("train_sft.model.base=Qwen/Qwen3-0.6B", "train_sft_model_base", "Qwen/Qwen3-0.6B"),
        ("train_grpo_learning_rate=1e-6", "train_grpo_learning_rate", 1e-6),
        ("train_grpo.num_steps=7", "train_grpo_num_steps", 7),
        ("train_grpo.loss.kl.coefficient=0", "train_grpo_loss_kl_coefficient", 0),
        ("cluster.nodes=2", "cluster_nodes", 2),
    ],
)
def test_a_setting_is_read_as_the_pipeline_declares_it(pipeline: Path, setting: str, name: str, value: object) -> None:
    """A key of the params file sets the parameter that holds it."""
    assert parameters(read(pipeline), None, [setting])[name] == value


def test_a_key_without_a_parameter_of_its_own_is_set_in_the_overrides(pipeline: Path) -> None:
    """The rest stays as it was, in the file and in the defaults; null resets a key."""
    before = parameters(read(pipeline), SMOKE, [])
    toleration = 'cluster.tolerations=[{"key":"gpu","operator":"Exists"}]'
    after = parameters(read(pipeline), SMOKE, ["train_grpo.sampling.temperature=0.7", toleration])
    assert after["overrides"].pop("cluster") == {"tolerations": [{"key": "gpu", "operator": "Exists"}]}
    assert after["overrides"]["train_grpo"]["sampling"].pop("temperature") == 0.7
    assert after == before
    reset = parameters(read(pipeline), SMOKE, ["train_grpo.sampling.max_new_tokens=null", "evaluate.seed=2"])
    assert "sampling" not in reset["overrides"]["train_grpo"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cluster_nodes", "--set cluster_nodes: write name=value"),
        ("cluster_node=8", "--set cluster_node: the pipeline has no such parameter; did you mean cluster_nodes?"),
        ("cluster_nodes=many", "--set cluster_nodes=many: needs a whole number"),
        ("cluster.nodes=2.5", "--set cluster.nodes=2.5: needs a whole number"),
        ("overrides=gpu", "--set overrides=gpu: needs a JSON object"),
        ("train_gpro.seed=1", "overrides.train_gpro: unknown key; did you mean `train_grpo`?"),
        ("deployment.volume=x", "--set deployment.volume: is compiled into the graph; set it in the params file"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_asked(
    server: ApiServer, pipeline: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no run."""
    assert main(["submit", "--pipeline", str(pipeline), "--set", setting]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert server.requests == []


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (["train_grpo.sampling.temperatur=1"], ["overrides.train_grpo.sampling.temperatur: unknown key; did you mean"]),
        (
            ["train_grpo.num_steps=-1", "evaluate.num_samples=-1"],
            ["2 to correct before this run can start", "train_grpo_num_steps: ", "overrides.evaluate.num_samples: "],
        ),
        (
            ["register_registry=https://user:s3cr3t@git.example.com/registry.git"],
            ["register_registry: holds a password or a token; change it, and use a secret"],
        ),
    ],
)
def test_what_can_be_known_here_is_refused_here(
    server: ApiServer, pipeline: Path, settings: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it at once, as the first task would; a password in an address never gets to where it would be kept."""
    assert main(["submit", "--pipeline", str(pipeline), *(part for each in settings for part in ("--set", each))]) == 2
    error = capsys.readouterr().err
    assert [message for message in messages if message not in error] == []
    assert "s3cr3t" not in error
    assert server.requests == []


@pytest.mark.parametrize("params", sorted((ROOT / "params").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_can_be_submitted(pipeline: Path, params: Path) -> None:
    """With as many GPUs as it has processes, and with none."""
    compiled = read(pipeline)
    parameters(compiled, params, [])
    parameters(compiled, params, ["cluster.gpus_per_node=0"])


def test_a_wrong_params_file_is_refused_here(
    server: ApiServer, pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error need not travel to the cluster to be found."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(f"extends: {SMOKE}\ntrain_grpo: {{groupsize: 4}}\n")
    assert main(["submit", "--pipeline", str(pipeline), "--params", str(wrong)]) == 2
    assert "unknown key; did you mean `group_size`?" in capsys.readouterr().err
    assert server.requests == []


def test_a_file_that_is_no_pipeline_is_refused(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """With what would be one."""
    assert main(["submit", "--pipeline", str(SMOKE)]) == 2
    assert capsys.readouterr().err == f"error: {SMOKE}: is no compiled pipeline; `grpo-pipeline compile` writes one\n"


def test_stop_ends_the_run_and_then_removes_its_training_jobs(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the run, so that no step submits its job again; other runs' jobs stay."""
    main(["submit", "--pipeline", str(pipeline)])
    run_id = only_run(server)["run_id"]
    _add_job(server, "grpo-mine", run_id)
    _add_job(server, "grpo-other", "another-run")
    capsys.readouterr()
    assert main(["stop", run_id[:8]]) == 0
    name = only_run(server)["display_name"]
    assert capsys.readouterr().out == f"{name}  stopping\ntraining job grpo-mine removed\n"
    assert only_run(server)["state"] == "CANCELING"
    assert [job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)] == ["grpo-other"]
    told = [request.path for request in server.requests if request.method in ("POST", "DELETE")]
    assert told.index(f"/apis/v2beta1/runs/{run_id}:terminate") < len(told) - 1
    assert told[-1].endswith("/trainjobs/grpo-mine")


def test_stop_without_access_to_the_cluster_says_who_removes_the_jobs(
    server: ApiServer,
    pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run is ended all the same."""
    main(["submit", "--pipeline", str(pipeline)])
    monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", str(tmp_path / "nothing"))
    capsys.readouterr()
    assert main(["stop", only_run(server)["run_id"]]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("stopping")
    assert out[1].startswith(
        "training jobs not removed; their steps or the reaper will remove them: no cluster is configured"
    )
    assert only_run(server)["state"] == "CANCELING"


def test_stop_looks_for_jobs_where_the_run_has_put_them(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training jobs may be in a namespace of their own."""
    main(["submit", "--pipeline", str(pipeline), "--set", "cluster.namespace=gpus"])
    run_id = only_run(server)["run_id"]
    server.cluster.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpus"}})
    there = runtime("grpo-torch")
    server.cluster.add({**there, "metadata": {**there["metadata"], "namespace": "gpus"}})
    _add_job(server, "grpo-mine", run_id, namespace="gpus")
    capsys.readouterr()
    assert main(["stop", run_id]) == 0
    assert "training job grpo-mine removed" in capsys.readouterr().out


def test_stop_looks_for_jobs_in_the_namespace_of_a_user(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Kubeflow has several users, a run and its training jobs are in the namespace of a profile."""
    server.kfp.multi_user = True
    server.kfp.namespaces = ("team-a",)
    server.cluster.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}})
    there = runtime("grpo-torch")
    server.cluster.add({**there, "metadata": {**there["metadata"], "namespace": "team-a"}})
    assert main(["submit", "--pipeline", str(pipeline), "--namespace", "team-a"]) == 0
    run_id = only_run(server)["run_id"]
    _add_job(server, "grpo-mine", run_id, namespace="team-a")
    _add_job(server, "grpo-elsewhere", run_id)
    capsys.readouterr()
    assert main(["stop", run_id, "--namespace", "team-a"]) == 0
    assert "training job grpo-mine removed" in capsys.readouterr().out
    assert [job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)] == ["grpo-elsewhere"]


def test_stopping_what_has_ended_still_cleans_up(
    server: ApiServer, pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that failed may have left a job."""
    main(["submit", "--pipeline", str(pipeline)])
    run_id = only_run(server)["run_id"]
    server.kfp.set_state(run_id, "FAILED")
    _add_job(server, "grpo-mine", run_id)
    capsys.readouterr()
    assert main(["stop", run_id]) == 0
    out = capsys.readouterr().out
    assert "had already ended: failed" in out
    assert "training job grpo-mine removed" in out


def _add_job(server: ApiServer, name: str, run_id: str, namespace: str = "kubeflow") -> None:
    labels = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: run_id}
    body = {
        "apiVersion": f"{kube.GROUP}/{kube.VERSION}",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "grpo-torch"}},
    }
    api = config.new_client_from_config(os.environ["GRPO_PIPELINE_KUBECONFIG"])
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        kube.GROUP, kube.VERSION, namespace, kube.PLURAL, body, field_validation="Strict"
    )
