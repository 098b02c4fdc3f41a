"""What differs between vLLM's builds, and how the list of a wheel's files is read from an index without parts."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from zipfile import ZipFile

import pytest

import vllm_builds
from vllm_builds import DIFFERENT, RegistryRefused, python_files, record_of_cuda_build, surprises

SAME = {"vllm/a.py": "sha256=1"}
CPU, CUDA = SAME | dict.fromkeys(DIFFERENT, "sha256=2"), SAME | dict.fromkeys(DIFFERENT, "sha256=3")
RECORD = "vllm/a.py,sha256=1,10\nvllm/_C.so,sha256=2,10\nbin/b.py,sha256=3,10\nvllm-1.0.dist-info/RECORD,,\n"


def test_the_known_differences_are_no_surprise() -> None:
    assert surprises(CPU, CUDA | {"vllm/third_party/kernel.py": "sha256=4"}) == []


@pytest.mark.parametrize(
    ("cpu", "cuda", "said"),
    [
        (CPU, CUDA | {"vllm/a.py": "sha256=4"}, "vllm/a.py differs"),
        (CPU, CUDA | {"vllm/_version.py": "sha256=2"}, "vllm/_version.py is the same in both"),
        (CPU, CUDA | {"vllm/b.py": "sha256=4"}, "vllm/b.py is only in the CUDA build"),
        (CPU | {"vllm/b.py": "sha256=4"}, CUDA, "vllm/b.py is only in the build for CPUs"),
    ],
)
def test_any_other_difference_is_one(cpu: dict[str, str], cuda: dict[str, str], said: str) -> None:
    assert surprises(cpu, cuda) == [said]


def test_only_python_files_of_vllm_are_compared() -> None:
    assert python_files(RECORD) == {"vllm/a.py": "sha256=1"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the only index, which does not give parts of files."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_wheel_is_fetched_whole_where_the_index_gives_no_parts_and_its_list_is_kept(index: Path) -> None:
    wheel = index / "vllm-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as made:
        made.writestr("vllm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n")
        made.writestr("vllm-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("vllm-1.0.dist-info/RECORD", RECORD)
    assert record_of_cuda_build("1.0") == RECORD
    wheel.unlink()
    assert record_of_cuda_build("1.0") == RECORD
    assert [path.name for path in (index / "cache" / "trireme").iterdir()] == ["vllm-1.0-RECORD"]


def test_an_index_without_the_build_is_said(index: Path) -> None:
    with pytest.raises(RegistryRefused, match=r"No matching distribution found for vllm==1\.0"):
        record_of_cuda_build("1.0")


def test_an_index_that_takes_the_connection_and_says_nothing_is_left(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/vllm-1.0-py3-none-any.whl"
        report = json.dumps({"install": [{"download_info": {"url": url}}]})
        monkeypatch.setattr(vllm_builds, "pip", lambda *_, timeout_s: report)
        monkeypatch.setattr(vllm_builds, "ASK_S", 2)
        with pytest.raises(RegistryRefused, match="no whole answer within 2 s"):
            record_of_cuda_build("1.0")
