"""What is saved and who saved it, asked for without a client: searches, copies, downloads, and repeated requests."""

import time
from typing import Any

import httpx
import pytest
from tinker_posts import accepted, ask, begun, done, result, saving
from tinker_support import DEADLINE_S, KEY, Served

SEARCH = "sessions/search"


def session_of(served: Served, **options: Any) -> str:
    return str(ask(served.url, "POST", "create_session", {"sdk_version": "0.38.0", **options}).json()["session_id"])


class TestSessions:
    def search(self, served: Served, **query: Any) -> list[str]:
        answer = ask(served.url, "POST", SEARCH, query)
        assert answer.status_code == 200, answer.text
        return [session["session_id"] for session in answer.json()["sessions"]]

    def test_they_are_found_by_what_their_clients_said(self, served: Served) -> None:
        first = session_of(
            served, display_name="Nightly run of sort", project_id="p", user_metadata={"a": "1", "b": "2"}
        )
        second = session_of(served, display_name="Another")
        assert self.search(served) == [second, first], "the newest comes first"
        assert self.search(served, display_name="SORT nightly") == [first]
        assert self.search(served, display_name="sort", session_id=second) == [second, first], "either of both"
        assert self.search(served, user_metadata={"b": "2"}) == [first]
        assert self.search(served, user_metadata={"b": "3"}) == []
        assert self.search(served, project_ids=["p"]) == [first]
        assert ask(served.url, "PUT", f"sessions/{second}/project", {"project_id": "q"}).status_code == 204
        assert self.search(served, project_ids=["q"]) == [second]
        assert self.search(served, owner={"type": "user", "owner_urns": ["urn:trireme:key:other"]}) == []
        me = ask(served.url, "POST", SEARCH, {}).json()["sessions"][0]["owner"]
        assert self.search(served, owner={"type": "user", "owner_urns": [me]}) == [second, first]
        assert KEY not in me
        assert ask(served.url, "PUT", "sessions/none/project", {"project_id": "q"}).status_code == 404

    def test_they_are_found_by_how_they_ended(self, served: Served) -> None:
        active, failed = session_of(served), session_of(served)
        finish = {"reason": {"type": "errored"}, "detail": "a test"}
        assert ask(served.url, "POST", f"sessions/{failed}/finish", finish).status_code == 204
        ask(served.url, "POST", f"sessions/{failed}/finish", {"reason": {"type": "success"}})
        assert self.search(served, statuses=[{"type": "active"}]) == [active]
        assert self.search(served, statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [failed]
        assert self.search(served, statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []

    def test_pages_have_each_session_once(self, served: Served) -> None:
        sessions = [session_of(served) for _ in range(5)]
        listed, cursor = [], None
        for _ in range(3):
            page = ask(served.url, "POST", SEARCH, {"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
            listed += [session["session_id"] for session in page["sessions"]]
            cursor = page["next_cursor"]
        assert cursor is None
        assert listed == sessions[::-1]


class TestDownloads:
    def urls(self, served: Served) -> dict[str, str]:
        _, model = begun(served.url)
        saved = done(served.url, "save_weights_external", saving(model, 1, "w"))
        assert saved["size_bytes"] == served.trainer.theta.nbytes
        answer = ask(served.url, "GET", f"training_runs/{model}/checkpoints/external_weights/w/external_weights_urls")
        urls: dict[str, str] = answer.json()["urls"]
        return urls

    def test_an_address_needs_no_key_and_opens_one_file(self, served: Served) -> None:
        url = self.urls(served)["model.bin"]
        assert httpx.get(url).content == served.trainer.theta.tobytes()
        for other in (url[:-1], url.replace("model.bin", "checkpoint.json"), url.replace("/w/", "/v/")):
            assert httpx.get(other).status_code == 403
        until = url.split("/signed/")[1].partition("/")[0]
        assert httpx.get(url.replace(until, str(int(until) + 1))).status_code == 403, "nor does it last longer"

    def test_it_holds_for_an_hour(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.tinker.downloads.HOLDS_S", 1)
        url = self.urls(served)["model.bin"]
        until = time.monotonic() + DEADLINE_S
        while (answer := httpx.get(url)).status_code == 200:
            assert time.monotonic() < until, "it holds for too long"
            time.sleep(0.2)
        assert answer.status_code == 403
        assert "get_external_weights_urls" in answer.text


class TestCopies:
    def test_a_copy_outlives_its_source_and_is_made_once(self, served: Served) -> None:
        session, model = begun(served.url)
        saved = accepted(served.url, "save_weights", saving(model, 1, "s"))
        source = result(served.url, saved)["path"]
        body = {"source_path": source, "destination_project_id": "archive", "ttl_seconds": 3600}
        headers = {"x-idempotency-key": "one"}
        (path,) = {ask(served.url, "POST", "copy_weights", body, **headers).json()["tinker_path"] for _ in range(2)}
        other = ask(served.url, "POST", "copy_weights", body, **{"x-idempotency-key": "two"}).json()["tinker_path"]
        assert len({source, path, other}) == 3
        usage = ask(served.url, "GET", "billing/usage/checkpoints/current?project_id=archive").json()["data"]
        assert [(item["checkpoint_count"], item["project_id"]) for item in usage] == [(2, "archive")]
        runs = ask(served.url, "GET", "training_runs?project_id=archive").json()["training_runs"]
        assert {run["training_run_id"] for run in runs} == {item.split("/")[2] for item in (path, other)}
        kind_and_name = source.removeprefix("tinker://").partition("/")[2]
        assert ask(served.url, "DELETE", f"training_runs/{model}/checkpoints/{kind_and_name}").status_code == 204
        loaded = {"session_id": session_of(served), "model_seq_id": 0, "path": path, "optimizer": True}
        ask(served.url, "POST", f"sessions/{session}/finish", {})
        assert done(served.url, "load_weights", loaded)["path"] == path
