"""The graph on a cluster: from problems to a registered model, with the resources of each task, compiled for Kubeflow.

Its edges are the inputs that the stages declare, as in a local run and in dvc.yaml.
"""

import inspect
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kfp import compiler, dsl, kubernetes
from kfp.dsl.graph_component import GraphComponent

from components.cluster.config import GPU_RESOURCE
from components.evaluate.component import evaluate
from components.preflight.capacity import EVALUATION_CPU
from components.preflight.component import preflight
from components.preflight.config import DEPLOYMENT, STAGES, Params, load_params
from components.preflight.form import PRESET, form_of, parameters
from components.prepare_data.component import prepare_data
from components.register.component import register
from components.report.component import report
from components.shared.deployment import LONGEST_TRAINING_S, MOUNT, OPTIONAL_SECRET_KEYS, SECRET_KEYS
from components.shared.environment import IMAGE_VARIABLE, RUN_ID_VARIABLE
from components.shared.errors import PipelineError
from components.train_grpo.component import train_grpo
from components.train_sft.component import train_sft
from components.validate_data.component import validate_data

Tasks = dict[str, dsl.PipelineTask]

NAME = "grpo-post-training"
DESCRIPTION = "Fine-tune a base model, improve it with GRPO, and register it if it is measurably better."


def stages(
    sections: Mapping[str, Any],
    unchanged: Any,
    *,
    launch: Mapping[str, Any],
    place: Mapping[str, Any],
    run_name: str = "",
) -> Tasks:
    """Return the task of each stage by its name, in the order in which they run.

    An artifact that another task reads takes a row of Kubeflow's graph, which has to fit on a screen: only the data,
    which may come from a cache, are passed on as an artifact, everything else as a path.

    Args:
        sections: The section of each stage.
        unchanged: Whether the run would only reproduce the newest registered version.
        launch: Further arguments of training on a cluster: where to run, the id of the run, and its name.
        place: Further arguments of stages on a cluster whose outputs others read: the shared volume, and the run.
        run_name: Name of the run on Kubeflow's page, for the registry.
    """
    data = prepare_data(config=sections["prepare_data"], unchanged=unchanged)
    validated = validate_data(config=sections["validate_data"], data=data.output)
    # All later tasks need a model from here, so nothing is trained or measured on rejected data.
    fine_tuned = train_sft(config=sections["train_sft"], data=data.output, **launch).after(validated)
    problems, sft = fine_tuned.outputs["problems"], fine_tuned.outputs["folder"]
    improved = train_grpo(config=sections["train_grpo"], problems=problems, sft=sft, **launch)
    models = {"sft": sft, "grpo": improved.outputs["folder"]}
    measured = evaluate(config=sections["evaluate"], problems=problems, **models, **place)
    evaluation, validation = measured.outputs["folder"], validated.outputs["validation"]
    compared = report(config=sections["report"], validation=validation, evaluation=evaluation, **models, **place)
    # `register` fails if the gate is missed: nothing is registered, and Kubeflow shows the run as failed.
    results = {"evaluation": evaluation, "report": compared.outputs["folder"]}
    registered = register(config=sections["register"], problems=problems, **models, **results, run_name=run_name)
    return dict(zip(STAGES, (data, validated, fine_tuned, improved, measured, compared, registered), strict=True))


@dataclass(frozen=True)
class Resources:
    """The resources and limits of a task."""

    cpu: tuple[str, str]
    """Request and limit in cores."""
    memory: tuple[str, str] | None
    """Request and limit in bytes; None for preflight's estimate for the model."""
    timeout_s: int
    """Time after which Kubernetes ends the task."""
    retries: int
    """Attempts after a lost pod; Kubeflow Pipelines 2.16 makes them after any failure. Temporary failures are retried
    within the task."""
    secrets: tuple[str, ...] = ()
    cached: bool = False
    """Whether Kubeflow may reuse the outputs of an earlier task with the same inputs: never for training, evaluation
    and registration."""
    model: bool = False
    """Whether it runs a model itself, on a GPU."""
    volume: bool = True
    """Whether it mounts the shared volume."""


_HOUR_S = 3600
_DATA = Resources(("1", "2"), ("4G", "8G"), 4 * _HOUR_S, 2, cached=True, secrets=("git", "hub", "storage"))
# Starts a job and watches it; a retry adopts the running job, and several nodes may be lost in weeks of training. The
# timeout is longer than all limits of the job together.
_LAUNCH = Resources(("500m", "2"), ("2G", "4G"), LONGEST_TRAINING_S, 10, secrets=("hub", "tracking"))
# Also pushes checkpoints to the registry.
_LAUNCH_GRPO = replace(_LAUNCH, secrets=("git", "hub", "storage", "tracking"))
RESOURCES = {
    # A second try would find the same. The time includes pulling the image, so that a run whose image is missing fails
    # within two minutes.
    "preflight": Resources(("500m", "1"), ("1G", "2G"), 100, 0, volume=False, secrets=tuple(SECRET_KEYS)),
    "prepare_data": _DATA,
    "validate_data": _DATA,
    "train_sft": _LAUNCH,
    "train_grpo": _LAUNCH_GRPO,
    "evaluate": Resources(EVALUATION_CPU, None, 72 * _HOUR_S, 2, model=True, secrets=("hub",)),
    "report": Resources(("1", "2"), ("2G", "4G"), _HOUR_S, 1, secrets=("git", "storage")),
    # A retry would miss the gate again, and Kubeflow does not distinguish failures.
    "register": Resources(("1", "2"), ("4G", "8G"), 6 * _HOUR_S, 0, secrets=("git", "model_registry", "storage")),
}
"""Cores, memory, time limits, retries and caching of each task: change them here."""

_HEAD = """\
# Compiled from pipelines/graph.py; not to be edited, and not to be uploaded by hand: `grpo-pipeline publish` uploads it
# with images that the nodes of a cluster can pull (docs/how-to/kubeflow-ui.md).
"""
_SHM = "16Gi"
"""Size of /dev/shm in a task that runs a model, part of its memory limit; the default is 64 MiB."""
_RETRY_WINDOW_S = 3 * 365 * 24 * _HOUR_S
"""Argo's deadline for all attempts of a task together, from the start of the first: longer than their own limits. Argo
reads 0 as no time at all, and KFP's default is an hour."""
_RUN_ID_LABEL = "metadata.labels['pipeline/runid']"
"""Label of each pod with the id of its run. Pods do not have the run's name: it is passed as a parameter."""


def cluster_graph(params: Params) -> GraphComponent:
    """Return the graph for a cluster, whose form has the values of `params`; keys without a field are compiled in."""
    defaults, deployment = form_of(params), params.deployment

    def graph(*values: Any) -> None:  # a value for each field of the form, whose signature is set below
        form = dict(zip(parameters(), values, strict=True))
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        compiled_in = {DEPLOYMENT: deployment.model_dump(mode="json"), PRESET: defaults[PRESET]}
        checked = preflight(**form, **compiled_in)
        sections = {stage: checked.outputs[f"{stage}_config"] for stage in STAGES}
        run_name = dsl.PIPELINE_JOB_NAME_PLACEHOLDER
        launch = {"cluster": checked.outputs["cluster_config"], "run_id": run_id, "run_name": run_name}
        place = {"volume": MOUNT, "run_id": run_id, "run_name": run_name}
        tasks = stages(sections, checked.outputs["unchanged"], launch=launch, place=place, run_name=run_name)
        for name, task in {"preflight": checked, **tasks}.items():
            _set_resources(RESOURCES[name], name, task, params, checked.outputs)

    # KFP reads the form from the signature and the docstring; both come from the config models.
    form = parameters().items()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(name, kind, default=defaults[name], annotation=each.type) for name, each in form]
    graph.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    graph.__doc__ = "\n".join([DESCRIPTION, "", "Args:", *(f"    {name}: {each.description}" for name, each in form)])
    compiled = dsl.pipeline(name=NAME)(graph)
    # All later stages depend on prepare_data: where it is skipped, they are not reached, and the run succeeds. `dsl.If`
    # cannot say so: tasks within it cannot take the GPUs and node labels of evaluation from preflight.
    first = compiled.pipeline_spec.root.dag.tasks["prepare-data"]
    first.trigger_policy.condition = "inputs.parameter_values['unchanged'] == false"
    fields = compiled.pipeline_spec.root.input_definitions.parameters
    for name, each in form:
        # `literals` make the page offer a choice. KFP's compiler does not know them; its page does since 2.17.
        for choice in (False, True) if each.type is bool else ():
            fields[name].literals.add(bool_value=choice)
    return compiled


def compile_graph(params: Path, output: Path) -> None:
    """Write the graph whose form opens with the values of a params file, and print where it is."""
    if output.suffix not in (".yaml", ".yml") or output.is_dir():
        raise PipelineError(f"--output {output}: should be a file whose name ends in .yaml")
    write(output, load_params(params))
    print(output)


def write(path: Path, params: Params) -> None:
    """Write the compiled graph for a cluster: equal code, params and images give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    compiler.Compiler().compile(cluster_graph(params), str(path))
    # KFP writes a comment with the defaults first, each time in another order.
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    document = itertools.dropwhile(lambda line: line.startswith("#"), lines)
    path.write_text(_HEAD + "".join(document), encoding="utf-8")


def _set_resources(
    resources: Resources, name: str, task: dsl.PipelineTask, params: Params, checked: Mapping[str, Any]
) -> None:
    """Set the resources of a task; `checked` are the outputs of preflight, with the resources of the evaluation."""
    deployment = params.deployment
    memory = resources.memory or (checked["evaluate_memory"], checked["evaluate_memory"])
    task.set_cpu_request(resources.cpu[0]).set_cpu_limit(resources.cpu[1])
    task.set_memory_request(memory[0]).set_memory_limit(memory[1])
    task.set_caching_options(resources.cached)
    image = deployment.image_gpu if resources.model else deployment.image_light
    task.set_container_image(image).set_env_variable(IMAGE_VARIABLE, image)
    if resources.retries:
        window = f"{_RETRY_WINDOW_S}s"
        task.set_retry(resources.retries, backoff_duration="30s", backoff_factor=1, backoff_max_duration=window)
    kubernetes.set_timeout(task, resources.timeout_s)
    kubernetes.set_image_pull_secrets(task, [deployment.image_pull_secret])
    kubernetes.add_pod_label(task, "app.kubernetes.io/managed-by", "grpo-pipeline")
    kubernetes.add_pod_label(task, "grpo-pipeline/task", name.replace("_", "-"))
    for kind in resources.secrets:
        keys = {key: key for key in (*SECRET_KEYS[kind], *OPTIONAL_SECRET_KEYS.get(kind, ()))}
        kubernetes.use_secret_as_env(task, getattr(deployment.secrets, kind), keys, optional=True)
    kubernetes.set_security_context(task, run_as_non_root=True)
    kubernetes.use_field_path_as_env(task, RUN_ID_VARIABLE, _RUN_ID_LABEL)
    if resources.volume:
        kubernetes.mount_pvc(task, deployment.volume, MOUNT)
    if resources.model:
        task.set_accelerator_type(GPU_RESOURCE).set_accelerator_limit(checked["evaluate_gpus"])
        kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=_SHM)
        kubernetes.add_toleration_json(task, checked["evaluate_tolerations"])
        kubernetes.add_node_selector_json(task, checked["evaluate_node_selector"])
