"""What a machine has: its driver's answers, limits of control groups, and what other programs say of it."""

import os
import shutil
from pathlib import Path

import pytest

from trireme.process import machine
from trireme.process.machine import Gpu, this_machine

MIB = 2**20
ANSWER = """\
0, GPU-aaaa, 81559, 81000
1, GPU-bbbb, 81559, 40000
2, GPU-bbcc, [N/A], [N/A]
"""
BIG, HALF = Gpu(81559 * MIB, 81000 * MIB), Gpu(81559 * MIB, 40000 * MIB)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with three GPUs, whose nvidia-smi prints the file that is returned."""
    listed = os.listdir
    devices = ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(os, "listdir", lambda path=".": devices if path == "/dev" else listed(path))
    answer = tmp_path / "answer"
    answer.write_text(ANSWER)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ -f {answer} ] && cat {answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answer


@pytest.mark.parametrize(
    ("visible", "count", "gpus"),
    [
        (None, 3, (BIG, HALF)),
        ("0", 1, (BIG,)),
        ("1,0", 2, (BIG, HALF)),
        ("0,1,2,3", 3, (BIG, HALF)),
        ("GPU-bbb", 1, (HALF,)),
        ("2", 1, ()),  # its memory is the host's
        ("", 0, ()),
        ("-1", 0, ()),
    ],
)
def test_memory_of_the_visible_gpus(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, gpus: tuple[Gpu, ...]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    examined = this_machine()
    assert (examined.num_gpus, examined.gpus) == (count, gpus)
    assert examined.smallest_gpu == min(gpus, key=lambda gpu: gpu.free_bytes, default=None)


def test_a_driver_that_does_not_answer_and_none(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.unlink()
    examined = this_machine()
    assert (examined.num_gpus, examined.gpus) == (3, ())
    monkeypatch.setattr(os, "listdir", lambda _: ["null"])
    monkeypatch.setattr(machine.subprocess, "run", lambda *_args, **_options: pytest.fail("asked a driver"))
    assert this_machine().num_gpus == 0


def test_host_memory_and_the_share_of_rays_object_store() -> None:
    examined = this_machine()
    assert examined.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < examined.free_bytes < examined.memory_bytes
    assert examined.shm_bytes == shutil.disk_usage("/dev/shm").total
    assert 0 < examined.store_bytes <= examined.memory_bytes * 0.3
    from ray._private import ray_constants

    assert machine.STORE_SHARE == ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION
    assert machine.STORE_BYTES == ray_constants.DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        (
            "0::/a/b\n",
            {
                "memory.max": "900\n",
                "memory.current": "850\n",
                "memory.stat": "anon 20\nfile 800\nactive_file 30\ninactive_file 700\nshmem 70\n",
                "a/memory.max": "max\n",
                "a/b/memory.max": "700\n",
            },
            {(900, 780), (700, 700)},
        ),
        ("0::/elsewhere\n", {"memory.max": "900\n"}, {(900, 900)}),  # in a container the mount is its own group
        (
            "4:memory:/a\n3:cpu:/\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "800\n",
                "memory/a/memory.usage_in_bytes": "600\n",
                "memory/a/memory.stat": "total_active_file 10\ntotal_inactive_file 40\n",
            },
            {(800, 250)},
        ),
        ("0::/\n", {}, set()),
    ],
)
def test_limits_of_control_groups_and_what_is_left_of_them(
    tmp_path: Path, group: str, files: dict[str, str], limits: set[tuple[int, int]]
) -> None:
    (tmp_path / "groups").write_text(group)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text)
    assert set(machine._group_memory(tmp_path / "groups", tmp_path / "mount")) == limits
