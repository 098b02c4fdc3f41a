"""By which interface processes reach each other."""

import os
import socket
from types import SimpleNamespace

import pytest

from trireme.core.errors import RoomFailed
from trireme.process import interfaces

ROUTES = {"10.0.0.7": "10.0.0.5", "192.168.1.7": "192.168.1.5", "10.9.9.9": "10.8.8.8"}
"""The address of this node from which the kernel would reach another: two networks, and one of no interface."""


class Probe:
    """Stands for a UDP socket of a node with several networks."""

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *error: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] not in ROUTES:
            raise OSError(101, "Network is unreachable")
        self.address = ROUTES[address[0]]

    def getsockname(self) -> tuple[str, int]:
        return self.address, 4242


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": "192.168.1.5"}
    interfaces_of_machine = {
        name: [SimpleNamespace(address="02:00:00:00:00:01"), SimpleNamespace(address=ip)]
        for name, ip in addresses.items()
    }
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: interfaces_of_machine)
    names = {name: getattr(socket, name) for name in ("AF_INET", "AF_INET6", "SOCK_DGRAM")}
    monkeypatch.setattr(interfaces, "socket", SimpleNamespace(**names, socket=Probe))


@pytest.mark.usefixtures("two_networks")
def test_gloo_and_nccl_take_the_way_to_shard_0_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    interfaces.choose_interface("10.0.0.7")
    assert {name: os.environ[name] for name in chosen} == chosen
    for host, interface in (("10.0.0.7", "eth0"), ("192.168.1.7", "eth1")):
        for name in chosen:
            monkeypatch.delenv(name)
        interfaces.choose_interface(host)
        assert [os.environ[name] for name in chosen] == [interface, f"={interface}"]


@pytest.mark.usefixtures("two_networks")
@pytest.mark.parametrize(
    ("host", "reason"),
    [("172.16.0.1", "no route .*unreachable"), ("10.9.9.9", "no network interface with the address 10.8.8.8")],
)
def test_a_first_shard_that_cannot_be_reached_is_said(host: str, reason: str) -> None:
    with pytest.raises(RoomFailed, match=reason):
        interfaces.interface_towards(host)


def test_on_one_machine_it_is_the_loopback() -> None:
    """As the kernel of this machine routes it."""
    assert {interfaces.interface_towards(host) for host in ("127.0.0.1", "127.0.0.2", "::1")} == {"lo"}


def test_ports_are_taken_in_order_and_their_lack_is_said() -> None:
    with interfaces.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RoomFailed, match=rf"at a port of {port}-{port} \(cluster.ports\): .*in use"):
            interfaces.listen("127.0.0.1", range(port, port + 1))
        with interfaces.listen("127.0.0.1", [port, 0]) as other:
            assert other.getsockname()[1] != port
    with pytest.raises(RoomFailed, match=r"cannot listen at 192\.0\.2\.99"):
        interfaces.listen("192.0.2.99")
