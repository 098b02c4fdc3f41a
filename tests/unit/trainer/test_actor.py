"""Where the store of a trainer listens, and when a shard gives way to engines.

tests/e2e/test_run.py looks at all processes of a run."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer import actor
from trireme.config import CommonConfig, Config
from trireme.config.load import load_as
from trireme.config.sft import SftConfig

CONFIGS = Path(__file__).parents[3] / "configs"


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


@pytest.mark.parametrize(
    ("schema", "name", "device", "expected"),
    [
        (Config, "quickstart", "cpu", actor.BEHIND_ENGINES),
        (Config, "quickstart", "gpu", 0),
        (SftConfig, "sft-base", "cpu", 0),
    ],
)
def test_a_shard_gives_way_to_engines_on_cpus(
    schema: type[CommonConfig], name: str, device: str, expected: int
) -> None:
    config = load_as(schema, ["@", str(CONFIGS / f"{name}.toml"), "--cluster.device", device], {}).config
    assert actor.niceness(config) == expected
