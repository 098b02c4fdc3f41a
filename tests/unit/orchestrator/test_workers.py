"""Worker processes: what comes back, what is killed, and that none is left."""

import asyncio
import json
import math
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

from orchestrator import workers
from orchestrator.worker_process import HEADER
from orchestrator.workers import WorkerDied, WorkerError, Workers, WorkerTimeout, run_in_worker

MODULE = "test_workers"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def pid() -> int:
    return os.getpid()


def hang(*_: object) -> None:
    while True:
        time.sleep(3600)


def a_huge_power() -> int:
    """Holds the interpreter's lock all the time: no signal handler of Python's would ever run."""
    return len(str(9 ** (9**9)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Strange(Exception):
    """Cannot be made again from what pickle keeps."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail(how: str) -> Any:
    if how == "exit":
        sys.exit(3)
    if how == "strange":
        raise Strange(1, 2)
    if how == "unsendable":
        return lambda: 0
    if how == "endless":
        return {"reward": float("inf")}
    if how == "long":
        return "x" * 2**25
    if how == "memory":
        return len(bytearray(64 * 2**30))
    raise KeyError(how)


def environment() -> dict[str, str]:
    return dict(os.environ)


class Stolen:
    """A pickle of it makes a file in the process that reads it."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def forge(place: str, how: str) -> float:
    """Writes an answer to all sockets of the process, as code that a grader runs may do, at once or from a thread that
    is left behind, and grades with 0.5."""
    forged = pickle.dumps((True, Stolen(place))) if how == "pickle" else json.dumps({"result": 1000.0}).encode()

    def write() -> None:
        time.sleep(0.3 if how == "later" else 0.0)
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.write(number, HEADER.pack(len(forged)) + forged)

    thread = threading.Thread(target=write)
    thread.start()
    if how != "later":
        thread.join()
    return 0.5


def slow_half() -> float:
    time.sleep(0.6)
    return 0.5


def started_by_shell(code: str) -> int:
    """Returns the exit code of a program that inherits all that a shell inherits."""
    return os.system(f"{sys.executable} -c '{code}'")


def has_ended(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


async def test_a_call_runs_elsewhere_and_the_process_is_used_again() -> None:
    async with workers.workers(2):
        assert await run_in_worker(math.gcd, 12, 18, timeout_s=60) == 6
        first, second = [await run_in_worker(pid, timeout_s=60) for _ in range(2)]
    assert first == second != os.getpid()
    assert has_ended(first)


async def test_no_more_than_so_many_at_once_and_all_are_answered() -> None:
    async with workers.workers(2):
        processes = await asyncio.gather(*(run_in_worker(pid, timeout_s=60) for _ in range(20)))
    assert 1 <= len(set(processes)) <= 2


@pytest.mark.parametrize("function", [hang, a_huge_power])
async def test_a_call_over_its_limit_is_killed_and_replaced(function: Callable[..., Any]) -> None:
    async with workers.workers(1):
        before = await run_in_worker(pid, timeout_s=60)
        with pytest.raises(WorkerTimeout, match=rf"{function.__name__} in a worker process took longer than 0.2 s"):
            await run_in_worker(function, timeout_s=0.2)
        assert has_ended(before)
        assert await run_in_worker(pid, timeout_s=60) != before


async def test_a_call_that_nobody_waits_for_any_more_is_killed() -> None:
    async with workers.workers(1):
        before = await run_in_worker(pid, timeout_s=60)
        call = asyncio.ensure_future(run_in_worker(hang, timeout_s=600))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert has_ended(before)
        assert await run_in_worker(pid, timeout_s=60) > 0


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("this", KeyError, "this"),
        ("strange", WorkerError, "1 and 2"),
        ("unsendable", TypeError, "function cannot be sent back"),
        ("endless", TypeError, "cannot be sent back"),
        ("long", ValueError, "expected at most"),
        ("exit", WorkerError, "3"),
        ("memory", MemoryError, None),
    ],
)
async def test_what_a_function_raises_comes_back(how: str, kind: type[Exception], message: str | None) -> None:
    async with workers.workers(1):
        before = await run_in_worker(pid, timeout_s=60)
        with pytest.raises(kind, match=message) as raised:
            await run_in_worker(fail, how, timeout_s=60)
        if issubclass(kind, WorkerError):
            assert type(raised.value).__name__ == {"strange": "Strange", "exit": "SystemExit"}[how]
            assert "in fail" in str(raised.value.__notes__), "where it was raised"
        assert await run_in_worker(pid, timeout_s=60) == before, "the process goes on"


async def test_a_process_that_dies_is_replaced() -> None:
    async with workers.workers(1):
        with pytest.raises(WorkerDied, match=r"die in a worker process: the process died without an answer"):
            await run_in_worker(die, timeout_s=60)
        assert await run_in_worker(math.gcd, 4, 6, timeout_s=60) == 2


async def test_what_cannot_be_imported_there_is_an_error_of_the_call() -> None:
    def local() -> None: ...

    async with workers.workers(1):
        with pytest.raises(AttributeError, match="local"):
            await run_in_worker(local, timeout_s=60)


async def test_it_sees_what_code_needs_and_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"LC_TIME": "C", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "https_proxy": "http://proxy"}
    kept_back = ("WANDB_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN", "OPENAI_API_KEY", "SOMETHING_ELSE")
    for name, value in {**needed, **dict.fromkeys(kept_back, "secret")}.items():
        monkeypatch.setenv(name, value)
    async with workers.workers(1):
        variables = await run_in_worker(environment, timeout_s=60)
    assert variables.items() >= {**needed, "PATH": os.environ["PATH"]}.items()
    assert os.path.dirname(__file__) in variables["PYTHONPATH"].split(os.pathsep)
    assert not variables.keys() & set(kept_back)


@pytest.mark.parametrize("how", ["pickle", "json", "later"])
async def test_what_is_written_by_other_code_is_no_answer(tmp_path: Path, how: str) -> None:
    stolen = tmp_path / "stolen"

    async def grades() -> None:
        await run_in_worker(forge, str(stolen), how, timeout_s=60)
        await run_in_worker(slow_half, timeout_s=60)

    async with workers.workers(1):
        with pytest.raises(WorkerDied, match="something else than the call wrote an answer"):
            await grades()
        assert await run_in_worker(slow_half, timeout_s=60) == 0.5
    assert not stolen.exists(), "nothing of an answer is run here"


async def test_programs_that_a_function_starts_have_no_socket() -> None:
    code = 'import os; raise SystemExit(any("socket" in os.readlink(f"/dev/fd/{n}") for n in (0, *range(3, 50)) '
    code += 'if os.path.exists(f"/dev/fd/{n}")))'
    async with workers.workers(1):
        assert await run_in_worker(started_by_shell, code, timeout_s=60) == 0


async def test_variables_are_given_by_name_and_a_proxy_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "of the judge")
    monkeypatch.setenv("https_proxy", "http://user:password@proxy")
    async with workers.workers(1, ["JUDGE_API_KEY", "NOT_SET"]):
        variables = await run_in_worker(environment, timeout_s=60)
    assert variables["JUDGE_API_KEY"] == "of the judge"
    assert not {"NOT_SET", "https_proxy"} & variables.keys()


async def test_closing_ends_calls_under_way() -> None:
    pool = Workers(1)
    process = await pool.run(pid, timeout_s=60)
    call = asyncio.ensure_future(pool.run(hang, timeout_s=600))
    await asyncio.sleep(0.05)
    await pool.close()
    with pytest.raises(WorkerDied):
        await call
    assert has_ended(process)


def test_a_worker_does_not_outlive_whoever_started_it() -> None:
    code = (
        "import asyncio, sys\n"
        f"from {MODULE} import hang, pid\n"
        "from orchestrator.workers import run_in_worker, workers\n"
        "async def main():\n"
        "    async with workers(1):\n"
        "        print(await run_in_worker(pid, timeout_s=60), flush=True)\n"
        "        await run_in_worker(hang, timeout_s=600)\n"
        "asyncio.run(main())"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ)
    assert caller.stdout is not None
    worker = int(caller.stdout.readline())
    caller.kill()
    caller.wait(60)
    wait_for(lambda: has_ended(worker), "the end of the worker")


async def test_outside_a_run_it_says_what_to_write() -> None:
    with pytest.raises(RuntimeError, match=r"async with orchestrator\.workers\.workers"):
        await run_in_worker(pid, timeout_s=1)
