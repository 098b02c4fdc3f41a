"""Quotas that are used up, with the real client: it waits, or it fails in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker_posts import begun, post, sampler_of, sampling
from tinker_support import BASE_MODEL, DEADLINE_S, KEY, Served, tinker_server

from service.keys import ServiceKey
from service.quotas import Quota


@contextmanager
def serving(root: Path, **most: int) -> Iterator[Served]:
    key = ServiceKey("client", KEY, whose="alice", quota=Quota(**most))
    with tinker_server(root, keys=[key], places=4) as served:
        yield served


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


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
