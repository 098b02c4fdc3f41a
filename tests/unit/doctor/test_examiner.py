"""Two examiners, as on two nodes, in this process."""

from pathlib import Path

import pytest

from trireme.doctor import examiner as module
from trireme.doctor.examiner import Examiner, Open
from trireme.doctor.facts import Questions

TOKEN = b"0123456789abcdef"


@pytest.fixture
def two():
    made = Examiner("one", 0), Examiner("two", 1)
    yield made
    for each in made:
        each.close()


def test_they_find_each_other(two: tuple[Examiner, Examiner]) -> None:
    one, other = two
    opened: Open = other.listen("127.0.0.1", range(23000, 23100), TOKEN, {})
    one.listen("127.0.0.1", (), TOKEN, {})
    assert opened.errors == []
    assert len(opened.endpoints) == 3, "any port, the first and the last of the range"
    assert all(23000 <= at.port < 23100 for at in opened.endpoints[1:])
    links = one.reach({"two": opened.endpoints})
    assert [(link.source, link.target, link.error) for link in links] == [("one", "two", "")] * 3
    assert one.rate(opened.endpoints[0]) > 0


def test_it_listens_at_the_interface_that_a_user_has_chosen(
    two: tuple[Examiner, Examiner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "address_of", lambda interface, like: {"docker0": "127.0.0.9"}[interface])
    opened = two[0].listen("127.0.0.1", (), TOKEN, {"GLOO_SOCKET_IFNAME": "docker0"})
    assert [at.host for at in opened.endpoints] == ["127.0.0.1", "127.0.0.9"]


def test_an_address_where_it_cannot_listen_is_said(two: tuple[Examiner, Examiner]) -> None:
    opened = two[0].listen("192.0.2.99", (), TOKEN, {})
    assert opened.endpoints == []
    assert "cannot listen at 192.0.2.99" in opened.errors[0]


def test_it_answers_the_nonce(two: tuple[Examiner, Examiner], tmp_path: Path) -> None:
    (tmp_path / "nonce").write_text("salt")
    facts = two[1].collect(Questions(str(tmp_path), "nonce", salt="salt"))
    assert facts.nonce_seen == "salt"
    assert (tmp_path / "nonce.1").read_text() == "salt"


def test_it_tells_the_time(two: tuple[Examiner, Examiner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 60.0)
    assert two[0].now() == 60.0
