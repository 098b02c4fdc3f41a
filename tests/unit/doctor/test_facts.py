"""What a node reports of itself, on this machine."""

import resource
import sys
from pathlib import Path

import pytest

from trireme.doctor import facts as module
from trireme.doctor.facts import Questions, collect


def test_a_node_reports_what_it_has(tmp_path: Path) -> None:
    found = collect(Questions(str(tmp_path / "not" / "there"), peers=["127.0.0.1", "255.255.255.255"]))
    assert {"python", "torch", "ray", "source", "driver"} <= set(found.versions)
    assert found.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.disk_free > 0, "of the nearest directory that is there"
    assert found.available_bytes <= found.machine.memory_bytes
    assert found.routes["127.0.0.1"] == "lo"
    assert found.kernel_ports[0] < found.kernel_ports[1]
    assert found.model is None


def test_secrets_are_told_by_a_digest_with_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct horse battery")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("UNRELATED", "x")
    one, same, other = (collect(Questions(salt=salt)).variables for salt in ("a", "a", "b"))
    assert one["HF_HOME"] == "/models"
    assert "UNRELATED" not in one
    assert "horse" not in str(one)
    assert one["HF_TOKEN"] == same["HF_TOKEN"] != other["HF_TOKEN"]


@pytest.mark.parametrize("value", ["http://me:horse@proxy:3128", "https://horse@proxy", "me:horse@proxy:3128"])
def test_a_proxy_may_have_a_password(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("https_proxy", value)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    found = collect(Questions(salt="a")).variables
    assert "horse" not in found["https_proxy"]
    assert found["HTTP_PROXY"] == "http://proxy:3128"


def test_variables_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert collect(Questions()).chosen == {"GLOO_SOCKET_IFNAME": "docker0"}
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "90")
    assert collect(Questions()).stop_wait_s == 90
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S")
    assert collect(Questions()).stop_wait_s == 3


def test_paths_that_ray_adds_to_those_of_its_workers_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/code/src:/opt/games")
    here = collect(Questions()).variables
    unpacked = "/tmp/ray/session_1/runtime_resources/py_modules_files/_ray_pkg_1"
    monkeypatch.setenv("PYTHONPATH", f"{unpacked}:/code/src:/opt/games:/code/src")
    assert collect(Questions()).variables == here
    monkeypatch.setenv("PYTHONPATH", f"{unpacked}:/code/src:/opt/games:/opt/others")
    assert collect(Questions()).variables["PYTHONPATH"] == "/code/src:/opt/games:/opt/others"
    monkeypatch.setenv("PYTHONPATH", unpacked)
    assert "PYTHONPATH" not in collect(Questions()).variables


def test_the_group_limits_tasks(tmp_path: Path) -> None:
    assert module._left_in_group(tmp_path) == module.UNLIMITED
    (tmp_path / "pids.max").write_text("max\n")
    (tmp_path / "pids.current").write_text("12\n")
    assert module._left_in_group(tmp_path) == module.UNLIMITED
    (tmp_path / "pids.max").write_text("100\n")
    assert module._left_in_group(tmp_path) == 88


def test_the_source_is_that_of_all_packages() -> None:
    source = Path(module.__file__).parents[2]
    packages = {file.parent.name for file in source.glob("*/__init__.py")} | {
        directory.name for directory in source.iterdir() if any(directory.glob("*.py"))
    }
    assert packages == set(module.ROOMS)


def test_the_source_has_a_digest_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str, *places: Path) -> str:
        """Of a package at each of two places, which may be the same."""
        for room, place in zip(("trireme", "trainer"), places, strict=True):
            (place / room).mkdir(parents=True, exist_ok=True)
            (place / room / "__init__.py").touch()
            (place / room / "a.py").write_text(text)
        monkeypatch.setattr(sys, "path", [str(place) for place in dict.fromkeys(places)])
        module.source_digest.cache_clear()
        return module.source_digest()

    one = tmp_path / "one"
    try:
        first = digest("a = 1\n", one, one)
        assert digest("a = 1\n", tmp_path / "two", tmp_path / "three") == first, "Ray brings each package by itself"
        assert digest("a = 2\n", one, one) != first
    finally:
        module.source_digest.cache_clear()
