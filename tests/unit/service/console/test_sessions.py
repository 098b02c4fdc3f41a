"""What the console shows of sessions that another process stores."""

from pathlib import Path

import pytest
from console_support import write_sessions

from service.console.sessions import RunSessions, StoredSessions
from service.requests import RequestRefused
from service.sessions.records import FORMAT, decode
from service.sessions.session import LOST, SessionBook
from service.store import Store


def test_stored_sessions_are_shown_as_the_service_shows_its_own(tmp_path: Path) -> None:
    store, book = write_sessions(tmp_path), SessionBook()
    for row in store.rows():
        book.apply(decode(row))
    beside, inside = RunSessions(StoredSessions(tmp_path), lambda: None), RunSessions(lambda: book, lambda: None)
    assert beside.listing() == inside.listing()
    assert len(beside.listing()["sessions"]) == 2
    for name in book.sessions:
        assert beside.tree(name) == inside.tree(name)
        assert beside.tokens(name, 4, 0) == inside.tokens(name, 4, 0)
    store.close()
    assert beside.listing() == inside.listing()


def test_a_forgotten_session_is_gone(tmp_path: Path) -> None:
    store, shown = write_sessions(tmp_path), RunSessions(StoredSessions(tmp_path), lambda: None)
    assert len(shown.listing()["sessions"]) == 2
    store.remove("ended-one")
    assert [session["session"] for session in shown.listing()["sessions"]] == ["open-one"]
    with pytest.raises(RequestRefused, match="ended-one"):
        shown.tree("ended-one")
    store.close()


def test_sessions_of_a_machine_that_was_started_again_have_ended(tmp_path: Path) -> None:
    write_sessions(tmp_path).close()
    store = Store(tmp_path, FORMAT, "another boot")
    assert store.open()
    store.note_boot()
    store.close()
    listed = {
        session["session"]: session["reason"]
        for session in RunSessions(StoredSessions(tmp_path), lambda: None).listing()["sessions"]
    }
    assert listed == {"open-one": LOST, "ended-one": "by its harness"}
