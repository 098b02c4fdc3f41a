"""Each answer to a question for a result: when it is given, and what the real client makes of it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from manual_clock import ManualClock
from tinker import types
from tinker.lib.retryable_exception import RetryableException
from tinker_posts import accepted, begun, datum, passing, post, result, sampler_of, sampling, stepping
from tinker_support import BASE_MODEL, DEADLINE_S, KEY, Served, tinker_server
from waiting import wait_for

from service.requests import RequestRefused
from service.tinker.owners import Caller
from service.tinker.promises import GoneError, Promise, UnknownId
from service.tinker.state import KEPT_S, UNASKED_S, ProtocolState
from trireme.core.errors import StorageFailed


@pytest.fixture
def served(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("service.tinker.serving.HOLD_S", 0.05)
    monkeypatch.setattr("service.tinker.serving.LOOK_S", 0.02)
    with tinker_server(tmp_path, now=clock) as served:
        yield served


def test_the_table_of_results(served: Served, clock: ManualClock) -> None:
    """That of docs/tinker.md, row by row."""

    def status_of(request_id: str) -> Any:
        return post(served.url, "retrieve_future", {"request_id": request_id})

    def forgotten(request_id: str) -> None:
        wait_for(lambda: status_of(request_id).status_code == 410, "the end of its time")

    session, model = begun(served.url)
    sample = accepted(served.url, "asample", sampling(sampler_of(served.url, session, 0, base_model=BASE_MODEL), 0))
    wait_for(lambda: status_of(sample).status_code == 200, "the sample")
    served.trainer.hold = threading.Event()
    passed = accepted(served.url, "forward_backward", passing(model, 1))
    updated = accepted(served.url, "optim_step", stepping(model, 2))
    waiting = status_of(updated)
    assert (waiting.status_code, waiting.json()["queue_state"]) == (408, "active")
    served.trainer.hold.set()
    wait_for(lambda: status_of(updated).status_code == 200, "the update")
    assert result(served.url, updated)["metrics"]["grad_norm"] > 0
    assert isinstance(result(served.url, passed), bytes)
    assert result(served.url, passed) == result(served.url, passed)
    failed = accepted(served.url, "optim_step", stepping(model, 3))
    unasked = accepted(served.url, "forward_backward", passing(model, 4))
    wait_for(lambda: served.server.state.promise(unasked).outcome is not None, "a result that is not asked for")
    assert status_of(f"{model}/9").status_code == 404
    assert status_of("x").status_code == 404
    error = status_of(failed)
    assert error.status_code == 200
    assert error.json()["category"] == "user"
    wait_for(lambda: served.server.state.promise(unasked).settled_s is not None, "a look at it")
    for seconds in (KEPT_S, 2.0):  # beats keep the session, whose end would let go of results too
        status = status_of(passed).status_code
        clock.now += seconds
        served.server.state.sessions[session].beat_s = clock.now
    assert status == 200, "ten minutes are not over"
    forgotten(passed)
    forgotten(sample)
    assert status_of(unasked).status_code == 200
    clock.now += UNASKED_S + 1
    served.server.state.sessions[session].beat_s = clock.now
    forgotten(unasked)


def answered_first(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[str]:
    """Has the first `times` questions for results answered with an error. Returns the requests they were for."""
    lost, promise = list[str](), ProtocolState.promise

    def refusing(self: ProtocolState, request_id: str, caller: Caller) -> Promise:
        if len(lost) < times:
            lost.append(request_id)
            raise error
        return promise(self, request_id, caller)

    monkeypatch.setattr(ProtocolState, "promise", refusing)
    return lost


@pytest.mark.parametrize(
    ("error", "times", "then"),
    [
        (StorageFailed("the disk is full"), 2, None),
        (RuntimeError("a mistake in the server"), 2, None),
        (RequestRefused("wrong"), 2, None),
        (RequestRefused("wrong"), 9, ValueError),
        (UnknownId("the request"), 1, ValueError),
        (GoneError("it is forgotten"), 1, RetryableException),
    ],
    ids=["503", "500", "400 twice", "400", "404", "410"],
)
def test_the_client_and_the_result_of_a_pass(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, then: type[Exception] | None
) -> None:
    """It asks again for what may come yet, and gives up what is lost. Either way nothing is applied twice."""
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as client:
        model: Any = client.create_lora_training_client(base_model=BASE_MODEL, rank=8).result(DEADLINE_S)
        with monkeypatch.context() as patched:
            lost = answered_first(patched, error, times)
            passed = model.forward_backward([datum([2, 3])], "cross_entropy")
            if then is None:
                assert passed.result(DEADLINE_S).metrics["loss:sum"] > 0
            else:
                with pytest.raises(then):
                    passed.result(DEADLINE_S)
        assert set(lost) == {f"{model.model_id}/1"}
        assert model.optim_step(types.AdamParams()).result(DEADLINE_S).metrics["grad_norm"] > 0
    assert served.trainer.calls.count("cross_entropy") == 1


def test_the_client_asks_anew_for_a_lost_sample(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as client:
        sampler: Any = client.create_sampling_client(base_model=BASE_MODEL).result(DEADLINE_S)
        lost_ids = answered_first(monkeypatch, GoneError("it is forgotten"), 1)
        params = types.SamplingParams(max_tokens=3)
        answer = sampler.sample(types.ModelInput.from_ints([1]), 2, params).result(DEADLINE_S)
        assert len(answer.sequences) == 2
        (lost,) = lost_ids
        sampler_id, _, number = lost.rpartition("/")
        flags = [bool(served.server.state.accepted(sampler_id, int(number) + offset)) for offset in range(3)]
        assert flags == [True, True, False]
