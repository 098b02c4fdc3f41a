"""Replicas of two ranks with the real vLLM: parity with Hugging Face over updates in flight, a rank that dies, and no
process that outlives what it belongs to."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from inference_support import START_S, Room, engine_pid, make_config, prompt_of, random_model, request, start_one
from replica_support import joined, losses, next_loss, router_of
from run_support import shm_left_since

from trireme.process.waits import get

TOLERANCE = 1e-4
GONE_S = 30.0
RANKS = 2


@contextmanager
def replica(family: str, directory: Path) -> Iterator[Room]:
    """A replica of two ranks. When it has been stopped nothing is left of it."""
    shared_memory = set(os.listdir("/dev/shm"))
    random_model(family, False, seed=0).save_pretrained(directory / "model")
    config = make_config(directory / "model", False, tensor_parallel=RANKS)
    config = config.model_copy(update={"timeouts": config.timeouts.model_copy(update={"step_s": START_S})})
    group = start_one(config, directory / "logs", RANKS)
    try:
        assert not {name for name in set(os.listdir("/dev/shm")) - shared_memory if name.startswith("psm_")}
        router = router_of({}, patience_s=config.patience_s, update_s=config.timeouts.update_s)
        yield Room(family, False, group, router, engine_pid(group))
    finally:
        group.stop()
    assert shm_left_since(shared_memory) == set()


def processes(room: Room) -> tuple[int, ...]:
    """The actor, the engine, the ranks."""
    pids: tuple[int, ...] = get(room.group.heartbeat_ref(0), owner="the replica", timeout_s=60).pids
    assert len(set(pids)) == 2 + RANKS
    return pids


def assert_gone(pids: Sequence[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, timeout=GONE_S)[1] == []


async def sample(room: Room, name: str, number: int, length: int) -> list[asyncio.Task[Any]]:
    """Requests, each of which has got 16 tokens, as one that started after all others has."""
    prompts = {f"{name} {i}": prompt_of(5 + 40 * i, seed=i) for i in range(number)}
    running = [asyncio.create_task(room.router.sample(request(key, prompts[key], length))) for key in prompts]
    await room.router.sample(request(f"{name} probe", prompt_of(4), 16))
    return running


@pytest.mark.long
def test_ranks_take_updates_in_flight_die_together_and_leave_nothing(ray_cluster: str, tmp_path: Path) -> None:
    """With experts, of which each rank has a part. Answers over three versions agree with the models of their tokens.
    The death of a rank is that of its engine, which the actor survives."""
    with replica("qwen3_moe", tmp_path) as room:
        actor, *lost = processes(room)
        died = f"inference replica 0: rank 1 of its engine, process {lost[-1]}, died"

        async def a_rank_dies() -> None:
            await joined(room.router.source, 0, room.group.client(0))
            assert (await room.update()).drift.largest < TOLERANCE
            running = await sample(room, "long", 3, 120)
            assert (await room.update()).drift.largest < TOLERANCE
            await room.router.sample(request("between", prompt_of(4), 16))
            assert (await room.update()).drift.largest < TOLERANCE
            for i, answer in enumerate(await asyncio.gather(*running)):
                assert [span.identity.version for span in answer.spans] == [0, 1, 2]
                assert room.difference(prompt_of(5 + 40 * i, seed=i), answer) < TOLERANCE
            (waiting,) = await sample(room, "lost", 1, 900)
            os.kill(lost[-1], signal.SIGKILL)
            assert await next_loss(room.router.source) == 0
            assert (await losses(room.router.source))[0].split("; ")[0] == died
            assert not waiting.done(), "it waits for a successor"
            waiting.cancel()

        asyncio.run(a_rank_dies())
        assert_gone(lost)
        assert psutil.pid_exists(actor)
