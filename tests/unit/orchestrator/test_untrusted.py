"""Programs that nobody trusts: what they see, the limits that end them, and that nothing is left. All are bounded: none
starts more than 40 processes, and these sleep and end by themselves."""

import asyncio
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import untrusted
from orchestrator.untrusted import CodeLimits, CodeResult, Machine, run_code, this_machine
from trireme.core.errors import BadInput

SYSTEM_PYTHON = ("/usr/bin/python3", "-I")
"""One that other user ids may start too."""
PATIENT = CodeLimits(wall_s=60.0)
"""For a busy machine."""


@pytest.fixture
def machine() -> Machine:
    """What this machine gives; without limits nothing that starts processes is tried."""
    available = asyncio.run(this_machine())
    if not available.limits_processes:
        pytest.skip("needs a limit of processes")  # reason: a program could take the whole machine without one
    return available


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "directories"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def run(program: str, input: str = "", limits: CodeLimits = PATIENT, **options: Any) -> CodeResult:
    return asyncio.run(run_code(program, input, limits, **options))


def programs() -> list[int]:
    """The processes of programs of this test, wherever they have gone."""
    words = [(process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [pid for pid, command in words if "test-of-untrusted" in " ".join(command)]


def test_a_program_gets_its_input_and_its_output_comes_back(directories: Path) -> None:
    program = "import sys; print(sys.stdin.read()[::-1]); print('oh', file=sys.stderr); sys.exit(3)"
    assert run(program, "abc") == CodeResult("cba\n", "oh\n", 3, None)
    assert run("nonsense here").exit_code == 1
    assert list(directories.iterdir()) == []


def test_a_readable_directory_below_tmp_is_seen(machine: Machine, directories: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.joinpath("number").write_text("4")
    tmp_path.chmod(0o755)
    result = run(f"print(open('{data}/number').read())", limits=CodeLimits(readable=(str(data),)))
    assert result.output == "4\n", result


FORTY = """
import os, time
started = 0
for _ in range(40):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        started += 1
    except OSError:
        break
print(started)
"""


def test_no_more_processes_than_allowed_and_none_is_left(machine: Machine, directories: Path) -> None:
    result = run(
        FORTY, limits=CodeLimits(wall_s=60.0, processes=16), command=(*SYSTEM_PYTHON, "-X", "test-of-untrusted")
    )
    assert result.output == "15\n", "with the program itself 16"
    assert programs() == []
    assert list(directories.iterdir()) == []


HIDES = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (0, 1, 2):
            os.close(number)
        time.sleep(60)
        os._exit(0)
time.sleep({pause})
print("done", flush=True)
"""


@pytest.mark.parametrize("isolation", ["namespaces", "own_uid", "none"])
async def test_all_that_a_program_started_is_killed(machine: Machine, directories: Path, isolation: Any) -> None:
    """Of three programs: one ends by itself, one by its limit, and one is given up."""
    if isolation == "own_uid" and os.geteuid():
        pytest.skip("needs root")  # reason: only root may lend another user id
    command = (*SYSTEM_PYTHON, "-X", "test-of-untrusted")

    async def start(pause: int, wall_s: float) -> CodeResult:
        return await untrusted._run(isolation, HIDES.format(pause=pause), "", CodeLimits(wall_s=wall_s), command)

    given_up = asyncio.ensure_future(start(60, 60.0))
    others = asyncio.gather(start(1, 60.0), start(60, 4.0))
    await asyncio.sleep(3)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await others == [CodeResult("done\n", "", 0, None), CodeResult("", "", None, "wall_s")]
    assert programs() == []
    assert os.listdir(directories) == []


def test_it_sees_no_secret_no_file_and_no_process_of_the_run(
    machine: Machine, directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine.isolation != "namespaces":
        pytest.skip("needs namespaces")  # reason: the other isolations hide no processes and no files
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    key = tmp_path / "key"
    key.write_text("secret")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        program = f"""
import json, os, socket
reached = []
for name in ({str(key)!r}, "/proc/{os.getpid()}/environ", "/proc/1/environ", os.path.expanduser("~root/.ssh")):
    try:
        reached.append(open(name).read())
    except OSError as error:
        pass
for place in ("/usr", "/", {str(Path(untrusted.__file__).parent)!r}):
    try:
        open(place + "/written", "w")
        reached.append(place)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", {listening.getsockname()[1]}), 5)
    reached.append("the port")
except OSError:
    pass
processes = [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
print(json.dumps([reached, len(processes), sorted(os.environ)]))
"""
        reached, processes, variables = json.loads(run(program).output)
    assert reached == []
    assert processes <= 2, "itself and process 1"
    assert not {"WANDB_API_KEY", "HF_TOKEN", "PYTHONPATH"} & set(variables)


TWO_HALVES = """
import os, time
half = bytearray(150 * 2**20)
for place in range(0, len(half), 4096):
    half[place] = 1
os.fork()
for place in range(0, len(half), 4096):
    half[place] = 2
time.sleep(30)
"""
IN_FILES = """
import os, time
files = [os.memfd_create(str(number)) for number in range(20)]
for file in files:
    os.write(file, bytes(15 * 2**20))
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("limit", "program"),
    [
        ("wall_s", "import time; print('begun', flush=True); time.sleep(60)"),
        ("cpu_s", "while True: pass"),
        ("output_bytes", "for _ in range(10_000): print('x' * 100)"),
        ("memory_bytes", TWO_HALVES),
        ("memory_bytes", IN_FILES),
    ],
    ids=["time", "cpu", "output", "memory of two", "files in memory"],
)
def test_what_exceeds_a_limit_is_killed_and_the_limit_named(machine: Machine, limit: str, program: str) -> None:
    wall_s = 5.0 if limit == "wall_s" else 60.0
    result = run(program, limits=CodeLimits(wall_s, cpu_s=20.0 if limit != "cpu_s" else 1.0, memory_bytes=250 * 2**20))
    assert (result.limit, result.exit_code) == (limit, None)
    assert len(result.output) <= CodeLimits.output_bytes


def test_what_the_kernel_refuses_is_an_error_of_the_program() -> None:
    assert "MemoryError" in run("bytearray(2**32)").errors
    written = run("open('large', 'wb').write(bytes(2**26))")
    assert "OSError" in written.errors or written.exit_code == 128 + 25, "SIGXFSZ"


def test_no_program_writes_its_own_report() -> None:
    forged = json.dumps({"exit_code": 0, "limit": None, "failure": None})
    program = f"""
import os
for number in range(3, 64):
    try:
        os.write(number, {forged.encode()!r})
    except OSError:
        pass
raise SystemExit(7)
"""
    assert run(program) == CodeResult("", "", 7, None)


def test_a_machine_that_cannot_limit_processes_refuses_unless_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def weak() -> Machine:
        return Machine("none", limits_processes=False, cuts_network=False)

    monkeypatch.setattr(untrusted, "_machine", None)
    monkeypatch.setattr(untrusted, "_tried", weak)
    with pytest.raises(BadInput, match="cannot limit the number of processes"):
        run("print(1)")
    assert run("print(1)", limits=CodeLimits(wall_s=60.0, limit_processes=False)).output == "1\n"
    (line,) = [record.getMessage() for record in caplog.records if record.name == untrusted.__name__]
    assert "cannot cut them off from the network" in line, "once"


async def test_the_event_loop_goes_on_and_at_most_as_many_run_as_there_are_cores() -> None:
    begun, late = time.monotonic(), 0.0
    await this_machine()
    running = asyncio.gather(*(run_code("print(1)", limits=PATIENT) for _ in range(3)))
    while not running.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        late = max(late, time.monotonic() - before)
    assert [result.output for result in await running] == ["1\n"] * 3
    assert late / (time.monotonic() - begun) < 0.5
