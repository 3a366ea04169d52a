import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params, advisories, contradictions, load_params
from components.preflight.inputs import unusable_rewards
from components.register.checks import list_storage
from components.register.config import RegisterConfig
from components.shared.errors import PipelineError, RetryableError
from components.shared.model import context_tokens
from pipelines.cli import main
from pipelines.requirements import missing_here
from tests.presets import FILES, preset, write_params
from tests.register.storage_servers import BUCKET, s3_server

GSM8K = {"kind": "gsm8k", "train": "train.jsonl", "test": "test.jsonl"}
WORDS = preset()["prepare_data"]["sources"][0]
WEIGHTS = "train_grpo.prompts.source_weights"
OBSERVATION, TURN = "an Observation is expected", ", at a made-up turn of the first problems"
Values = dict[str, Any]


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Values:
    """The smoke preset, to be changed, for a run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return preset()


def _put(values: Values, changes: Values) -> Params:
    for key, value in changes.items():
        place = values
        *parents, last = key.split(".")
        for part in parents:
            place = place[part]
        place[last] = value
    return Params.model_validate(values)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_shipped_preset_contradicts_itself(path: Path) -> None:
    """What is shipped can start, given its data and model."""
    params = load_params(path)
    assert contradictions(params) + advisories(params) == []


CODE = "word_problems have no unit tests; leave it out, `accuracy` judges both kinds"


def test_keys_of_two_sections_that_contradict_one_another_are_named(values: Values) -> None:
    """Each by the key to change, with what would be accepted."""
    changes = {
        "report.gate.target": ["gsm8k"],
        "train_grpo.validation": {"every_steps": 5},
        "validate_data.min_train_rows": 401,
        "validate_data.min_test_rows": 61,
        "train_grpo.prompts_per_step": 500,
        WEIGHTS: {"word_problems": 1.0, "math": 1.0},
        "train_grpo.reward.weights": {"code_tests": 1.0, "environment": 1.0},
        "train_grpo.reward.by_source": {"maths": {"environment": 1.0}},
        "train_grpo.reward.supervision": "turn",
        **{f"{stage}.model.prompts": {"maths": "{question}"} for stage in ("train_sft", "validate_data")},
        "evaluate.protocol": "math-4shot",
        "train_grpo.sampler.vllm": {"max_tokens": 71},
    }
    assert contradictions(_put(values, changes)) == [
        'report.gate.target: no test problem comes from "gsm8k"; sources with test problems: word_problems',
        f"{WEIGHTS}.math: not a source of train problems (null removes it); sources: word_problems",
        "train_grpo.reward.by_source.maths: not a source of train problems (null removes it); sources: word_problems",
        'train_sft.model.prompts: no problem comes from "maths"; sources: word_problems',
        "validate_data.min_train_rows: is 401, and prepare_data.sources has at most 400 train problems",
        "validate_data.min_test_rows: is 61, and prepare_data.sources has at most 60 test problems",
        "train_grpo.prompts_per_step: is 500, and prepare_data.sources has at most 400 train problems",
        f"train_grpo.reward.weights.code_tests: problems from {CODE}",
        "train_grpo.reward.weights.environment: needs an environment: set train_sft.model.tools, or remove this key",
        "train_grpo.reward.supervision: needs an environment: set train_sft.model.tools, or remove this key",
        "train_grpo.validation: no source has dev problems; hold some out, such as `dev_fraction: 0.05` "
        "(`num_dev: 200` of word_problems) in one of prepare_data.sources, or set train_grpo.validation: null",
        "train_grpo.sampler.vllm.max_tokens: is 71; a prompt (validate_data.max_prompt_tokens) with its completion "
        "(train_grpo.sampling.max_new_tokens) takes up to 72",
        "evaluate.protocol: math-4shot asks problems from math or math500, and word_problems has test problems, too",
        "evaluate.protocol: math-4shot shows solved examples, and no train problem comes from math or math500",
    ]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"prepare_data.sources": [{"kind": "gsm8k", "train": "a"}]},
            [
                "prepare_data.sources: no source has test problems; set `test`, `test_fraction` or `num_test` of one",
                'report.gate.target: no test problem comes from "word_problems"; sources with test problems: none',
            ],
        ),
        # A source whose file alone decides how many problems it has contradicts no number.
        ({"prepare_data.sources": [WORDS, GSM8K], "validate_data.min_train_rows": 100_000}, []),
        (
            {"prepare_data.sources": [WORDS, GSM8K | {"train_limit": 1_000}], "validate_data.min_train_rows": 100_000},
            ["validate_data.min_train_rows: is 100,000, and prepare_data.sources has at most 1,400 train problems"],
        ),
        (
            {"train_grpo.reward.by_source": {"word_problems": {"code_tests": 1.0}}},
            [f"train_grpo.reward.by_source.word_problems.code_tests: problems from {CODE}"],
        ),
        (
            {"prepare_data.sources": [{"kind": "dataset", "train": "a.csv", "name": "sums"}, WORDS], WEIGHTS: {"a": 1}},
            [
                f"{WEIGHTS}.a: not a source of train problems (null removes it); sources: sums, word_problems",
                f'{WEIGHTS}: "sums" has train problems and no weight; give it one (0 leaves it out)',
                f'{WEIGHTS}: "word_problems" has train problems and no weight; give it one (0 leaves it out)',
            ],
        ),
        ({"train_grpo.sampler.vllm": {"max_tokens": 72}}, []),
    ],
)
def test_sources_and_limits_decide_what_contradicts(values: Values, changes: Values, lines: list[str]) -> None:
    """By the splits, sizes and names of sources, and to the token."""
    assert contradictions(_put(values, changes)) == lines


def test_settings_without_effect_are_named(values: Values) -> None:
    """A limit or patience that needs more steps, and a schedule that ends where it begins."""
    values["train_grpo"] |= {"schedule": "cosine", "final_learning_rate_fraction": 0.5, "warmup_steps": 0}
    values["train_grpo"]["limits"] = {"min_entropy": 0.1, "over_steps": 2}
    values["train_grpo"]["validation"] = {"every_steps": 1, "patience": 1}
    assert advisories(Params.model_validate(values)) == []
    lines = advisories(_put(values, {"train_grpo.num_steps": 2, "train_grpo.final_learning_rate_fraction": 1.0}))
    assert [line.partition(":")[0] for line in lines] == [
        f"train_grpo.{k}" for k in ("limits", "validation", "schedule")
    ]


def test_enforced_gate_without_power_is_refused_and_another_one_doubted(values: Values, tmp_path: Path) -> None:
    """By the problems in the files where they are at hand, else by those that were published."""
    files = {"train": "train.jsonl", "test": "test.jsonl"}
    (tmp_path / "test.jsonl").write_text("{}\n" * 100)
    changes = {"prepare_data.sources": [{"kind": "gsm8k", **files}], "report.gate.target": ["gsm8k"]}
    changes |= {"report.gate.max_p_value": 0.05, "report.gate.expected_gain": 0.05, "report.gate.enforce": True}
    params = _put(values, changes)
    (line,) = contradictions(params, tmp_path)
    assert line.startswith("report.gate: a policy that gains +5.0 points (expected_gain) would pass with a probability")
    assert "28" in line
    assert contradictions(params) == advisories(params) == advisories(params, tmp_path) == []
    for change in ({"report.gate.power": "warn"}, {"report.gate.enforce": False}):
        each = _put(values, change)
        assert contradictions(each, tmp_path) == []
        assert advisories(each, tmp_path) == [line.removesuffix("; report.gate.power: warn runs it all the same")]
    some = _put(values, {"evaluate.limit": 100, "report.gate.enforce": True, "report.gate.power": "refuse"})
    assert contradictions(some) == [line]


def test_everything_that_a_run_lacks_is_named_at_once(
    values: Values, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate, data, the model, rewards and the registry, a line each with its key; and no trace of a run is left."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("judge").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("judge", name).write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    Path("my_rewards.py").write_text("def brevity(problem, completion, grade):\n    return 0.0\n")
    Path("broken_rewards.py").write_text("raise SystemExit(0)\n")
    Path("test.jsonl").write_text("{}\n")
    del values["validate_data"]["model"]
    names = ("my_rewards:brevity", "my_rewards:bervity", "broken_rewards:any", "reward_model")
    changes = {
        "prepare_data.sources": [GSM8K],
        "train_sft.model.base": "nobody/no-such-model",
        "train_grpo.reward.weights": dict.fromkeys(names, 1.0),
        **{f"train_grpo.{key}": {"base": "judge"} for key in ("reward.model", "teacher")},
        "register.registry": f"file://{Path.cwd()}/no-registry",
    }
    _put(values, changes)
    write_params(Path("mine.yaml"), values)
    assert main(["run", "--params", "mine.yaml"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "error: 10 problems to correct before this run can start"
    assert sorted(line.split(": ")[1] for line in lines) == [
        *("prepare_data.sources.0.test", "prepare_data.sources.0.train", "register.registry", "register.storage"),
        *("report.gate.target", "train_grpo.reward.model.base", "train_grpo.reward.weights.broken_rewards:any"),
        *("train_grpo.reward.weights.my_rewards:bervity", "train_grpo.teacher.base", "train_sft.model.base"),
    ]
    assert all(any(text in line for line in lines) for text in ("judge: is a Qwen2For", "model.safetensors: cannot be"))
    assert not Path("outputs").exists()


def test_rewards_are_called_once_before_the_first_stage(values: Values) -> None:
    """Here: what raises, or returns no number, is named, as is a judge; NaN is right if there is no answer."""
    Path("my_rewards.py").write_text(
        "from components.train_grpo.rewards import group_reward, step_reward\n"
        "def raises(problem, completion, grade):\n    raise ValueError('two\\nlines')\n"
        "async def text(problem, completion, grade):\n    return 'good'\n"
        "@group_reward\ndef one(problem, completions, grades):\n    return [1.0]\n"
        "@step_reward\ndef fine(problem, steps, grade):\n    return [len(step) for step in steps]\n"
        "@step_reward\ndef few(problem, steps, grade):\n    return [1.0, 1.0]\n"
        "def digits(problem, completion, grade):\n    return 1.0 if grade.verdict == 'right' else float('nan')\n"
    )
    names = [f"my_rewards:{name}" for name in ("raises", "text", "one", "fine", "few", "digits")]
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    weights = dict.fromkeys([*names, "judge"], 1.0)
    params = _put(values, {"train_grpo.reward": {"weights": weights, "judge": judge, "supervision": "process"}})
    few, one, raises, text, asked = unusable_rewards(params, trained_here=True)
    assert "2 for 3 steps" in few
    assert "1 for 2 completions" in one
    assert "raised ValueError: two lines (my_rewards.py, line 3)" in raises
    assert "my_rewards:text: reward my_rewards:text raised ValueError" in text
    assert asked.startswith("train_grpo.reward.judge: ")
    assert unusable_rewards(params, trained_here=False) == []
    assert "few rewards each" in unusable_rewards(_put(values, {"train_grpo.reward.supervision": "outcome"}))[0]
    for key, section in {"teacher": {"base": "x", "server": "http://x:8000/v1"}, "reward.judge": judge}.items():
        params = _put(values, {f"train_grpo.{key}": {**section, "key_variable": "NOT_SET"}})
        (line,) = unusable_rewards(params, trained_here=False)
        assert line == f"train_grpo.{key}.key_variable: the environment has no NOT_SET"


@pytest.mark.parametrize("section", ["train_sft.model.tools", "evaluate.tools"])
@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        ("search", {"file": "no.jsonl"}, "arguments.file: no.jsonl: no such file"),
        ("my_games:Maze", {"depth": 3}, "arguments.depth: no such argument; accepted: size"),
        ("my_games:Maze", {"size": 2}, f"environment: my_games:Maze: raised KeyError: 2 (my_games.py, line 5){TURN}"),
        ("my_games:Maze", {"size": 4}, f"environment: my_games:Maze: step returned None, where {OBSERVATION}{TURN}"),
        ("my_games:Maze", {"size": 3}, None),
    ],
)
def test_an_environment_that_cannot_be_used_is_reported(
    values: Values, section: str, environment: str, arguments: Values, line: str | None
) -> None:
    """Before anything is trained: a missing file, a wrong argument, or a failure in the first turn of a problem."""
    methods = ("__init__(self, size): self.size = size", "reset(self, problem): self.reply = REPLIES[self.size]")
    lines = [*(f"    def {each}" for each in methods), "    def step(self, text): return self.reply"]
    imports = "from components.environments.environment import Observation"
    Path("my_games.py").write_text("\n".join([imports, "REPLIES = {3: Observation(), 4: None}", "class Maze:", *lines]))
    values["validate_data"].pop("model", None)
    tools = {"environment": environment, "arguments": arguments, "max_observation_tokens": 16}
    lines = missing_here(_put(values, {section: tools}))
    assert [each for each in lines if "tools" in each] == ([f"{section}.{line}"] if line else [])


def test_a_package_or_server_that_cannot_be_used_is_named(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker once for both trainings: a package that is missing or a server that does not answer."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "vllm") else find(name))
    assert missing_here(_put(values, {"train_grpo.tracking": {"tensorboard": True}})) == []
    package, server = {"wandb": {"project": "sums"}}, {"mlflow": {"uri": "http://127.0.0.1:9", "experiment": "sums"}}
    both = {"train_sft.tracking": package, "train_grpo.tracking": package | server}
    teacher, servers = {"base": "./none", "server": "http://127.0.0.1:9/v1"}, {"num_servers": 1}
    others = {"train_grpo.teacher": teacher, "train_grpo.sampler.servers": servers}
    text = "\n".join(missing_here(_put(values, both | others)))
    parts = ("tracking.wandb: needs", "servers: needs vLLM", "teacher.server: http", "not installed", "not answer (")
    assert [text.count(part) for part in parts] == [1, 1, 1, 2, 3]


SUMS = {"kind": "dataset", "train": "sums.csv", "test_fraction": 0.2, "columns": {"question": "q", "answer": "a"}}
WITHOUT_SFT = {"train_sft.num_steps": 0, "train_sft.warmup_steps": 0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"columns": {}}, "sums.csv: none of its first 20 rows can be used; sums.csv:2: has no question (`question`"),
        ({"columns": {"question": "q", "answer": "b"}}, "sums.csv:2: no column `b`; columns: q, a, steps"),
        ({"train": "sums.xlsx"}, "sums.xlsx: is of no format that can be read; accepted: JSON lines (.jsonl)"),
        ({"train": "someone/sums"}, "someone/sums: neither a file or folder here nor a dataset of the hub"),
    ],
)
def test_dataset_is_refused_before_anything_runs(values: Values, changes: Values, line: str | None) -> None:
    """By what is in its first rows, with the columns and formats that there are; one good row among them is enough."""
    Path("sums.csv").write_text("q,a,steps\nWhat is 1 + 1?,2,#### 2\n" + 30 * ",,\n")
    Path("sums.xlsx").write_bytes(b"PK\x03\x04")
    solved = {"columns": {"question": "q", "answer": "a", "solution": "steps"}}
    lines = missing_here(_put(values, {"prepare_data.sources": [SUMS | solved | changes]}))
    lines = [each for each in lines if not each.startswith("train_sft.num_steps")]
    assert [each.startswith("prepare_data.sources.0.train: ") for each in lines] == [True] * (line is not None)
    assert line is None or line in lines[0]


@pytest.mark.parametrize(
    ("before", "answer", "line"),
    [
        ([], "He has {} apples.", '20 of 20 answers cannot be graded: "He has 1 apples." (wrong; sums/train/00000), '),
        ([], "{} apples", None),
        ([{"role": "system", "content": "Add."}], "{}", "from sums follows other messages (system), which need a chat"),
    ],
)
def test_problems_that_cannot_be_used_are_named(values: Values, before: Any, answer: str, line: str | None) -> None:
    """Validation would refuse them; a unit or a currency is no reason."""
    rows = [{"q": [*before, {"role": "user", "content": f"{n} and 1?"}], "a": answer.format(n + 1)} for n in range(100)]
    Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = missing_here(_put(values, {"prepare_data.sources": [SUMS | {"train": "sums.jsonl"}], **WITHOUT_SFT}))
    assert [line is not None and line in each for each in lines] == [True] * (line is not None)


def test_fine_tuning_on_problems_without_solutions_is_refused(values: Values) -> None:
    """There is nothing to imitate; without fine-tuning, or beside a source with solutions, they are welcome."""
    Path("sums.csv").write_text("q,a\n1 + 1?,2\n")
    (line,) = missing_here(_put(values, {"prepare_data.sources": [SUMS]}))
    assert line.startswith("train_sft.num_steps: no train problem has a solution to imitate; set train_sft.num_steps:")
    assert missing_here(_put(values, {"prepare_data.sources": [SUMS, WORDS]})) == []
    assert missing_here(_put(values, {"prepare_data.sources": [SUMS], **WITHOUT_SFT})) == []


def test_limits_beyond_what_the_base_model_reads_are_named(values: Values) -> None:
    """A model made from scratch has its limit in its preset; an environment of evaluation alone has other limits."""
    assert missing_here(_put(values, {"evaluate.max_new_tokens": 465, "train_sft.max_tokens": 513})) == [
        "evaluate.max_new_tokens: 465 tokens after a prompt of up to 48 (validate_data.max_prompt_tokens) are more "
        "than the 512 that scratch:tiny reads",
        "train_sft.max_tokens: is 513, and scratch:tiny reads 512 tokens",
    ]
    assert missing_here(_put(values, {"evaluate.max_new_tokens": 464, "train_sft.max_tokens": 512})) == []
    tools = {"environment": "calculator", "max_turns": 3, "max_observation_tokens": 32}
    models = {f"{stage}.model.tools": tools for stage in ("train_sft", "validate_data")}
    longer = {"evaluate.max_new_tokens": 337, "evaluate.tools": {**tools, "max_turns": 5}}
    assert missing_here(_put(values, {**longer, **models})) == [
        "evaluate.max_new_tokens: 337 tokens after a prompt of up to 48 (validate_data.max_prompt_tokens) and 4 "
        "answers of the environment of up to 32 (evaluate.tools.max_observation_tokens) are more than the 512 that "
        "scratch:tiny reads"
    ]
    assert missing_here(_put(values, {**longer, **models, "evaluate.max_new_tokens": 336})) == []


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 8.0}}, None),
    ],
)
def test_the_context_of_a_model_is_read_from_its_config(
    tmp_path: Path, config: dict[str, Any], tokens: int | None
) -> None:
    """Under the names of several families, where it is certain; half a model is refused."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(json.dumps(config))
    assert context_tokens(str(tmp_path)) == tokens
    for name, problem in {"model.safetensors": "holds no weights", "config.json": r"holds no config\.json"}.items():
        (tmp_path / name).unlink()
        with pytest.raises(PipelineError, match=problem):
            context_tokens(str(tmp_path))


@pytest.mark.slow
def test_storage_is_asked_with_the_credentials_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real S3 server at an address from the environment: right and wrong secrets, and a bucket that is not there."""
    config = RegisterConfig(registry=str(tmp_path / "new"), storage=f"s3://{BUCKET}/versions")
    refused = f"{config.storage}: cannot be listed: "
    with s3_server(tmp_path / "s3") as server:
        for name, value in {**server.credentials, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)
        assert list_storage(config) == []
        with pytest.raises(PipelineError, match=r"s3://nosuch: cannot be listed: .*bucket does not exist"):
            list_storage(config.model_copy(update={"storage": "s3://nosuch"}))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(PipelineError, match=f"{refused}.*credentials"):
            list_storage(config)
    with pytest.raises(RetryableError, match=f"{refused}Could not connect"):
        list_storage(config)
