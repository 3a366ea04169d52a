import asyncio
import itertools
import threading
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock

import pytest
import safetensors.torch
import torch

from components.policy.checkpoint import Checkpoint
from components.rollout.sampler import Sampling
from components.rollout.vllm import servers
from components.rollout.vllm.config import engine_arguments
from components.rollout.vllm.servers import VllmServers
from components.rollout.vllm.verification import StaleWeightsError
from components.shared.environment import KEY_VARIABLE
from components.shared.errors import PipelineError, RetryableError
from tests import tiny
from tests.rollout.fake_vllm import FakeVllm
from tests.rollout.vllm_policies import Words, sampler, servers_config

QUESTIONS = [f"Question {number}?" for number in range(12)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with a tensor."""
    safetensors.torch.save_file({"head.weight": torch.arange(12.0).reshape(3, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def _client(*urls: str, request_s: float = 10, lost_s: float = 10) -> VllmServers:
    return VllmServers(urls, servers_config(request_deadline_s=request_s, lost_deadline_s=lost_s))


def _drawn(client: VllmServers, questions: list[str] = QUESTIONS, seed: int = 1) -> list[tuple[int, ...]]:
    """The completions' tokens, one group after the other."""
    sampling = Sampling(num_samples=3, temperature=0.7, max_new_tokens=5, seed=seed)
    groups = sampler(client, cast(Checkpoint, Words())).generate(tiny.asked(questions), sampling)
    assert [len(group) for group in groups] == [3] * len(questions)
    for question, group in zip(questions, groups, strict=True):
        assert all(each.tokens.prompt_ids == tuple(question.encode()) for each in group)
    return [each.tokens.completion_ids for group in groups for each in group]


def test_a_group_is_one_request_for_the_exact_distribution(fakes: list[FakeVllm]) -> None:
    """By its tokens; the completions of two groups share no seed, though vLLM counts up from that of each request."""

    def seeds(seed: int) -> dict[tuple[int, ...], int]:
        fakes[0].calls.clear()
        assert set(_drawn(_client(fakes[0].url), seed=seed)) == {(2, 1)}
        return {tuple(body["token_ids"]): body["sampling_params"].pop("seed") for body in fakes[0].generated()}

    first, again, other = seeds(1), seeds(1), seeds(2)
    assert first.keys() == {tuple(each.encode()) for each in QUESTIONS}
    assert first == again
    assert not set(first.values()) & set(other.values())
    assert all(following - seed >= 3 for seed, following in itertools.pairwise(sorted(first.values())))
    penalties = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    limits: dict[str, object] = {"max_tokens": 5, "stop_token_ids": [1], "ignore_eos": True}
    exact = {"n": 3, "temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0, "logprobs": 0, "detokenize": False}
    expected = {**exact, **penalties, **limits}
    assert [body["sampling_params"] for body in fakes[0].generated()] == [expected] * len(QUESTIONS)


def test_requests_have_no_seeds_beside_training_on_a_gpu(
    fakes: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine has one seed there, and not the settings that vLLM needs on CPUs."""
    monkeypatch.setattr(Words, "device", torch.device("cuda"))
    _drawn(_client(fakes[0].url))
    assert {body["sampling_params"]["seed"] for body in fakes[0].generated()} == {None}
    on_cpu, on_gpu = (engine_arguments(servers_config(), "bfloat16", gpu_seed=seed) for seed in (None, 3))
    assert (on_cpu["max_num_seqs"], on_cpu["enable_chunked_prefill"], on_gpu["seed"]) == (256, False, 3)
    assert not {"max_num_seqs", "enable_chunked_prefill"} & on_gpu.keys()
    assert "seed" not in on_cpu


def _die() -> None:
    raise ConnectionResetError


def test_requests_go_to_the_server_with_the_fewest(fakes: list[FakeVllm]) -> None:
    """Before the first is answered, twelve requests are six for each of two servers."""
    all_arrived = threading.Event()

    def wait_for_all() -> None:
        if sum(fake.at_once for fake in fakes) == len(QUESTIONS):
            all_arrived.set()
        assert all_arrived.wait(60)

    for fake in fakes:
        fake.before_answer = wait_for_all
    _drawn(_client(*(fake.url for fake in fakes)))
    assert [fake.most_at_once for fake in fakes] == [6, 6]


@pytest.mark.parametrize("hangs", [False, True])
def test_requests_of_a_lost_server_move(fakes: list[FakeVllm], hangs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it ends or does not answer in time: no completion is lost, and the loss is reported once."""
    release = threading.Event()
    fakes[0].before_answer = release.wait if hangs else _die
    assert _drawn(_client(*(fake.url for fake in fakes), request_s=1 if hangs else 10)) == [(2, 1)] * 36
    release.set()
    assert len(fakes[0].generated()) >= 1
    reason = "no answer to /inference/v1/generate within 1 s" if hangs else ""
    assert capsys.readouterr().out.count(f"{fakes[0].url} is lost: {reason}") == 1


def test_a_restarted_server_is_updated(fakes: list[FakeVllm], weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not keep them from the others; it loads and verifies them before it is used again."""
    monkeypatch.setattr(servers, "_RETRY_S", 0.0)
    port = fakes[0].server_port
    client = _client(*(fake.url for fake in fakes))
    client.set_weights(1, weights)
    fakes[0].die()
    client.set_weights(2, weights)
    assert fakes[1].version == "2"
    assert set(_drawn(client)) == {(4, 1)}
    fakes[0] = FakeVllm(port)
    assert set(_drawn(client)) == {(4, 1)}
    paths = [path for path, _ in fakes[0].calls]
    assert paths[:4] == ["/weight_info", "/pause?mode=wait&clear_cache=true", "/collective_rpc", "/collective_rpc"]
    assert paths[4:6] == ["/update_weight_version", "/resume"]
    assert fakes[0].calls[2][1] == {"method": "load_folder", "kwargs": {"folder": str(weights), "version": "2"}}
    assert fakes[0].calls[3][1] == {"method": "loaded_weights", "kwargs": {"shapes": {"head.weight": [3, 4]}}}
    assert "/inference/v1/generate" in paths[6:]


def test_answers_of_a_server_that_was_restarted_are_discarded(fakes: list[FakeVllm], weights: Path) -> None:
    """Samples from the weights it started with are sampled again, and it gets the current ones."""
    client, other = (_client(*(fake.url for fake in fakes)) for _ in range(2))
    for each in (client, other):  # of which the second finds them loaded
        each.set_weights(1, weights)
    loads = [body for path, body in fakes[0].calls if path == "/collective_rpc" and body["method"] == "load_folder"]
    assert len(loads) == 1
    fakes[0].version = fakes[0].loaded = "default"
    assert set(_drawn(client)) == {(3, 1)}
    assert _drawn(client) == _drawn(other) == [(3, 1)] * 36


def test_adapters_are_named_by_version(fakes: list[FakeVllm], weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has lost them gets them again, and then the weights it has started with are compared, too."""
    monkeypatch.setattr(servers, "_RETRY_S", 0.0)
    (weights / "base").mkdir()
    safetensors.torch.save_file({"base.weight": torch.ones(2)}, weights / "base" / "model.safetensors")
    config = servers_config(request_deadline_s=10, lost_deadline_s=10, synchronise="adapters")
    clients = [VllmServers([fakes[0].url], config, base=weights / "base") for _ in range(2)]
    clients[0].set_weights(1, weights)
    fakes[0].version = "default"  # as when a second client asks before the first is done
    clients[1].set_weights(1, weights)
    assert set(_drawn(clients[1])) == {(3, 1)}
    fakes[0].version, fakes[0].adapters = "default", set()
    fakes[0].calls.clear()
    assert set(_drawn(clients[0])) == {(3, 1)}
    assert {body["model"] for body in fakes[0].generated()} == {"1"}
    compared = [body["kwargs"]["shapes"] for path, body in fakes[0].calls if path == "/collective_rpc"]
    assert compared[0] == {"head.weight": [3, 4], "base.weight": [2]}


def test_other_weights_than_were_sent_stop_the_run(fakes: list[FakeVllm], weights: Path) -> None:
    """The error names the server and the tensor; a server is not used before its weights are verified."""
    client = _client(fakes[0].url)
    client.set_weights(1, weights)
    safetensors.torch.save_file({"head.weight": torch.full((3, 4), 2.0)}, weights / "model.safetensors")
    fakes[0].calls.clear()
    fakes[0].frozen = fakes[0].held
    with pytest.raises(
        StaleWeightsError, match=rf"{fakes[0].url} does not .*: own\.head\.weight differs from the head"
    ):
        client.set_weights(2, weights)
    assert "/resume" not in [path for path, _ in fakes[0].calls]


def test_without_any_server_the_error_names_each_with_its_reason(fakes: list[FakeVllm]) -> None:
    """Whatever is requested, once the deadline is over, or a request has ended each server that came back at once."""
    client = _client("http://127.0.0.1:9", "http://127.0.0.1:19", lost_s=0.5)
    with pytest.raises(RetryableError, match=r"no vLLM server for 0\.5 s .*:9: .*refused.*:19: .*refused"):
        _drawn(client)
    with pytest.raises(RetryableError, match=r":9: .*:19: "):
        client.set_weights(1, Path("/"))
    for fake in fakes:
        fake.before_answer = _die
    with pytest.raises(RetryableError, match="lost over the same request 4 times"):
        _drawn(_client(*(fake.url for fake in fakes)), QUESTIONS[:1])


def test_what_a_server_refuses_is_reported_and_not_tried_again(fakes: list[FakeVllm]) -> None:
    """A prompt that is too long for vLLM is the user's to correct."""
    with pytest.raises(PipelineError, match="the prompt is too long") as raised:
        _drawn(_client(*(fake.url for fake in fakes)), ["long" * 120])
    assert not isinstance(raised.value, RetryableError)
    assert sum(len(fake.generated()) for fake in fakes) == 1
    with pytest.raises(PipelineError, match=r"has 800 tokens, and vLLM reads at most 512"):
        _drawn(_client(*(fake.url for fake in fakes)), ["long" * 200])


@pytest.mark.parametrize(
    ("kind", "path", "key", "served"),
    [
        ("http", "/collective_rpc", "secret", True),
        ("http", "/collective_rpc", None, False),
        ("http", "//health", None, False),
        ("websocket", "/v1/realtime", None, False),
        ("http", "/health", None, True),
        ("lifespan", None, None, True),
    ],
)
def test_a_server_in_a_pod_serves_who_knows_the_key(
    monkeypatch: pytest.MonkeyPatch, kind: str, path: str | None, key: str | None, served: bool
) -> None:
    """As clients of the same job do: all else but the probe of the cluster is refused."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    app, send = AsyncMock(), AsyncMock()
    check = servers.RequireKey(app)
    monkeypatch.setenv(KEY_VARIABLE, key or "")
    headers = servers.connections("http://server:8000").headers
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind} if path is None else {"type": kind, "path": path, "headers": encoded}
    asyncio.run(check(scope, None, send))
    assert app.called == served
    statuses = [call.args[0]["status"] for call in send.call_args_list if "status" in call.args[0]]
    assert statuses == [401] * (kind == "http" and not served)
