"""What Kubeflow Model Registry is told of a version: where its weights lie, how good it is, what it was made from."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.register.registry import POLICY, VERSION_FILE, Registry, is_url
from components.shared.errors import PipelineError

RUN_ID_VARIABLE = "GRPO_PIPELINE_RUN_ID"
RUN_NAME_VARIABLE = "GRPO_PIPELINE_RUN_NAME"
"""Set in the pod of the step; where there is no Kubeflow run, there are none."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Value = bool | int | float | str


@dataclass(frozen=True)
class Origin:
    """The Kubeflow run that registered a version."""

    run_id: str
    run_name: str
    namespace: str


@dataclass(frozen=True)
class Entry:
    """One version, as the model registry is to know it."""

    name: str
    version: str
    uri: str
    """Where the weights lie for good."""
    policy_digest: str
    properties: Mapping[str, Value]
    """What can be sorted and filtered by: numbers stay numbers."""
    origin: Origin | None


def weights_root(registry: Registry) -> str:
    """Return the address of the storage that holds the weights.

    Raises:
        PipelineError: It is a folder, which nobody finds from another machine.
    """
    url = registry.storage_url()
    if not is_url(url) or url.startswith("file:"):
        raise PipelineError(
            f"register.storage: the weights lie in the folder {url}, which means nothing to those who read the model "
            "registry; name a storage with a URL, such as s3://bucket/models, or leave register.model_registry null"
        )
    return url.rstrip("/")


def entry_of(registry: Registry, version: Mapping[str, Any]) -> Entry:
    """Return what is to be known of a registered version; all of it but the run is read from the version itself."""
    tag = version["tag"]
    md5 = yaml.safe_load(registry.read(tag, f"{POLICY}.dvc"))["outs"][0]["md5"]
    verdict, summary, provenance = (
        json.loads(registry.read(tag, f"{name}.json")) for name in ("verdict", "summary", "provenance")
    )
    return Entry(
        name=version["name"],
        version=version["version"],
        uri=f"{weights_root(registry)}/files/md5/{md5[:2]}/{md5[2:]}",
        policy_digest=version["policy_digest"],
        properties={
            **_scores(verdict, summary),
            **_provenance(summary, provenance),
            "policy_digest": version["policy_digest"],
            "dvc_md5": md5,
            "git_sha": registry.pipeline_commit(tag),
            "registry": json.loads(registry.read(tag, VERSION_FILE))["registry"],
            "registry_tag": tag,
        },
        origin=_origin(os.environ),
    )


def _scores(verdict: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Value]:
    target = verdict["target"]
    scores: dict[str, Value] = {
        f"accuracy_{model}": _accuracy([of_source[source] for source in target["sources"]])
        for model, of_source in summary["models"].items()
    }
    for model, of_source in summary["models"].items():
        for source, score in of_source.items():
            scores[f"accuracy_{model}.{source}"] = float(score["accuracy"])
    return {
        **scores,
        "gain": float(target["gain"]),
        "p_value": float(target["p_value"]),
        "num_test_problems": target["grpo"]["total"],
        "gate_passed": verdict["passed"],
        "target": target["source"],
    }


def _accuracy(scores: list[Mapping[str, Any]]) -> float:
    return float(sum(score["correct"] for score in scores) / sum(score["total"] for score in scores))


def _provenance(summary: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Value]:
    configs = provenance["configs"]
    repository = configs.get("prepare_data", {}).get("repository") or {}
    found = {
        "base_model": configs.get("train_sft", {}).get("model", {}).get("base"),
        "data_repository": repository.get("url"),
        "data_revision": repository.get("commit"),
        "data_digest": summary["digests"].get("problems"),
        "params_digest": summary["digests"].get("params"),
        "code_digest": provenance["code"],
    }
    return {name: value for name, value in found.items() if value}


def _origin(environment: Mapping[str, str]) -> Origin | None:
    run_id = environment.get(RUN_ID_VARIABLE)
    if not run_id:
        return None
    namespace = _NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _NAMESPACE_FILE.is_file() else ""
    return Origin(run_id, environment.get(RUN_NAME_VARIABLE) or run_id, namespace)
