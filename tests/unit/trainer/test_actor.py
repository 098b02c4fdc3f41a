"""Where the store of a trainer listens, and when a shard gives way to engines.

tests/e2e/test_run.py looks at all processes of a run."""

from types import SimpleNamespace

import psutil
import pytest

from trainer import actor


def listening() -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.fixture
def shard() -> actor.ShardActor:
    double = object.__new__(actor.ShardActor)
    double._config = SimpleNamespace(timeouts=SimpleNamespace(start_s=30), cluster=SimpleNamespace(port_range=()))  # type: ignore[assignment]
    return double


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_store_listens_at_its_node_alone(shard: actor.ShardActor, ip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor.ray.util, "get_node_ip_address", lambda: ip)
    before = listening()
    address = shard.rendezvous()
    other = shard._open_store(*address)
    shard._store.set("key", "value")
    assert (other.get("key"), other.host) == (b"value", ip)
    assert listening() - before == {ip} - before
    del shard._store
