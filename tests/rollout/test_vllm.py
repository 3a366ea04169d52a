"""A real vLLM server and real engines beside two ranks, started once: the tests follow their lives, in their order."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint
from components.rollout.sampler import Completion, Sampling
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.servers import VllmServers
from components.shared.errors import RetryableError
from tests import tiny
from tests.cluster.processes import is_gone, listeners, wait_until
from tests.rollout.vllm_policies import QUESTIONS, largest_difference, policy, sampler, servers_config, trainer_logprobs

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_PROCESSES = "tests.rollout.vllm_processes"


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


def _temporary_folder(name: str) -> Path:
    """A folder with a short name, as the sockets in it need."""
    return Path(tempfile.mkdtemp(prefix=f"vllm-{name}-", dir="/tmp"))


def _start(temporary: Path, *command: str | Path, **options: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen([*map(str, command)], cwd=_ROOT, env=environment, text=True, **options)


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
    temporary = _temporary_folder("server")
    command = (sys.executable, "-m", _PROCESSES, "servers", folders[0], folder / "logs")
    launcher = _start(temporary, *command, stdout=subprocess.PIPE)
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


def _generate(
    run: Run, engine: VllmServers | None = None, questions: Sequence[str] = QUESTIONS, **settings: Any
) -> list[Completion]:
    """The completions of all questions, one group after the other."""
    sampling = Sampling(**{"num_samples": 6, "temperature": 1.0, "max_new_tokens": 25, "seed": 1, **settings})
    groups = sampler(engine or run.client, run.policies[0]).generate(tiny.asked(questions), sampling)
    return [completion for group in groups for completion in group]


def _difference(completions: Sequence[Completion], made: Checkpoint, temperature: float = 1.0) -> float:
    """The largest difference of a token's log-probability from the one that the trainer computes."""
    exact = trainer_logprobs(made, [completion.tokens for completion in completions], temperature)
    return largest_difference([list(completion.logprobs) for completion in completions], exact)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_trainer(run: Run, temperature: float) -> None:
    """For the sampled tokens at the same temperature."""
    completions = _generate(run, temperature=temperature)
    prompts = [completion.tokens.prompt_ids for completion in completions[::6]]
    assert prompts == [run.policies[0].prompt_ids(question) for question in QUESTIONS]
    assert _difference(completions, run.policies[0], temperature) < 1e-4
    assert len({len(completion.tokens) for completion in completions}) > 5


def test_greedy_decoding_is_that_of_transformers(run: Run) -> None:
    """At temperature 0 both samplers give the same tokens."""
    greedy = Sampling(num_samples=1, temperature=0.0, max_new_tokens=30, seed=1)
    completions = _generate(run, **asdict(greedy))
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
    settings: dict[str, Any] = {"num_samples": 4, "max_new_tokens": 120, "seed": 5}
    sampling = threading.Thread(target=lambda: completions.extend(_generate(run, other, QUESTIONS * 2, **settings)))
    sampling.start()
    time.sleep(0.1)
    run.client.set_weights(1, run.folders[1])
    other._folder, other._version = run.folders[1], "1"
    sampling.join()
    differences = [[_difference([each], policy) for policy in run.policies] for each in completions]
    assert all(min(each) < 1e-4 < max(each) for each in differences)
    after = _generate(run)
    assert _difference(after, run.policies[1]) < 1e-4
    sequences = [completion.tokens for completion in [*completions, *after]]
    scores = run.client.score(sequences, 1.0)[run.url]
    assert largest_difference(scores, trainer_logprobs(run.policies[1], sequences, 1.0)) < 1e-4


def test_a_client_that_sent_nothing_knows_the_new_version(run: Run) -> None:
    """And what listens meanwhile is reached from this machine alone, the server at no port."""
    other = VllmServers([run.url], servers_config())
    for version, made in ((2, 0), (3, 1)):
        run.client.set_weights(version, run.folders[made])
        other.set_weights(version, None)
        completions = _generate(run, other, num_samples=4, max_new_tokens=40, seed=version)
        assert _difference(completions, run.policies[made]) < 1e-4
    assert all(is_local for pid in _processes(run.temporary) for is_local in listeners(pid).values())
    assert not listeners(_server(run))
    with pytest.raises(RetryableError, match="it has weights 3, not 4"):
        VllmServers([run.url], servers_config(lost_deadline_s=1)).set_weights(4, None)


@pytest.mark.long
def test_a_killed_server_comes_back_with_the_current_weights(run: Run) -> None:
    """The launcher starts it again; the client waits for it, and samples from it only after it has the new weights."""
    run.client.set_weights(6, run.folders[1])
    before = _processes(run.temporary)
    os.kill(_server(run), signal.SIGKILL)
    assert _difference(_generate(run), run.policies[1]) < 1e-4
    assert set(before) & set(_processes(run.temporary)) == {run.launcher.pid}


def test_a_killed_launcher_leaves_nothing_behind(run: Run) -> None:
    """Server and engine end, and neither folders nor shared memory stay behind."""
    shared = set(Path("/dev/shm").iterdir())
    assert len(_processes(run.temporary)) > 2
    run.launcher.kill()
    run.launcher.wait()
    wait_until(lambda: not _processes(run.temporary))
    assert not list(run.temporary.iterdir())
    assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.mark.long
def test_each_rank_has_a_server_that_ends_with_it(tmp_path: Path) -> None:
    """Its log-probabilities are the trainer's, whichever way the weights of a tied model came; ranks differ.

    SIGKILL of one rank leaves no process of its server; the other's lives on until torchrun ends it.
    """
    for seed, name in enumerate(("old", "new")):
        checkpoints.save(policy(seed, tied=True), tmp_path / name)
    temporary, paths = _temporary_folder("ranks"), [tmp_path / f"results-{rank}.json" for rank in range(2)]
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", _PROCESSES, "rank", tmp_path)
    with (tmp_path / "output.log").open("wb") as log:
        agent = _start(temporary, *command, stdout=log, stderr=log)
    try:
        wait_until(lambda: all(path.exists() for path in paths) or agent.poll() is not None, 300)
        assert agent.poll() is None, (tmp_path / "output.log").read_text()[-3000:]
        killed, other = [json.loads(path.read_text()) for path in paths]
        assert max(*killed["differences"], *other["differences"]) < 1e-4
        assert killed["tokens"] != other["tokens"]
        os.kill(agent.pid, signal.SIGSTOP)  # torchrun would end the other rank in good order
        os.kill(killed["rank"], signal.SIGKILL)
        wait_until(lambda: is_gone(killed["engine"]))
        assert not is_gone(other["engine"])
        os.kill(agent.pid, signal.SIGCONT)
        agent.wait(30)
    finally:
        agent.terminate()
        agent.wait()
    wait_until(lambda: not _processes(temporary))
    assert not list(temporary.glob("vllm-*"))
    shutil.rmtree(temporary)
