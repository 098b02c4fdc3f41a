"""What is read of a journal while another process writes it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from console_support import answer, records_of, turn, write_sessions

from service.console import journal
from service.console.journal import JournalReader
from service.sessions.journal import SessionJournal
from service.sessions.records import SessionForgotten, TurnAnswered
from service.sessions.session import LOST, SessionBook
from service.sessions.tree import ROOT


def read_in(reader: JournalReader, most_bytes: int = 1 << 20) -> int:
    """Looks until nothing is unread. Returns how many looks that took."""
    looks = 1
    while reader.look(most_bytes):
        looks += 1
        assert looks < 10_000
    return looks


def test_a_session_is_as_the_service_has_it(tmp_path: Path) -> None:
    write_sessions(tmp_path)
    reader, book = JournalReader(tmp_path), SessionBook()
    read_in(reader)
    for record in SessionJournal(tmp_path, "boot").replay():
        book.apply(record)
    assert list(reader.sessions) == list(book.sessions) == ["open-one", "ended-one"]
    for name, known in book.sessions.items():
        found = reader.session(name)
        assert found is not None
        session, left_out = found
        assert (left_out, session.rewards, session.ended) == (0, known.rewards, known.ended)
        assert len(session.tree.nodes) == len(known.tree.nodes)
        for node in range(len(known.tree.nodes)):
            assert np.array_equal(session.tree.tokens(node), known.tree.tokens(node))
            assert np.array_equal(session.tree.logprobs(node), known.tree.logprobs(node))
            assert session.tree.nodes[node].spans == known.tree.nodes[node].spans
            assert session.tree.nodes[node].delivered == known.tree.nodes[node].delivered


def test_half_a_record_waits_for_its_rest(tmp_path: Path) -> None:
    write_sessions(tmp_path).close()
    file = tmp_path / "000000.log"
    whole = file.read_bytes()
    reader = JournalReader(tmp_path)
    for end in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:end])
        reader.look()
    file.write_bytes(whole)
    read_in(reader)
    assert reader.sessions["ended-one"].ended == "by its harness"
    assert reader.sessions["open-one"].turns == 2


def test_what_was_forgotten_is_gone(tmp_path: Path) -> None:
    writer, reader = write_sessions(tmp_path), JournalReader(tmp_path)
    read_in(reader)
    writer.append(SessionForgotten("ended-one", 1008.0))
    read_in(reader)
    assert list(reader.sessions) == ["open-one"]
    assert reader.session("ended-one") is None


def test_a_session_whose_file_was_removed_is_gone(tmp_path: Path) -> None:
    write_sessions(tmp_path)
    reader = JournalReader(tmp_path)
    read_in(reader)
    os.unlink(tmp_path / "000000.log")
    assert reader.session("open-one") is None


def test_sessions_of_a_machine_that_was_started_again_have_ended(tmp_path: Path) -> None:
    write_sessions(tmp_path).close()
    SessionJournal(tmp_path, "another boot").replay()
    reader = JournalReader(tmp_path)
    read_in(reader)
    assert reader.sessions["open-one"].ended == LOST
    assert reader.sessions["ended-one"].ended == "by its harness"


def test_of_a_session_that_is_too_long_the_beginning_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SessionJournal(tmp_path, "boot")
    writer.replay()
    for record in records_of("long"):
        writer.append(record)
    for _ in range(10):
        writer.append(TurnAnswered("long", 1010.0, turn(ROOT, "Sort: 21", answer("12"))))
    reader = JournalReader(tmp_path)
    read_in(reader)
    monkeypatch.setattr(journal, "SESSION_BYTES", sum(length for _, _, length in reader.sessions["long"].places[:7]))
    found = reader.session("long")
    assert found is not None
    assert found[1] == 8
    assert found[0].tree.counts.turns == 4
