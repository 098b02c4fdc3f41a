"""Connections on the loopback: who is answered, and what cannot be reached."""

import socket

import pytest

from trireme.doctor import links
from trireme.doctor.links import Endpoint, Listener, rate, reach

LOCAL, ELSEWHERE = "127.0.0.1", "127.0.0.2"
TOKEN = b"0123456789abcdef"


@pytest.fixture
def listener() -> Listener:
    return Listener(TOKEN)


def test_what_does_not_listen_or_not_answer_is_not_reached(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    at = listener.add(LOCAL)
    assert "refused" in reach(Endpoint(ELSEWHERE, at.port), TOKEN)
    assert rate(Endpoint(ELSEWHERE, at.port), TOKEN) == 0.0
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


def test_endpoints_are_written_as_usual() -> None:
    assert (str(Endpoint("10.0.0.1", 5)), str(Endpoint("fe80::1", 5))) == ("10.0.0.1:5", "[fe80::1]:5")
