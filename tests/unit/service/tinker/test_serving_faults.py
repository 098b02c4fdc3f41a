"""What goes wrong in a server of Tinker's clients: each request still gets its answer, and the next one is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker_support import BASE_MODEL, DEADLINE_S, KEY, Served, UnigramTrainer, Written, tinker_server

from service.tinker.catalog import Catalog
from service.tinker.messages import message_class
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.errors import DiskFull, RoomFailed
from trireme.core.types import AdamParams, OptimStepResponse, SampleResponse
from trireme.launch.tinker import BASE, RUNS, clear


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with tinker_server(tmp_path) as served:
        yield served


def post(served: Served, path: str, body: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(f"{served.url}/api/v1/{path}", headers={"x-api-key": KEY}, timeout=DEADLINE_S, **content)


def accepted(served: Served, path: str, body: Any) -> str:
    answer = post(served, path, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def result(served: Served, request_id: str) -> Any:
    answer = post(served, "retrieve_future", {"request_id": request_id})
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.content


def begun(served: Served) -> tuple[str, str]:
    """Begins a session with a model; returns their ids."""
    session = post(served, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    return session, result(served, accepted(served, "create_model", asked))["model_id"]


def sampler_of(served: Served, session: str, number: int, **target: str) -> str:
    asked = {"session_id": session, "sampling_session_seq_id": number, **target}
    return str(post(served, "create_sampling_session", asked).json()["sampling_session_id"])


def sampling(sampler: str, seq_id: int) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    return {
        "prompt": prompt,
        "sampling_params": {"max_tokens": 2},
        "sampling_session_id": sampler,
        "seq_id": seq_id,
    }


def passing(model_id: str, seq_id: int) -> bytes:
    """A request for the gradient of one datum."""
    request = message_class("ForwardBackwardRequest")(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = np.array([2, 3], "<i8").tobytes(), 2
    return bytes(request.SerializeToString())


def test_requests_behind_one_that_was_refused_are_served(served: Served) -> None:
    """The client counts a request that is refused, and sends the next one under the next number."""
    _, model = begun(served)
    of = {"model_id": model}
    for seq_id, (path, body) in enumerate(
        [
            ("optim_step", {"optimizer_params": {"type": "dimuon"}}),
            ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
            ("optim_step", {"adam_params": {"unheard_of": 1.0}}),
            ("save_weights", {"path": "s", "ttl_seconds": -1}),
            ("save_weights_for_sampler", {}),
        ],
        start=1,
    ):
        assert post(served, path, {**of, "seq_id": seq_id, **body}).status_code == 400
    saved = accepted(served, "save_weights", {**of, "seq_id": 6, "path": "s"})
    assert result(served, saved)["path"] == f"tinker://{model}/weights/s"


def test_a_sample_that_fails_in_an_unexpected_way_is_told_and_others_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of other weights, which wait until none runs."""
    session, model = begun(served)
    body = {"model_id": model, "seq_id": 1, "path": "w"}
    path = result(served, accepted(served, "save_weights_for_sampler", body))["path"]
    base = sampler_of(served, session, 0, base_model=BASE_MODEL)

    def broken(*_: Any) -> Future[SampleResponse]:
        raise OSError("no tokenizer")

    with monkeypatch.context() as patched:
        patched.setattr(served.sampler, "sample", broken)
        failed = result(served, accepted(served, "asample", sampling(base, 0)))
    assert failed == {"error": "an error of the server, which its log tells: OSError", "category": "server"}
    named = sampler_of(served, session, 1, model_path=path)
    assert isinstance(result(served, accepted(served, "asample", sampling(named, 0))), bytes)


def test_a_pass_that_fails_in_an_unexpected_way_is_told_and_its_batch_is_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = begun(served)

    def broken(*_: Any) -> Any:
        raise KeyError("x")

    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "forward_backward", broken)
        failed = result(served, accepted(served, "forward_backward", passing(model, 1)))
    assert failed["category"] == "server"
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}
    assert "a part of them is missing" in result(served, accepted(served, "optim_step", step))["error"]
    assert isinstance(result(served, accepted(served, "forward_backward", passing(model, 3))), bytes)


def test_all_who_wait_are_told_when_the_trainer_fails(tmp_path: Path) -> None:
    class Failing(UnigramTrainer):
        fails = threading.Event()

        def optim_step(self, adam_params: AdamParams) -> OptimStepResponse:
            assert self.fails.wait(DEADLINE_S)
            raise RoomFailed("trainer shard 0 died")

    told: list[Any] = []

    def run() -> None:
        with tinker_server(tmp_path, trainer := Failing()) as served, ThreadPoolExecutor() as threads:
            _, model = begun(served)
            passed = accepted(served, "forward_backward", passing(model, 1))
            assert isinstance(result(served, passed), bytes)
            step = accepted(served, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            behind = accepted(served, "save_weights", {"model_id": model, "seq_id": 3, "path": "s"})
            asked = [threads.submit(result, served, request) for request in (step, behind)]
            until = time.monotonic() + DEADLINE_S
            while not {step, behind} <= served.server._outcomes.keys():  # both questions are held
                assert time.monotonic() < until
                time.sleep(0.01)
            trainer.fails.set()
            told.extend(future.result(DEADLINE_S)["error"] for future in asked)

    with pytest.raises(RoomFailed, match="shard 0 died"):
        run()
    assert "shard 0 died" in told[0]
    assert "the server has ended" in told[1]


def test_a_save_that_the_disk_has_no_room_for_leaves_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(Written):
        def wait(self, timeout_s: float) -> list[FileRecord]:
            raise DiskFull("no space left")

    def save(path: Path) -> Written:
        return Half([write_bytes(path, "state.bin", b"half")])

    _, model = begun(served)
    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "save_state", save)
        body = {"model_id": model, "seq_id": 1, "path": "s"}
        assert result(served, accepted(served, "save_weights", body))["category"] == "server"
    assert list((tmp_path / "runs").rglob("state.bin")) == []
    body = {"model_id": model, "seq_id": 2, "path": "s"}
    assert result(served, accepted(served, "save_weights", body))["path"] == f"tinker://{model}/weights/s"


def test_a_repeated_sample_has_its_promise_though_its_weights_are_gone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.tinker.serving.SNAPSHOTS", 1)
    session, model = begun(served)

    def saved(number: int) -> str:
        body = {"model_id": model, "seq_id": number + 1, "path": f"w{number}"}
        return str(result(served, accepted(served, "save_weights_for_sampler", body))["path"])

    sampler = sampler_of(served, session, 0, model_path=saved(0))
    request = accepted(served, "asample", sampling(sampler, 0))
    assert isinstance(result(served, request), bytes)
    base = sampler_of(served, session, 1, base_model=BASE_MODEL)
    assert isinstance(result(served, accepted(served, "asample", sampling(base, 0))), bytes)
    for number in range(1, 3):
        saved(number)
    assert accepted(served, "asample", sampling(sampler, 0)) == request
    assert post(served, "asample", sampling(sampler, 1)).status_code == 400


def test_deletions_that_fail_do_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Catalog] = []

    def broken(catalog: Catalog) -> None:
        tries.append(catalog)
        raise OSError("the disk is read-only")

    monkeypatch.setattr("service.tinker.serving.LOOK_S", 0.01)
    monkeypatch.setattr(Catalog, "expire", broken)
    with tinker_server(tmp_path) as served:
        until = time.monotonic() + DEADLINE_S
        while len(tries) < 3:
            assert time.monotonic() < until, "it was not tried again"
            time.sleep(0.01)
        begun(served)


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    left: Sequence[Path] = [tmp_path / f"{BASE}x" / "state", tmp_path / RUNS / "a-train-0" / "new-weights" / "s"]
    kept = tmp_path / "base-model"
    for directory in (*left, kept):
        write_bytes(directory, "state.bin", b"12")
    clear(tmp_path)
    assert not left[0].parent.exists()
    assert not left[1].exists()
    assert kept.exists()
