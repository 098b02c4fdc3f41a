"""Quotas that are used up, with the real client: it waits, and its log says why, or it fails in a sentence."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types
from tinker_posts import begun, passing, post, sampler_of, sampling
from tinker_support import BASE_MODEL, DEADLINE_S, KEY, Served, tinker_server

from service.keys import ServiceKey
from service.quotas import Quota, QuotaUsed

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@contextmanager
def serving(root: Path, **most: int) -> Iterator[Served]:
    key = ServiceKey("client", KEY, whose="alice", quota=Quota(**most))
    with tinker_server(root, keys=[key], places=4) as served:
        yield served


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def datum() -> types.Datum:
    inputs: Any = {"target_tokens": types.TensorData(data=[2, 3], dtype="int64")}
    return types.Datum(model_input=types.ModelInput.from_ints([1, 1]), loss_fn_inputs=inputs)


def test_the_client_waits_for_tokens_to_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes 3 tokens of the prompt and one that is sampled, of 240 in a minute."""
    with (
        serving(tmp_path, sampled_per_minute=240) as served,
        tinker.ServiceClient(base_url=served.url, api_key=KEY) as client,
    ):
        sampler = client.create_sampling_client(base_model=BASE_MODEL).result(DEADLINE_S)
        sampler.compute_logprobs(PROMPT).result(DEADLINE_S)
        quotas = served.server.quotas
        quotas.take("alice", "sampled", 250)  # some seconds' worth
        refused, check = [], quotas.check_tokens

        def recorded(owner: str, what: str) -> None:
            try:
                check(owner, what)
            except QuotaUsed:
                refused.append((owner, what))
                raise

        monkeypatch.setattr(quotas, "check_tokens", recorded)
        assert len(sampler.compute_logprobs(PROMPT).result(DEADLINE_S)) == 3
        assert ("alice", "sampled") in refused, "it was admitted before there were tokens"


def test_the_client_is_paused_while_nothing_is_left_of_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(tmp_path, trained_per_day=1000) as served,
        tinker.ServiceClient(base_url=served.url, api_key=KEY) as client,
    ):
        model = client.create_lora_training_client(base_model=BASE_MODEL, rank=8).result(DEADLINE_S)
        model.forward_backward([datum()], "cross_entropy").result(DEADLINE_S)
        served.server.quotas.take("alice", "trained", 2000)
        with caplog.at_level(logging.WARNING):
            passed = model.forward_backward([datum()], "cross_entropy")
            until = time.monotonic() + DEADLINE_S
            while "is used up: trained_per_day=1000" not in caplog.text:
                assert time.monotonic() < until, caplog.text
                time.sleep(0.02)
        served.server.quotas.take("alice", "trained", -2000)  # as if it were the day after tomorrow
        assert passed.result(DEADLINE_S).metrics["loss:sum"] > 0


def test_what_was_accepted_is_never_refused_and_counts_once(tmp_path: Path) -> None:
    with serving(tmp_path, trained_per_day=2 * 256, sampled_per_day=9) as served:
        session, model = begun(served.url)
        assert post(served.url, "forward_backward", passing(model, 1)).status_code == 200
        assert post(served.url, "forward_backward", passing(model, 1)).status_code == 200
        assert post(served.url, "forward_backward", passing(model, 2)).status_code == 200
        refused = post(served.url, "forward_backward", passing(model, 3))
        assert refused.status_code == 402
        assert "retry-after" not in refused.headers
        assert post(served.url, "forward_backward", passing(model, 2)).status_code == 200
        assert post(served.url, "optim_step", {"model_id": model, "seq_id": 4}).status_code == 400, "it is no pass"
        sampler = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        served.server.quotas.take("alice", "sampled", 8)
        for _ in range(2):
            assert post(served.url, "asample", sampling(sampler, 0)).status_code == 200
        assert post(served.url, "asample", sampling(sampler, 1)).status_code == 402


def test_a_server_that_is_killed_and_started_again_forgives_nothing(tmp_path: Path) -> None:
    """The second one begins with the files that the first one had at some moment. The third one has only what the
    second one found."""
    most = {"trained_per_day": 2 * 256, "sampled_per_day": 3}
    with serving(tmp_path / "first", **most) as served:
        session, model = begun(served.url)
        for number in (1, 2, 2):
            assert post(served.url, "forward_backward", passing(model, number)).status_code == 200
        sampler = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        asked = post(served.url, "asample", sampling(sampler, 0)).json()["request_id"]
        post(served.url, "retrieve_future", {"request_id": asked})
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    for _ in range(2):
        with serving(tmp_path / "second", **most) as served:
            assert post(served.url, "forward_backward", passing(model, 2)).status_code == 200, "it was accepted"
            refused = post(served.url, "forward_backward", passing(model, 3))
            assert "trained_per_day=512 tokens" in refused.json()["error"]["message"]
            assert post(served.url, "asample", sampling(sampler, 1)).status_code == 402, "what was sampled counts too"


def test_models_and_samples_at_the_same_time(tmp_path: Path) -> None:
    with serving(tmp_path, models=1, samples=2) as served:
        session, _ = begun(served.url)
        other = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
        asked = {"session_id": other, "model_seq_id": 0, "base_model": BASE_MODEL}
        refused = post(served.url, "create_model", asked)
        assert refused.status_code == 429
        assert "models=1, and there are 1" in refused.json()["error"]["message"]
        sampler = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        served.sampler.seconds = 0.5
        answers = [post(served.url, "asample", sampling(sampler, number)) for number in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "1"
        for answer in answers[:2]:
            post(served.url, "retrieve_future", {"request_id": answer.json()["request_id"]})
        assert post(served.url, "asample", sampling(sampler, 2)).status_code == 200
        post(served.url, f"sessions/{session}/finish", {})
        assert post(served.url, "create_model", asked).status_code == 200


def test_what_is_saved(tmp_path: Path) -> None:
    with serving(tmp_path, states=2) as served, tinker.ServiceClient(base_url=served.url, api_key=KEY) as client:
        model = client.create_lora_training_client(base_model=BASE_MODEL, rank=8).result(DEADLINE_S)
        first = model.save_state("one").result(DEADLINE_S).path
        model.save_weights_for_sampler("two").result(DEADLINE_S)
        with pytest.raises(tinker.RequestFailedError, match="quota of alice is used up: states=2, and 2 are saved"):
            model.save_state("three").result(DEADLINE_S)
        model.save_state("one", overwrite=True).result(DEADLINE_S)
        with pytest.raises(tinker.BadRequestError, match="states=2"):
            client.create_rest_client().copy_weights(first, "p").result(DEADLINE_S)
        client.create_rest_client().delete_checkpoint_from_tinker_path(first).result(DEADLINE_S)
        model.save_state("three").result(DEADLINE_S)
