"""A real vLLM server, started once: the tests follow its life, in their order."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint
from components.rollout.sampler import Completion, Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.servers import VllmServers
from components.shared.errors import RetryableError
from tests import tiny
from tests.cluster.processes import ROOT, is_gone, listeners, wait_until
from tests.rollout.vllm_policies import (
    QUESTIONS,
    difference,
    drawn,
    largest_difference,
    policy,
    servers_config,
    trainer_logprobs,
)

pytestmark = pytest.mark.slow


class Run(NamedTuple):
    """A launcher with its server, and the policies that go through it."""

    launcher: "subprocess.Popen[str]"
    url: str
    client: VllmServers
    policies: list[Checkpoint]
    folders: list[Path]
    temporary: Path


def _server(run: Run) -> int:
    """The process that answers requests."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _processes(run.temporary)}
    (server,) = [pid for pid, command in commands.items() if b"api_server" in command and b"watchdog" not in command]
    return server


def _processes(temporary: Path) -> list[int]:
    """The processes that are alive and were started with this folder for their files, or one in it."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={temporary}".encode() in (folder / "environ").read_bytes() and not is_gone(int(folder.name)):
                processes.append(int(folder.name))
    return processes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A launcher in a process of its own, whose server is ready."""
    folder = tmp_path_factory.mktemp("vllm")
    policies = [policy(seed) for seed in (1, 2)]
    folders = [folder / name for name in ("old", "new")]
    for made, where in zip(policies, folders, strict=True):
        checkpoints.save(made, where)
    temporary = Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp"))  # a short name, as the sockets in it need
    command = [sys.executable, "-m", "tests.rollout.vllm_processes", "servers", str(folders[0]), str(folder / "logs")]
    variables = {**os.environ, "TMPDIR": str(temporary)}
    launcher = subprocess.Popen(command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    try:
        url = next(line.split()[1] for line in launcher.stdout if line.startswith("urls"))
        client = VllmServers([url], servers_config(lost_deadline_s=120))
        yield Run(launcher, url, client, policies, folders, temporary)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        shutil.rmtree(temporary)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_trainer(run: Run, temperature: float) -> None:
    """For the sampled tokens at the same temperature."""
    completions = drawn(run.client, run.policies[0], temperature=temperature)
    prompts = [completion.tokens.prompt_ids for completion in completions[::6]]
    assert prompts == [run.policies[0].prompt_ids(question) for question in QUESTIONS]
    assert difference(completions, run.policies[0], temperature) < 1e-4
    assert len({len(completion.tokens) for completion in completions}) > 5


def test_greedy_decoding_is_that_of_transformers(run: Run) -> None:
    """At temperature 0 both samplers give the same tokens."""
    greedy = Sampling(num_samples=1, temperature=0.0, max_new_tokens=30, seed=1)
    completions = drawn(run.client, run.policies[0], **asdict(greedy))
    groups = TransformersSampler(run.policies[0], 64).generate(tiny.asked(QUESTIONS), greedy)
    assert [each.tokens for each in completions] == [each.tokens for (each,) in groups]
    logprobs = [[list(each.logprobs) for each in completions], [list(each.logprobs) for (each,) in groups]]
    assert largest_difference(*logprobs) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_of_any_tokens_are_those_of_the_trainer(run: Run, temperature: float) -> None:
    """Whoever drew the tokens, the server tells their log-probabilities at the temperature that is asked for."""
    sampling = Sampling(num_samples=2, temperature=3.0, max_new_tokens=12, seed=1)
    groups = TransformersSampler(run.policies[1], 64).generate(tiny.asked(QUESTIONS), sampling)
    sequences = [completion.tokens for group in groups for completion in group]
    scores = run.client.score(sequences, temperature)
    assert list(scores) == [run.url]
    assert largest_difference(scores[run.url], trainer_logprobs(run.policies[0], sequences, temperature)) < 1e-4


def test_weights_are_replaced_while_others_sample(run: Run) -> None:
    """Each completion is sampled from the old or from the new weights throughout; no cache of the old is used."""
    other = VllmServers([run.url], servers_config())
    completions: list[Completion] = []
    settings = {"num_samples": 4, "max_new_tokens": 120, "seed": 5}
    draw = partial(drawn, other, run.policies[0], QUESTIONS * 2, **settings)
    sampling = threading.Thread(target=lambda: completions.extend(draw()))
    sampling.start()
    time.sleep(0.1)
    run.client.set_weights(1, run.folders[1])
    other._folder, other._version = run.folders[1], "1"
    sampling.join()
    differences = [[difference([each], policy) for policy in run.policies] for each in completions]
    assert all(min(each) < 1e-4 < max(each) for each in differences)
    after = drawn(run.client, run.policies[0])
    assert difference(after, run.policies[1]) < 1e-4
    sequences = [completion.tokens for completion in [*completions, *after]]
    scores = run.client.score(sequences, 1.0)[run.url]
    assert largest_difference(scores, trainer_logprobs(run.policies[1], sequences, 1.0)) < 1e-4


def test_a_client_that_sent_nothing_knows_the_new_version(run: Run) -> None:
    """And what listens meanwhile is reached from this machine alone, the server at no port."""
    other = VllmServers([run.url], servers_config())
    for version, made in ((2, 0), (3, 1)):
        run.client.set_weights(version, run.folders[made])
        other.set_weights(version, None)
        completions = drawn(other, run.policies[0], num_samples=4, max_new_tokens=40, seed=version)
        assert difference(completions, run.policies[made]) < 1e-4
    assert all(is_local for pid in _processes(run.temporary) for is_local in listeners(pid).values())
    assert not listeners(_server(run))
    with pytest.raises(RetryableError, match="it has weights 3, not 4"):
        VllmServers([run.url], servers_config(lost_deadline_s=1)).set_weights(4, None)


@pytest.mark.long
def test_a_killed_server_comes_back_with_the_current_weights(run: Run) -> None:
    """The client samples from it only after it has the new weights."""
    run.client.set_weights(6, run.folders[1])
    os.kill(_server(run), signal.SIGKILL)
    assert difference(drawn(run.client, run.policies[1]), run.policies[1]) < 1e-4


def test_a_killed_launcher_leaves_nothing_behind(run: Run) -> None:
    """Server and engine end, and neither folders nor shared memory stay behind."""
    shared = set(Path("/dev/shm").iterdir())
    assert len(_processes(run.temporary)) > 2
    run.launcher.kill()
    run.launcher.wait()
    wait_until(lambda: not _processes(run.temporary))
    assert not list(run.temporary.iterdir())
    assert set(Path("/dev/shm").iterdir()) <= shared
