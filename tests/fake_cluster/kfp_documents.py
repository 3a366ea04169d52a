"""What Kubeflow Pipelines accepts as a pipeline, as the parameters of a run, and as a schedule."""

from typing import Any

import yaml

from tests.fake_cluster.cron import is_cron
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Request

_KINDS: dict[str, tuple[Any, str]] = {
    "NUMBER_INTEGER": ((int, float), "double or integer"),
    "NUMBER_DOUBLE": ((int, float), "double or integer"),
    "STRING": (str, "string"),
    "BOOLEAN": (bool, "bool"),
    "LIST": (list, "list"),
    "STRUCT": (dict, "struct"),
}
_PARTS = ("pipelineInfo", "root", "schemaVersion", "components", "deploymentSpec")


def uploaded(request: Request) -> Json:
    """The pipeline in an upload's form.

    Raises:
        ApiError: It holds none.
    """
    boundary = request.headers.get("content-type", "").partition("boundary=")[2].encode()
    for part in request.body.split(b"--" + boundary) if boundary else []:
        head, _, content = part.partition(b"\r\n\r\n")
        if b'name="uploadfile"' in head:
            return packed(content.rstrip(b"\r\n"))
    raise ApiError(400, "Failed to read pipeline from file: http: no such file")


def packed(content: bytes) -> Json:
    """The pipeline in a YAML file with its two documents."""
    try:
        documents = [each for each in yaml.safe_load_all(content.decode()) if each]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ApiError(400, f"Failed to create a pipeline: invalid YAML: {error}") from None
    specs = [each for each in documents if isinstance(each, dict) and "pipelineInfo" in each]
    platforms = [each for each in documents if isinstance(each, dict) and "platforms" in each]
    if len(specs) != 1 or len(specs) + len(platforms) != len(documents):
        raise ApiError(400, "unknown template format: pipeline spec is invalid")
    return checked({"pipeline_spec": specs[0], **({"platform_spec": platforms[0]} if platforms else {})})


def checked(pipeline: Any) -> Json:
    """A pipeline with both its documents, as `{pipeline_spec, platform_spec}`.

    The real server takes one without the second document, and its pods then go without volumes, secrets and
    tolerations: nothing here is ever meant to be sent so, and it is refused.

    Raises:
        ApiError: It is none.
    """
    spec = pipeline.get("pipeline_spec") if isinstance(pipeline, dict) else None
    if not isinstance(spec, dict) or any(part not in spec for part in _PARTS):
        raise ApiError(400, "unknown template format: pipeline spec is invalid")
    if not spec["pipelineInfo"].get("name"):
        raise ApiError(400, "invalid v2 pipeline spec: name is empty")
    platforms = (pipeline.get("platform_spec") or {}).get("platforms", {})
    known = spec["deploymentSpec"].get("executors", {})
    if not platforms.get("kubernetes", {}).get("deploymentSpec", {}).get("executors"):
        raise ApiError(400, "the pipeline has no document with platforms.kubernetes: it was lost on the way")
    for name in platforms["kubernetes"]["deploymentSpec"]["executors"]:
        if name not in known:
            raise ApiError(400, f"platforms.kubernetes names an executor that is not there: {name}")
    found: Json = pipeline
    return found


def check_parameters(pipeline: Json, given: Json) -> None:
    """Refuse parameters that a pipeline does not have, lacks, or has of another type.

    Raises:
        ApiError: 400.
    """
    inputs = pipeline["pipeline_spec"]["root"].get("inputDefinitions", {}).get("parameters", {})
    unknown = sorted(set(given) - set(inputs))
    if unknown:
        raise ApiError(400, f"parameter(s) provided are not required by pipeline: {', '.join(unknown)}")
    for name, definition in inputs.items():
        if name in given:
            _check_type(name, definition["parameterType"], given[name])
        elif not definition.get("isOptional") and "defaultValue" not in definition:
            raise ApiError(
                400, f"parameter {name} is not optional, yet has neither default value nor user provided value"
            )


def _check_type(name: str, type_: str, value: Any) -> None:
    accepted, called = _KINDS[type_]
    if not isinstance(value, accepted) or (isinstance(value, bool) and type_ != "BOOLEAN"):
        raise ApiError(
            400, f"input parameter {name} requires type {called}, but the parameter value is not of {called} value type"
        )


def check_schedule(recurring: Json) -> None:
    """Refuse a recurring run that the scheduler could not follow.

    Raises:
        ApiError: 400.
    """
    most = int(recurring.get("max_concurrency") or 0)
    if not 1 <= most <= 10:
        raise ApiError(
            400, f"The max concurrency of the recurring run must be between 1 and 10 (inclusive). Found {most}"
        )
    trigger = recurring.get("trigger") or {}
    cron, period = trigger.get("cron_schedule") or {}, trigger.get("periodic_schedule") or {}
    if cron.get("cron") and not is_cron(cron["cron"]):
        raise ApiError(400, "Schedule cron is not a supported format(https://godoc.org/github.com/robfig/cron)")
    if not cron.get("cron") and int(period.get("interval_second") or 0) < 1:
        raise ApiError(400, "The recurring run has no trigger: a cron schedule or an interval of a second or more")
