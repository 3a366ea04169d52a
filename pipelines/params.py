"""The whole params file as one typed object, checked before anything runs."""

import warnings
from pathlib import Path

from pydantic import model_validator

from components.evaluate.config import EvaluateConfig
from components.prepare_data.config import PrepareConfig
from components.register.config import RegisterConfig
from components.report.config import ReportConfig
from components.shared.config import Config, read_params, validate
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from components.validate_data.config import ValidateConfig

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


def load(path: Path) -> Params:
    """Return the validated params in a file."""
    return validate(Params, read_params(path), name="", path=path)
