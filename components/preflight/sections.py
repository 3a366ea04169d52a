"""The sections that a form means, checked one by one, so that everything wrong with them is known at once."""

from typing import Any

from components.cluster.config import ClusterConfig
from components.preflight.config import LONGEST_TRAINING_S, Params
from components.preflight.form import CLUSTER, KEYS, PREFIX, Form
from components.preflight.inputs import REWARD_MODEL, base_models, contradictions, limits, own_rewards
from components.prepare_data.config import PrepareConfig
from components.shared import config
from components.shared.config import problems
from components.shared.errors import PipelineError
from components.train_grpo import own_reward

_MARGIN_S = 3600
"""Time that a step has beyond its job's: to be scheduled, and to collect what the job left."""
_PARAMETERS = {".".join(key): name for name, keys in KEYS.items() for key in keys}


def wrong_sections(sections: config.Params) -> list[str]:
    """Return a line for each thing that is wrong, by the parameter of the form that it comes from."""
    models: dict[str, Any] = {
        **{name: field.annotation for name, field in Params.model_fields.items()},
        CLUSTER: ClusterConfig,
    }
    lines = [f"{PREFIX}{name}: there is no such section" for name in sections if name not in models]
    for name, model in models.items():
        lines += [_in_the_form(line) for line in problems(model, sections.get(name, {}), name=name)]
    if lines:
        return list(dict.fromkeys(lines))
    return problems(Params, _stages(sections), name="") + _too_long(ClusterConfig.model_validate(sections[CLUSTER]))


def without_files(form: Form, sections: config.Params) -> list[str]:
    """Return a line where valid sections read files of no repository, or name a repository for nothing."""
    files = PrepareConfig.model_validate(sections["prepare_data"]).files
    if files and not form["data_repository"]:
        return [f"data_repository: {files[0]} is read from a git and DVC repository; name it, with data_revision"]
    if form["data_repository"] and not files:
        return ["data_repository: no source in section_prepare_data reads a file; leave it empty, or name files there"]
    return []


def contradicting(sections: config.Params) -> list[str]:
    """Return a line for each pair of keys of valid sections that cannot both hold."""
    return [_in_the_form(line) for line in contradictions(Params.model_validate(_stages(sections)))]


def rewards(sections: config.Params) -> list[str]:
    """Return a line for each of the user's own rewards, in valid sections, that cannot be loaded."""
    params = Params.model_validate(_stages(sections))
    return [_in_the_form(line) for line in own_reward.unusable(own_rewards(params.train_grpo), trained_here=False)]


def models(sections: config.Params) -> list[str]:
    """Return a line for each model of valid sections that is not there, and each limit beyond what one reads.

    Those in folders of the volume, which preflight does not see, are assumed to be there.
    """
    params, lines = Params.model_validate(_stages(sections)), []
    for key, check in base_models(params).items():
        try:
            context = None if _is_folder(params, key) else check()
        except PipelineError as error:
            lines.append(f"{key}: {error}")
        else:
            lines += limits(params, context) if isinstance(context, int) else []
    return [_in_the_form(line) for line in lines]


def _is_folder(params: Params, key: str) -> bool:
    judge = params.train_grpo.reward.model
    base = judge.base if judge and key == REWARD_MODEL else params.train_sft.model.base
    return base.startswith(("/", "."))


def complete(sections: config.Params) -> config.Params:
    """Return valid sections as the stages get them: typed, and without what is null, for which KFP has no value."""
    typed = {**dict(Params.model_validate(_stages(sections))), CLUSTER: ClusterConfig.model_validate(sections[CLUSTER])}
    return {name: section.model_dump(mode="json", exclude_none=True) for name, section in typed.items()}


def _stages(sections: config.Params) -> config.Params:
    return {name: section for name, section in sections.items() if name != CLUSTER}


def _in_the_form(line: str) -> str:
    """A line about a key, named as the person who filled the form in knows it."""
    key, _, rest = line.partition(": ")
    return f"{_PARAMETERS.get(key, PREFIX + key)}: {rest}"


def _too_long(cluster: ClusterConfig) -> list[str]:
    longest = LONGEST_TRAINING_S - _MARGIN_S
    if cluster.deadline_s <= longest:
        return []
    return [
        f"section_cluster: the time limits add up to {cluster.deadline_s:.0f} s over all restarts; "
        f"accepted: {longest} s, after which the step itself is ended"
    ]
