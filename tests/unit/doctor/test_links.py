"""Connections on the loopback: who is answered, and what cannot be reached."""

import socket

import pytest

from trireme.core.errors import RoomFailed
from trireme.doctor import links
from trireme.doctor.links import Endpoint, Listener, rate, reach

LOCAL, ELSEWHERE = "127.0.0.1", "127.0.0.2"
TOKEN = b"0123456789abcdef"


@pytest.fixture
def listener() -> Listener:
    return Listener(TOKEN)


def test_a_listener_is_reached_and_confirms_what_arrives(listener: Listener) -> None:
    at = listener.add(LOCAL)
    assert reach(at, TOKEN) == ""
    assert rate(at, TOKEN) > 0


def test_what_does_not_listen_is_not_reached(listener: Listener) -> None:
    at = listener.add(LOCAL)
    assert "refused" in reach(Endpoint(ELSEWHERE, at.port), TOKEN)
    assert rate(Endpoint(ELSEWHERE, at.port), TOKEN) == 0.0


def test_a_node_that_does_not_answer_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 0.05)
    with socket.create_server((LOCAL, 0)) as silent:
        assert "timed out" in reach(Endpoint(*silent.getsockname()), TOKEN)


def test_callers_without_the_token_get_no_answer(listener: Listener) -> None:
    at = listener.add(LOCAL)
    for wrong in (b"0123456789abcdeF", b"short"):
        with socket.create_connection((at.host, at.port), 5) as connection:
            connection.sendall(wrong)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert "another program" in reach(at, b"another one, 16b")
    assert reach(at, TOKEN) == "", "it still listens"


def test_it_listens_within_a_range(listener: Listener) -> None:
    first = min((listener.add(LOCAL) for _ in range(2)), key=lambda at: at.port)  # never the last port of all
    with pytest.raises(RoomFailed, match=rf"{first.port}-{first.port} \(cluster.ports\)"):
        listener.add(LOCAL, range(first.port, first.port + 1))
    second = listener.add(LOCAL, [first.port, 0])
    assert second.port != first.port, "the next one that is free"


def test_an_address_of_another_machine_cannot_be_listened_at(listener: Listener) -> None:
    with pytest.raises(RoomFailed, match=r"cannot listen at 192\.0\.2\.99, at a free port"):
        listener.add("192.0.2.99")


def test_endpoints_are_written_as_usual() -> None:
    assert (str(Endpoint("10.0.0.1", 5)), str(Endpoint("fe80::1", 5))) == ("10.0.0.1:5", "[fe80::1]:5")
