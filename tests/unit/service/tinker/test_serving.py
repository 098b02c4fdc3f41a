"""Rooms are lost under a server of Tinker's clients, which goes on with others: what each request is told then."""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_posts import accepted, begun, done, passing, post, result, sampler_of, sampling, saving, stepping
from tinker_support import BASE_MODEL, Served, UnigramSampler, UnigramTrainer, Written, tinker_server
from waiting import wait_for

from service.tinker.catalog import Catalog
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.core.errors import BadRequest, DiskFull, RoomFailed, StorageFailed
from trireme.core.types import AdamParams, OptimStepResponse, SampleResponse
from trireme.launch.tinker import BASE, RUNS, clear


class FailingTrainer(UnigramTrainer):
    def optim_step(self, adam_params: AdamParams) -> OptimStepResponse:
        raise RoomFailed("trainer shard 0 died")


class FailingSampler(UnigramSampler):
    def _sample(self, *_: Any) -> SampleResponse:
        raise RoomFailed("replica 0 died")


def lost(served: Served) -> None:
    wait_for(served.working.done, "the loss of a room")
    with pytest.raises(RoomFailed):
        served.working.result()


def test_a_request_under_which_rooms_are_lost_twice_has_failed(tmp_path: Path) -> None:
    """It may be the cause: a batch that does not fit into the memory, say. What comes behind it is done."""
    with tinker_server(tmp_path, FailingTrainer()) as served:
        _, model = begun(served.url)
        done(served.url, "forward_backward", passing(model, 1))
        step = accepted(served.url, "optim_step", stepping(model, 2))
        lost(served)
        served.work()
        lost(served)
        served.trainer = UnigramTrainer()
        served.work()
        error = result(served.url, step)
        assert (error["category"], "shard 0 died" in error["error"]) == ("server", True)
        assert isinstance(done(served.url, "forward_backward", passing(model, 3)), bytes)


def test_a_sample_is_asked_again_once(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        session, _ = begun(served.url)
        served.working.cancel()
        served.sampler = FailingSampler()
        served.work()
        base = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        sample = accepted(served.url, "asample", sampling(base, 0))
        lost(served)
        served.sampler = UnigramSampler()
        served.work()
        assert isinstance(result(served.url, sample), bytes)
        served.sampler = FailingSampler()
        served.working.cancel()
        served.work()
        sample = accepted(served.url, "asample", sampling(base, 1))
        lost(served)
        served.work()
        error = result(served.url, sample)
        assert (error["category"], "lost twice" in error["error"]) == ("server", True)
        assert not served.working.done(), "other samples may do well"


def test_a_sample_that_cannot_be_stored_ends_the_server_and_is_sampled_again_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tinker_server(tmp_path) as served:
        session, _ = begun(served.url)
        base = sampler_of(served.url, session, 0, base_model=BASE_MODEL)

        def full(*_: Any) -> None:
            raise StorageFailed("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(served.server.state, "sampled", full)
            sample = accepted(served.url, "asample", sampling(base, 0))
            wait_for(served.working.done, "the end of the server")
        with pytest.raises(StorageFailed, match="no space left"):
            served.working.result()
        served.work()
        assert isinstance(result(served.url, sample), bytes)


class RefusingSampler(UnigramSampler):
    def _sample(self, *_: Any) -> SampleResponse:
        raise BadRequest("vLLM does not sample this request: a token id beyond the vocabulary")


def test_a_sample_that_replicas_refuse_touches_no_room(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        session, _ = begun(served.url)
        served.working.cancel()
        served.sampler = RefusingSampler()
        served.work()
        base = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        refused = [done(served.url, "asample", sampling(base, seq)) for seq in range(5)]
        assert [error["category"] for error in refused] == ["user"] * 5
        assert not served.working.done(), "no room is started again"
        for beyond in ({"temperature": 2.0001}, {"top_k": 10**30}, {"stop": ["x"] * 65}):
            body = sampling(base, 9)
            body["sampling_params"] |= beyond
            assert post(served.url, "asample", body).status_code == 400


def test_samples_of_weights_that_are_lost_are_told_so(tmp_path: Path) -> None:
    """A checkpoint has the weights of its update, but none that samplers had before."""
    with tinker_server(tmp_path, commit_s=1e-6) as served:
        _, model = begun(served.url)
        samplers = []
        for number in range(2):
            seq = 3 * number
            done(served.url, "forward_backward", passing(model, seq + 1))
            done(served.url, "optim_step", stepping(model, seq + 2))
            body = {"model_id": model, "seq_id": seq + 3, "sampling_session_seq_id": number, "kind": "snapshot"}
            samplers.append(done(served.url, "save_weights_for_sampler", body))
        old, new = (sampler["sampling_session_id"] for sampler in samplers)
        theta = served.trainer.theta.copy()
        served.working.cancel()
        wait_for(lambda: not served.server.ready, "the end of the rooms")
        samples = [accepted(served.url, "asample", sampling(sampler, 0)) for sampler in (old, new)]
        served.trainer, served.sampler = UnigramTrainer(), UnigramSampler()
        served.work()
        error = result(served.url, samples[0])
        assert (error["category"], "save weights for samplers again" in error["error"]) == ("server", True)
        assert isinstance(result(served.url, samples[1]), bytes)
        assert post(served.url, "asample", sampling(old, 1)).status_code == 400
        np.testing.assert_array_equal(served.trainer.theta, theta)
        assert served.trainer.calls == [], "the checkpoint had it all"


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
            ("save_weights_external", {"path": "w", "age_encryption_recipients": ["age1"]}),
        ],
        start=1,
    ):
        refused = post(served.url, path, {**of, "seq_id": seq_id, **body})
        assert refused.status_code == 400
    assert "age_encryption_recipients" in refused.text, "the field is named"
    assert done(served.url, "save_weights", saving(model, 7, "s"))["path"] == f"tinker://{model}/weights/s"


def test_an_unexpected_failure_of_a_sample_is_its_own(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of other weights, which wait until none runs."""
    session, model = begun(served.url)
    path = done(served.url, "save_weights_for_sampler", saving(model, 1, "w"))["path"]
    base = sampler_of(served.url, session, 0, base_model=BASE_MODEL)

    def broken(*_: Any, **__: Any) -> Future[SampleResponse]:
        raise OSError("no tokenizer")

    with monkeypatch.context() as patched:
        patched.setattr(served.sampler, "sample", broken)
        failed = done(served.url, "asample", sampling(base, 0))
    assert failed == {"error": "an error of the server, which its log tells: OSError", "category": "server"}
    named = sampler_of(served.url, session, 1, model_path=path)
    assert isinstance(done(served.url, "asample", sampling(named, 0)), bytes)


def test_an_unexpected_failure_of_a_pass_drops_its_batch(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = begun(served.url)

    def broken(*_: Any) -> Any:
        raise KeyError("x")

    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "forward_backward", broken)
        failed = done(served.url, "forward_backward", passing(model, 1))
    assert failed["category"] == "server"
    assert "a part of them is missing" in done(served.url, "optim_step", stepping(model, 2))["error"]
    assert isinstance(done(served.url, "forward_backward", passing(model, 3)), bytes)


def test_a_save_without_room_leaves_nothing(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(Written):
        def wait(self, timeout_s: float) -> list[FileRecord]:
            raise DiskFull("no space left")

    def save(path: Path) -> Written:
        return Half([write_bytes(path, "state.bin", b"half")])

    _, model = begun(served.url)
    with monkeypatch.context() as patched:
        patched.setattr(served.trainer, "save_state", save)
        assert done(served.url, "save_weights", saving(model, 1, "s"))["category"] == "server"
    assert list((tmp_path / "runs").rglob("state.bin")) == []
    assert done(served.url, "save_weights", saving(model, 2, "s"))["path"] == f"tinker://{model}/weights/s"


def test_a_repeated_sample_has_its_promise_though_its_weights_are_gone(tmp_path: Path) -> None:
    with tinker_server(tmp_path, snapshots=1) as served:
        session, model = begun(served.url)

        def saved(number: int) -> str:
            return str(done(served.url, "save_weights_for_sampler", saving(model, number + 1, f"w{number}"))["path"])

        sampler = sampler_of(served.url, session, 0, model_path=saved(0))
        request = accepted(served.url, "asample", sampling(sampler, 0))
        assert isinstance(result(served.url, request), bytes)
        base = sampler_of(served.url, session, 1, base_model=BASE_MODEL)
        assert isinstance(done(served.url, "asample", sampling(base, 0)), bytes)
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
        wait_for(lambda: len(tries) >= 3, "another try")
        begun(served.url)


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    leftover: Sequence[Path] = [tmp_path / f"{BASE}x" / "state", tmp_path / RUNS / "a-train-0" / "new-weights" / "s"]
    unrelated = tmp_path / "base-model"
    for directory in (*leftover, unrelated):
        write_bytes(directory, "state.bin", b"12")
    clear(tmp_path)
    assert not leftover[0].parent.exists()
    assert not leftover[1].exists()
    assert unrelated.exists()


MACHINE = "the machine was started again"


def assert_refused(served: Served, path: str, body: Any) -> None:
    """Asserts that a request is refused for ever, and by name."""
    answer = post(served.url, path, body)
    assert answer.status_code == 410, f"{path}: {answer.text}"
    assert MACHINE in answer.json()["error"]["message"]


@pytest.mark.parametrize("finished", [False, True])
def test_after_another_boot_sessions_end_by_name_and_states_stay(tmp_path: Path, finished: bool) -> None:
    """Also that of a client who had finished it, as its samplers may be used by others."""
    with suppress(CancelledError), tinker_server(tmp_path, boot="first") as served:
        session, model = begun(served.url)
        done(served.url, "forward_backward", passing(model, 1))
        stepped = accepted(served.url, "optim_step", stepping(model, 2))
        result(served.url, stepped)
        path = done(served.url, "save_weights", saving(model, 3, "s"))
        sampler = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        served.working.cancel()  # nothing is done any more
        wait_for(lambda: not served.server.ready, "the end of the rooms")
        promised = [accepted(served.url, "asample", sampling(sampler, 0))]
        if finished:
            assert post(served.url, f"sessions/{session}/finish", {}).status_code == 204
        else:
            promised.append(accepted(served.url, "forward_backward", passing(model, 4)))
        theta = served.trainer.theta.copy()
    for _ in range(2):  # it stays so while that boot lasts
        with tinker_server(tmp_path, UnigramTrainer(), boot="second") as served:
            assert_refused(served, "session_heartbeat", {"session_id": session})
            assert_refused(served, "create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE_MODEL})
            assert_refused(served, "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1})
            assert_refused(served, "asample", sampling(sampler, 1))
            for lost in (f"{model}/9", f"{sampler}/9"):  # it may have been accepted, and its row be missing
                assert_refused(served, "retrieve_future", {"request_id": lost})
            for request in promised:
                error = result(served.url, request)
                assert (error["category"], MACHINE in error["error"]) == ("server", True)
                assert "continue from a saved state" in error["error"]
            assert result(served.url, stepped)["metrics"]["grad_norm"] > 0, "what it was told stays as it was told"
            assert served.trainer.calls == [], "nothing is done again"
            new_session = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
            loading = {"session_id": new_session, "model_seq_id": 0, "path": path["path"], "optimizer": True}
            assert done(served.url, "load_weights", loading)["path"] == path["path"]
            np.testing.assert_array_equal(served.trainer.theta, theta)
            again = sampler_of(served.url, new_session, 0, base_model=BASE_MODEL)
            assert isinstance(done(served.url, "asample", sampling(again, 0)), bytes)
            assert post(served.url, f"sessions/{new_session}/finish", {}).status_code == 204
