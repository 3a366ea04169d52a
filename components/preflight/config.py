"""What preflight checks: every section of the params file as one typed object, and the names of secrets."""

import warnings
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from components.evaluate.config import EvaluateConfig
from components.prepare_data.config import PrepareConfig
from components.register.config import RegisterConfig
from components.report.config import ReportConfig
from components.shared.config import Config, problems, read_params, with_shared_keys
from components.shared.errors import raise_all
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from components.validate_data.config import ValidateConfig

MOUNT = "/work"
"""Folder at which every pod of a run has the shared volume."""

SECRET_KEYS = {
    "git": ("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0"),
    "hub": ("HF_TOKEN",),
    "model_registry": ("MODEL_REGISTRY_TOKEN",),
    "storage": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
}
"""Keys of each secret that a run may name; a task has them as environment variables of the same name.

Git reads its three as a setting, such as `http.https://git.example/.extraHeader` with a header that authorises.
"""

SECRET_NAMES = {f"secret_{kind}": f"grpo-pipeline-{kind.replace('_', '-')}" for kind in SECRET_KEYS}
"""Names of the secrets where a run does not say otherwise; these may be missing, where they are not needed."""

LONGEST_TRAINING_S = 60 * 24 * 3600
"""Time after which Kubernetes ends the step of a training job, whatever the job's own limits are."""

with warnings.catch_warnings():
    # Every pydantic model has a class method `register`, from abc; the stage's name is more use here.
    warnings.filterwarnings("ignore", message='Field name "register"')

    class Params(Config):
        """A section per stage, in the order in which they run."""

        prepare_data: PrepareConfig
        validate_data: ValidateConfig
        train_sft: TrainSFTConfig
        train_grpo: TrainGRPOConfig = TrainGRPOConfig()
        evaluate: EvaluateConfig = EvaluateConfig()
        report: ReportConfig
        register: RegisterConfig = RegisterConfig()

        @model_validator(mode="before")
        @classmethod
        def _sections_share_keys(cls, sections: Any) -> Any:
            if not isinstance(sections, dict):
                return sections
            models: dict[str, Any] = {name: field.annotation for name, field in cls.model_fields.items()}
            shared = {name: with_shared_keys(model, sections.get(name, {}), sections) for name, model in models.items()}
            return {**sections, **{name: section for name, section in shared.items() if section or name in sections}}

        @model_validator(mode="after")
        def _lengths_are_checked_with_the_model_that_is_trained(self) -> "Params":
            if self.validate_data.model != self.train_sft.model:
                raise ValueError("validate_data.model and train_sft.model must be the same")
            return self


def load_params(path: Path) -> Params:
    """Return the validated params in a file; a PipelineError names all that is wrong with them."""
    values = read_params(path)
    wrong = problems(Params, values, name="", path=path)
    if "model" not in values.get("validate_data", {}):  # then it is named where it stands
        wrong = [line for line in wrong if ": validate_data.model" not in line]
    raise_all(wrong)
    return Params.model_validate(values)


def resolved(path: Path) -> dict[str, dict[str, Any]]:
    """Return every section of a params file in full, as the stages get it: as JSON, without nulls, which KFP lacks."""
    return load_params(path).model_dump(mode="json", exclude_none=True)


def as_yaml(params: Params) -> str:
    """Return params as the text of a params file that extends nothing and leaves nothing to defaults."""
    text: str = yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text
