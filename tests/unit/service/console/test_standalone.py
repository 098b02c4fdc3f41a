"""Where the console listens, and which keys open it."""

import socket
from pathlib import Path

import pytest
from console_support import reader_of
from fastapi import FastAPI

from service.console.standalone import address_of, console_keys, is_loopback, serve_console
from service.keys import generate
from service.ports import http_server
from trireme.core.errors import BadInput, RoomFailed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert is_loopback(host)
    assert console_keys(host, None) == []


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "node7", "", "localhost.example.org", "127.0.0.1.nip.io"]
)
def test_elsewhere_a_new_key_is_made_each_time(host: str) -> None:
    assert not is_loopback(host)
    (one,), (other,) = console_keys(host, None), console_keys(host, None)
    assert one.role == "admin"
    assert one.value != other.value
    assert len(one.value) > 40


def test_keys_of_a_file_open_it_on_loopback_too(tmp_path: Path) -> None:
    keys = generate(tmp_path / "keys")
    assert console_keys("127.0.0.1", tmp_path / "keys") == keys


def test_a_file_without_an_admin_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("client 0123456789abcdef\n")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(BadInput, match="has no admin key"):
        console_keys("127.0.0.1", tmp_path / "keys")


def test_a_port_that_is_taken_is_refused_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RoomFailed, match=rf"cannot listen at 127.0.0.1:{port}: .*in use.* a port that is free"):
            serve_console(reader_of(tmp_path), "127.0.0.1", port, None, print)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(RoomFailed, match=r"cannot listen at 192\.0\.2\.1:0"):
        http_server(FastAPI(), "192.0.2.1", 0)


def test_the_address_to_open(tmp_path: Path) -> None:
    keys = generate(tmp_path / "keys")
    server = http_server(FastAPI(), "127.0.0.1", 0)
    assert address_of(server, "localhost", []) == f"http://localhost:{server.port}/console/"
    assert address_of(server, "::1", []) == f"http://[::1]:{server.port}/console/"
    assert address_of(server, "0.0.0.0", keys).endswith(f"/console/#key={keys[1].value}")
