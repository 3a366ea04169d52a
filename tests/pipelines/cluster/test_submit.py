import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.cluster import kube
from components.preflight.config import load_params
from components.preflight.form import form_of, overrides_of, sections_of
from components.shared.deployment import DeploymentConfig
from pipelines.cluster.submission import images_of_this_machine, parameters, read
from tests.cluster.launched import add_train_job
from tests.fake_cluster import ApiServer, Json, kinds
from tests.pipelines.conftest import Program

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "params/smoke.yaml"


@pytest.fixture
def submit(program: Program, pipeline: Path) -> Program:
    """`grpo-pipeline submit` for one pipeline."""
    return partial(program, "submit", "--pipeline", str(pipeline))


def only_run(server: ApiServer) -> Json:
    """Return the one run there is."""
    (run,) = server.kfp.runs.values()
    return run


def test_submit_starts_a_run_with_every_parameter(server: ApiServer, submit: Program, pipeline: Path) -> None:
    """The server refuses a pipeline without its Kubernetes part; what nobody set has its default."""
    settings = ["--set", "cluster_queue=grpo-pipeline", "--set", "train_grpo.group_size=16", "--name", "first"]
    lines, _ = submit(*settings)
    run = only_run(server)
    assert lines == [f"first  {run['run_id']}", f"{server.url}/#/runs/details/{run['run_id']}"]
    sent = run["runtime_config"]["parameters"]
    assert set(sent) == set(read(pipeline).types)
    expected = form_of(load_params(ROOT / "params.yaml"))
    del expected["preset"]
    overrides = "{train_grpo: {group_size: 16}}"
    assert sent == {**expected, "cluster_queue": "grpo-pipeline", "overrides": overrides}
    about = f"pipeline.yaml at [0-9a-f]{{12}}(-dirty)?; changed: cluster_queue grpo-pipeline, overrides {overrides}"
    assert re.fullmatch(about, run["description"])
    for experiment in ("grpo-pipeline", "other"):
        note = "note: no registry has use-grpo-pipeline-publish.invalid/grpo-pipeline/python-gpu:dev; set IMAGE_REG"
        assert submit("--experiment", experiment)[1].startswith(note)
    assert [each["display_name"] for each in server.kfp.experiments.values()] == ["grpo-pipeline", "other"]


def test_submit_compiles_for_the_deployment_of_the_params(server: ApiServer, program: Program, tmp_path: Path) -> None:
    """Without a file the pipeline is that of this code, with the images and the volume that are set."""
    params = tmp_path / "smoke.yaml"
    params.write_text(f"extends: {SMOKE}\ndeployment: {{volume: shared}}\n")
    program("submit", "--params", str(params))
    run = only_run(server)
    assert "'constant': 'shared'" in str(run["pipeline_spec"]["platform_spec"])
    assert run["runtime_config"]["parameters"]["overrides"] == ""
    assert re.fullmatch("smoke.yaml at [0-9a-f]{12}(-dirty)?; nothing changed", run["description"])
    assert re.fullmatch(r"smoke-\d{8}T\d{6}Z", run["display_name"])
    assert run["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] == "grpo-post-training"


def test_images_of_this_machine_are_pointed_out() -> None:
    """Nodes would look for them in places of their own."""
    local = ["localhost/ml/gpu:0123abc", "ml/gpu:0123abc", "gpu", "registry.example.com/gpu:dev", "x.invalid/gpu:0123"]
    lines = images_of_this_machine([*local, "localhost:5000/gpu:0123abc", "registry.example.com/gpu:0123abc"])
    assert [line.partition(";")[0] for line in lines] == [f"no registry has {image}" for image in local]


def test_a_setting_is_read_as_the_pipeline_declares_it(pipeline: Path) -> None:
    """A key of the params file sets the parameter that holds it; without one it is set in the overrides.

    What nobody changed is not in them; null resets a key of the preset. They are one line, as the form's field.
    """
    package = read(pipeline)
    typed = ["train_sft.model.base=Qwen/Qwen3-0.6B", "grpo_learning_rate=1e-6", "train_grpo.loss.kl.coefficient=0"]
    values = {"base_model": "Qwen/Qwen3-0.6B", "grpo_learning_rate": 1e-6, "grpo_kl_coefficient": 0}
    assert values.items() <= parameters(package, None, typed).items()
    toleration = 'cluster.tolerations=[{"key":"gpu","operator":"Exists"}]'
    after = parameters(package, None, ["train_grpo.sampling.temperature=0.7", toleration])
    toleration = "cluster: {tolerations: [{key: gpu, operator: Exists}]}"
    assert after.pop("overrides") == f"{{{toleration}, train_grpo: {{sampling: {{temperature: 0.7}}}}}}"
    assert after == {name: package.defaults[name] for name in after}
    reset = parameters(package, None, ["overrides={evaluate: {seed: 2}}", "train_grpo.sampling.max_new_tokens=null"])
    assert reset["overrides"] == "{evaluate: {seed: 2}, train_grpo: {sampling: {max_new_tokens: null}}}"


def test_a_params_file_is_what_it_changes_of_another_preset(pipeline: Path) -> None:
    """A compiled pipeline that is run with a params file does what the file says, and its overrides are no more."""
    form = parameters(read(pipeline), SMOKE, [])
    assert overrides_of(form)["train_grpo"]["validation"] is None  # the preset has one
    form["preset"] = read(pipeline).defaults["preset"]
    sections, _ = sections_of(form, DeploymentConfig(), commit="", secrets={})
    expected, _ = sections_of(form_of(load_params(SMOKE)), DeploymentConfig(), commit="", secrets={})
    assert sections == expected


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (["cluster_nodes"], ["error: --set cluster_nodes: write name=value\n"]),
        (["cluster_node=8"], ["--set cluster_node: the pipeline has no such parameter; did you mean cluster_nodes?"]),
        (["cluster_nodes=many"], ["error: --set cluster_nodes=many: needs a whole number\n"]),
        (["overrides={train_grpo: {"], ["error: overrides:1: is not valid YAML"]),
        ([f"train_sft.model.prompt={{question}}{'x' * 10_000}"], ["overrides: has 1", "Kubeflow takes 10,000 for all"]),
        (
            ["train_grpo.num_steps=-1", "evaluate.num_samples=-1"],
            ["2 problems to correct before this run can start", "grpo_num_steps: ", "overrides.evaluate.num_samples: "],
        ),
        (["registry=https://user:s3cr3t@example.com/registry.git"], ["registry: contains a password or a token;"]),
    ],
)
def test_wrong_settings_reach_no_server(server: ApiServer, submit: Program, settings: Any, messages: Any) -> None:
    """All of them at once, as preflight would; a password never gets to where it would be kept."""
    options = [part for each in settings for part in ("--set", each)]
    _, error = submit(*options, code=2)
    assert [message for message in messages if message not in error] == []
    assert "s3cr3t" not in error
    assert server.requests == []


def test_wrong_files_reach_no_server(server: ApiServer, program: Program, submit: Program, tmp_path: Path) -> None:
    """A params file with a misspelt key, and a file that is no pipeline."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(f"extends: {SMOKE}\ntrain_grpo: {{groupsize: 4}}\n")
    _, error = submit("--params", str(wrong), code=2)
    assert "unknown key; did you mean `group_size`?" in error
    _, error = program("submit", "--pipeline", str(SMOKE), code=2)
    assert error == f"error: {SMOKE}: not a compiled pipeline; `grpo-pipeline compile` writes one\n"
    assert server.requests == []


@pytest.mark.parametrize("params", sorted((ROOT / "params").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_params_file_can_be_submitted(pipeline: Path, params: Path) -> None:
    """With as many GPUs as it has processes, and with none."""
    compiled = read(pipeline)
    parameters(compiled, params, [])
    parameters(compiled, params, ["cluster.gpus_per_node=0"])


@pytest.mark.parametrize(
    ("options", "namespace", "state"),
    [
        ([], "kubeflow", "stopping"),
        ([], "kubeflow", "had already ended: failed"),
        (["--set", "cluster.namespace=gpus"], "gpus", "stopping"),
        (["--namespace", "team-a"], "team-a", "stopping"),
    ],
)
def test_stop_ends_the_run_and_then_removes_its_training_jobs(
    server: ApiServer, submit: Program, program: Program, options: list[str], namespace: str, state: str
) -> None:
    """First the run, so that no step submits its job again; in the run's namespace, and of this run only."""
    profile = options if "--namespace" in options else []
    server.kfp.multi_user, server.kfp.namespaces = bool(profile), ("kubeflow", namespace)
    submit(*options)
    run = only_run(server)
    for name, run_id, where in (
        ("grpo-mine", run["run_id"], namespace),
        ("grpo-other", "another-run", namespace),
        ("grpo-elsewhere", run["run_id"], "default"),
    ):
        labels = {kube.MANAGED_BY: kube.PROJECT, kube.RUN_ID: run_id}
        add_train_job(server, name, labels, namespace=where)
    if "failed" in state:
        server.kfp.set_state(run["run_id"], "FAILED")
    lines = [f"{run['display_name']}  {state}", "training job grpo-mine removed"]
    assert program("stop", run["run_id"][:8], *profile)[0] == lines
    assert run["state"] == ("FAILED" if "failed" in state else "CANCELING")
    left = {job["metadata"]["name"] for job in server.cluster.all(kinds.TRAIN_JOBS)}
    assert left == {"grpo-other", "grpo-elsewhere"}
    paths = [request.path for request in server.requests if request.method in ("POST", "DELETE")]
    assert paths[-1].endswith("/trainjobs/grpo-mine")
    assert (paths[-2] == f"/apis/v2beta1/runs/{run['run_id']}:terminate") == (state == "stopping")


def test_stop_finds_the_jobs_of_a_run_from_the_page(server: ApiServer, program: Program, pipeline: Path) -> None:
    """Such a run has the parameters alone that somebody changed; where its jobs are is in the preset of its version."""
    pipeline_spec, platform_spec = yaml.safe_load_all(pipeline.read_text())
    inputs = pipeline_spec["root"]["dag"]["tasks"]["preflight"]["inputs"]["parameters"]
    inputs["preset"]["runtimeValue"]["constant"]["cluster"] = {"namespace": "gpus"}
    spec = {"pipeline_spec": pipeline_spec, "platform_spec": platform_spec}
    version = server.kfp.new(server.kfp.versions, "pipeline_version_id", pipeline_spec=spec)
    reference = {"pipeline_id": "grpo", "pipeline_version_id": version["pipeline_version_id"]}
    for config in ({"parameters": {"cluster_gpus_per_node": 0}}, None):
        run = server.kfp.new(server.kfp.runs, "run_id", display_name="from the form", runtime_config=config)
        run["pipeline_version_reference"] = reference
        server.kfp.set_state(run["run_id"], "RUNNING")
        program("stop", run["run_id"])
        listed = [request.path for request in server.requests if request.path.endswith("/trainjobs")]
        assert "/namespaces/gpus/" in listed[-1]


def test_stop_without_access_to_the_cluster_says_who_removes_the_jobs(
    server: ApiServer, program: Program, submit: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run is ended all the same."""
    submit()
    monkeypatch.setenv("GRPO_PIPELINE_KUBECONFIG", str(tmp_path / "nothing"))
    stopping, note = program("stop", only_run(server)["run_id"])[0]
    assert stopping.endswith("stopping")
    assert note.startswith("training jobs not removed; their steps or the reaper will remove them: no cluster is")
    assert only_run(server)["state"] == "CANCELING"
