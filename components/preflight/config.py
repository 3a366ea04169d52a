"""What preflight checks: every section of the params file as one typed object, and the names of secrets."""

import warnings

from pydantic import model_validator

from components.evaluate.config import EvaluateConfig
from components.prepare_data.config import PrepareConfig
from components.register.config import RegisterConfig
from components.report.config import ReportConfig
from components.shared.config import Config
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
        train_grpo: TrainGRPOConfig
        evaluate: EvaluateConfig
        report: ReportConfig
        register: RegisterConfig

        @model_validator(mode="after")
        def _lengths_are_checked_with_the_model_that_is_trained(self) -> "Params":
            if self.validate_data.model != self.train_sft.model:
                raise ValueError("validate_data.model and train_sft.model must be the same")
            return self
