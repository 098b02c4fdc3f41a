"""A spare becomes the successor of a replica: real Ray and vLLM on CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_support import BOUND, CHAOS, end_of, parts_of, started, wait_for
from inference_support import Room, make_config, prompt_of, random_model, request
from run_support import assert_bound_and_conservation

from inference import handle as group_module
from inference.actor import has_ended
from inference.handle import InferenceHandle
from trireme.core.errors import EXIT_SIGTERM
from trireme.process.device import VISIBLE
from trireme.process.environ import STACKS
from trireme.process.waits import get

START_S = 300.0


@pytest.fixture(scope="module")
def group(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceHandle]:
    """One replica, which has two GPUs of those that the cluster says it has, and a spare, which has none."""
    directory = tmp_path_factory.mktemp("spare")
    random_model("qwen3", False, seed=0).save_pretrained(directory / "model")
    config = make_config(directory / "model", False, spare=True)
    options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    made = InferenceHandle.start(config, [{**options, "num_gpus": 2}], directory / "logs")
    get(made.ready_ref(0), who="the replica", timeout_s=START_S)
    yield made
    made.stop()


def pids(group: InferenceHandle) -> tuple[int, ...]:
    """Returns the process ids of the replica: its actor and its engine."""
    found: tuple[int, ...] = get(group.heartbeat_ref(0), who="the replica", timeout_s=START_S).pids
    return found


def visible_gpus(actor: Any) -> str:
    """Returns the GPUs that the process of an actor sees."""
    found: str = get(actor.__ray_call__.remote(lambda _: os.environ[VISIBLE]), who="an actor", timeout_s=START_S)
    return found


def test_it_takes_over_number_place_and_gpus_of_a_killed_one(group: InferenceHandle) -> None:
    logs = group.log_dir
    assert logs is not None
    gpus = get(group.ready_ref(0), who="the replica", timeout_s=START_S).devices
    assert len(gpus.split(",")) == 2
    group.keep_spares()
    (spare,) = group._spares.values()
    get(spare.prepared, who="the spare", timeout_s=START_S)
    assert visible_gpus(spare.handle) == ""
    said = (logs / "inference_spare.log").read_text()
    assert not any(child.is_running() for child in spare_process(said).children()), "it has no engine"

    before = pids(group)
    nice = psutil.Process(before[1]).nice()
    os.kill(before[0], signal.SIGKILL)
    health = get(group.replace(0), who="the successor", timeout_s=START_S)
    after = pids(group)
    assert after == (spare_process(said).pid, health.engine_pid)
    assert all(map(has_ended, before)), "their memory is free"
    assert health.devices == gpus == visible_gpus(group.replicas[0])
    assert psutil.Process(health.engine_pid).nice() == nice, "only what nobody waited for was to yield to others"
    assert f"process {after[0]}, a spare until now, succeeds replica 0" in (logs / "inference_0.log").read_text()
    assert (logs / "inference_spare.log").read_text() == said, "it writes to the log of its number from now on"

    room = Room("qwen3", False, group, group.router_factory()(), health.engine_pid)

    os.kill(health.engine_pid, STACKS)
    deadline = time.monotonic() + START_S
    while "run_busy_loop" not in (logs / "inference_0.log").read_text():
        assert time.monotonic() < deadline, "its engine wrote no stacks"
        time.sleep(0.1)

    async def sample() -> None:
        await room.update()
        answer = await room.router.sample(request("a", prompt_of(20), 24))
        assert room.difference(prompt_of(20), answer) < 1e-4

    asyncio.run(sample())


def test_the_loss_of_a_spare_is_the_loss_of_nothing_else(
    group: InferenceHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.keep_spares()
    (spare,) = group._spares.values()
    get(spare.prepared, who="the spare", timeout_s=START_S)
    made: list[int | None] = []
    create = group_module._create
    monkeypatch.setattr(
        group_module, "_create", lambda config, index, *rest: (made.append(index), create(config, index, *rest))[1]
    )
    assert group.log_dir is not None
    said = (group.log_dir / "inference_spare.log").read_text()
    lost = spare_process(said)
    lost.kill()
    lost.wait(START_S)
    os.kill(pids(group)[0], signal.SIGKILL)
    get(group.replace(0), who="the successor", timeout_s=START_S)
    assert made == [0], "a new process"
    assert lost.pid not in pids(group)


def spare_process(said: str) -> psutil.Process:
    """The newest of those that the log of spares tells of."""
    (line,) = (line for line in said.splitlines()[-1:] if "is a spare" in line)
    return psutil.Process(int(line.split("process ")[1].split()[0]))


@pytest.mark.long
def test_a_run_goes_on_with_its_spare(tmp_path: Path) -> None:
    flags = [*CHAOS, "--inference.spare", "true", "--max-steps", "9999"]
    logs = tmp_path / "run" / "logs" / "attempt_1"
    with started(tmp_path, flags, {}) as running:

        def has_spare() -> bool:
            log = logs / "inference_spare.log"
            return log.exists() and "is a spare" in log.read_text()

        def serves_again() -> bool:
            incidents = tmp_path / "run" / "incidents.jsonl"
            return incidents.exists() and "its successor serves" in incidents.read_text()

        wait_for("a spare", has_spare, running, START_S)
        os.kill(parts_of(running.mark)["inference_0"][0], signal.SIGKILL)
        wait_for("its successor", serves_again, running, START_S)
        running.process.send_signal(signal.SIGTERM)
        ended = end_of(running, tmp_path)
    assert ended.code == EXIT_SIGTERM, ended.out
    ended.assert_nothing_left()
    assert "a spare until now, succeeds replica 0" in (logs / "inference_0.log").read_text()
    assert {row["attempt"] for row in ended.rows} == {1}, "the trainer has seen nothing of it"
    assert_bound_and_conservation(ended, BOUND)
