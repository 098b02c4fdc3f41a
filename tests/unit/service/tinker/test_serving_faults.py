"""What goes wrong in a server of Tinker's clients: each request still gets its answer, and the next one is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tinker_posts import accepted, begun, passing, post, result, sampler_of, sampling
from tinker_support import BASE_MODEL, DEADLINE_S, Served, Written, tinker_server

from service.tinker.catalog import Catalog
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.errors import DiskFull
from trireme.core.types import SampleResponse
from trireme.launch.tinker import BASE, RUNS, clear


def test_requests_behind_one_that_was_refused_are_served(served: Served) -> None:
    """The client counts a request that is refused, and sends the next one under the next number."""
    _, model = begun(served.url)
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
        assert post(served.url, path, {**of, "seq_id": seq_id, **body}).status_code == 400
    saved = accepted(served.url, "save_weights", {**of, "seq_id": 6, "path": "s"})
    assert result(served.url, saved)["path"] == f"tinker://{model}/weights/s"


def test_a_sample_that_fails_in_an_unexpected_way_is_told_and_others_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of other weights, which wait until none runs."""
    session, model = begun(served.url)
    body = {"model_id": model, "seq_id": 1, "path": "w"}
    path = result(served.url, accepted(served.url, "save_weights_for_sampler", body))["path"]
    base = sampler_of(served.url, session, 0, base_model=BASE_MODEL)

    def broken(*_: Any, **__: Any) -> Future[SampleResponse]:
        raise OSError("no tokenizer")

    with monkeypatch.context() as patched:
        patched.setattr(served.sampler, "sample", broken)
        failed = result(served.url, accepted(served.url, "asample", sampling(base, 0)))
    assert failed == {"error": "an error of the server, which its log tells: OSError", "category": "server"}
    named = sampler_of(served.url, session, 1, model_path=path)
    assert isinstance(result(served.url, accepted(served.url, "asample", sampling(named, 0))), bytes)


def test_a_pass_that_fails_in_an_unexpected_way_is_told_and_its_batch_is_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = begun(served.url)

    def broken(*_: Any) -> Any:
        raise KeyError("x")

    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "forward_backward", broken)
        failed = result(served.url, accepted(served.url, "forward_backward", passing(model, 1)))
    assert failed["category"] == "server"
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}
    assert "a part of them is missing" in result(served.url, accepted(served.url, "optim_step", step))["error"]
    assert isinstance(result(served.url, accepted(served.url, "forward_backward", passing(model, 3))), bytes)


def test_a_save_that_the_disk_has_no_room_for_leaves_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(Written):
        def wait(self, timeout_s: float) -> list[FileRecord]:
            raise DiskFull("no space left")

    def save(path: Path) -> Written:
        return Half([write_bytes(path, "state.bin", b"half")])

    _, model = begun(served.url)
    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "save_state", save)
        body = {"model_id": model, "seq_id": 1, "path": "s"}
        assert result(served.url, accepted(served.url, "save_weights", body))["category"] == "server"
    assert list((tmp_path / "runs").rglob("state.bin")) == []
    body = {"model_id": model, "seq_id": 2, "path": "s"}
    assert result(served.url, accepted(served.url, "save_weights", body))["path"] == f"tinker://{model}/weights/s"


def test_a_repeated_sample_has_its_promise_though_its_weights_are_gone(tmp_path: Path) -> None:
    with tinker_server(tmp_path, snapshots=1) as served:
        ask_again(served)


def ask_again(served: Served) -> None:
    session, model = begun(served.url)

    def saved(number: int) -> str:
        body = {"model_id": model, "seq_id": number + 1, "path": f"w{number}"}
        return str(result(served.url, accepted(served.url, "save_weights_for_sampler", body))["path"])

    sampler = sampler_of(served.url, session, 0, model_path=saved(0))
    request = accepted(served.url, "asample", sampling(sampler, 0))
    assert isinstance(result(served.url, request), bytes)
    base = sampler_of(served.url, session, 1, base_model=BASE_MODEL)
    assert isinstance(result(served.url, accepted(served.url, "asample", sampling(base, 0))), bytes)
    for number in range(1, 3):
        saved(number)
    assert accepted(served.url, "asample", sampling(sampler, 0)) == request
    assert post(served.url, "asample", sampling(sampler, 1)).status_code == 400


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
        begun(served.url)


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    left: Sequence[Path] = [tmp_path / f"{BASE}x" / "state", tmp_path / RUNS / "a-train-0" / "new-weights" / "s"]
    kept = tmp_path / "base-model"
    for directory in (*left, kept):
        write_bytes(directory, "state.bin", b"12")
    clear(tmp_path)
    assert not left[0].parent.exists()
    assert not left[1].exists()
    assert kept.exists()
