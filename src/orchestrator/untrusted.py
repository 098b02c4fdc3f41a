"""Runs untrusted programs, for example code that a model wrote: `await run_code(program, input, limits)`.

    environment --run_code--> the starter (`orchestrator.start_code`) --> the program, with limits and no secret
                <-- CodeResult: its output, its exit code, or the limit that it exceeded

A harmless program tries once which isolation a machine offers. Missing protections are logged; a machine that cannot
limit the number of processes runs nothing, unless `CodeLimits.limit_processes` is False.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from orchestrator.lifetimes import uninterrupted
from orchestrator.start_code import PROGRAM, CodeReport, CodeStart
from trireme.core.refusals import Refusal

Limit = Literal["wall_s", "cpu_s", "memory_bytes", "output_bytes"]
Isolation = Literal["namespaces", "own_uid", "none"]

STARTER = "import sys; sys.path.append({root!r}); from orchestrator.start_code import main; sys.exit(main(sys.argv[1]))"
PYTHON = (sys.executable, "-I")
START_S = 30.0
"""Seconds for the starter to begin, and to end its processes: enough unless it waits for a broken disk."""
FIRST_UID = 61_000
UIDS = 4_000
"""The first of UIDS user ids that no account has by convention. Each program that root runs gets the next of them."""
log = logging.getLogger(__name__)


class RunCodeFailed(Exception):
    """A program could not be started: the machine's fault, not the program's."""


@dataclass(frozen=True)
class CodeLimits:
    """Limits of one program and of all its processes. A program that exceeds `wall_s`, `cpu_s`, `memory_bytes` or
    `output_bytes` is killed."""

    wall_s: float = 10.0
    """Seconds from its start until its end."""
    cpu_s: float = 10.0
    """Seconds of CPU time of each of its processes."""
    memory_bytes: int = 512 * 2**20
    """Memory of all its processes together. A single process that allocates more gets no memory."""
    output_bytes: int = 64 * 2**10
    """Bytes that it may write to standard output, and as many to standard error."""
    disk_bytes: int = 16 * 2**20
    """Bytes that it may write to its directory, which is removed after its end."""
    processes: int = 16
    """Processes and threads at the same time; a program cannot start more."""
    readable: tuple[str, ...] = ()
    """Directories that it may read in addition to Python's and the system's."""
    limit_processes: bool = True
    """False: run also on a machine that cannot limit processes, where one program can take all of them."""


@dataclass(frozen=True)
class CodeResult:
    """The outcome of a program."""

    output: str
    errors: str
    exit_code: int | None
    """128 + the signal's number for a program that was killed by a signal; None for a program that exceeded a limit."""
    limit: Limit | None
    """The field of CodeLimits that it exceeded; None if it exceeded no limit."""


@dataclass(frozen=True)
class Machine:
    """The isolation that this machine offers."""

    isolation: Isolation
    limits_processes: bool
    cuts_network: bool

    @property
    def missing(self) -> list[str]:
        """The protections that the machine lacks, as text."""
        abilities = {
            "limit their number of processes": self.limits_processes,
            "cut them off from the network": self.cuts_network,
            "hide other processes, and files that the user of the run lets others read": self.isolation != "none",
        }
        if self.isolation == "own_uid":
            abilities = {**abilities, "hide files that all users may read": False}
        return [words for words, works in abilities.items() if not works]


async def run_code(
    program: str, input: str = "", limits: CodeLimits = CodeLimits(), command: Sequence[str] = PYTHON
) -> CodeResult:
    """Runs a program, given as text: starts `command` with the name of a file that holds `program`, and `input` as
    standard input. Returns how the program ended, even if it exceeded a limit.

    At most max(2, number of cores) programs run at the same time; others wait. Raises RunCodeFailed. Raises BadInput if
    `limits` limits the number of processes but the machine cannot enforce this.
    """
    async with _turn():
        machine = await this_machine()
        if limits.limit_processes and not machine.limits_processes:
            raise Refusal(
                "run_code on a machine that cannot limit the number of processes of a program: it allows neither user "
                "namespaces nor a change to another user id",
                "a limit: without one, a program can use up the processes that this user may have, and stop the run",
                "allow user namespaces there (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), run "
                "as root in a container, or set limit_processes = False if the programs are harmless",
            )
        return await _run(machine.isolation, program, input, limits, command)


_machine: Machine | None = None


async def this_machine() -> Machine:
    """Returns the isolation that this machine offers. The first call finds it out by a trial, and logs missing
    protections."""
    global _machine
    if _machine is None:
        _machine = await _tried()
        missing = _machine.missing
        if missing:
            log.warning("programs that run_code runs: this machine cannot %s", "; cannot ".join(missing))
    return _machine


PROBE_PROCESSES = 4
PROBE_TRIES = 8
PROBE = f"""
import json, os, socket, time
started = 0
for _ in range({PROBE_TRIES}):
    try:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        started += 1
    except OSError:
        break
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9))
    network = True
except OSError:
    network = False
print(json.dumps([started, network]))
"""
"""A program that starts at most PROBE_TRIES processes, which end by themselves, and tries to reach a network port of
this machine. Prints the number of processes that could be started, and whether there is a network."""


async def _tried() -> Machine:
    """Tries the kinds of isolation, the strongest first. Returns the first that works, and which protections it gives.
    Raises RunCodeFailed if a program cannot be started even without isolation."""
    ways: list[Isolation] = ["namespaces", "own_uid", "none"]  # only root has a user id to lend
    failures = []
    limits = replace(CodeLimits(), processes=PROBE_PROCESSES)
    for isolation in ways:
        try:
            result = await _run(isolation, PROBE, "", limits, PYTHON)
            started, network = json.loads(result.output)
            return Machine(isolation, started < PROBE_TRIES, not network)
        except (RunCodeFailed, ValueError) as error:
            failures.append(f"{isolation}: {error}")
            log.info("run_code: no isolation by %s", failures[-1])
    raise RunCodeFailed("; ".join(failures))


async def _run(
    isolation: Isolation, program: str, input: str, limits: CodeLimits, command: Sequence[str]
) -> CodeResult:
    reachable = "/tmp" if isolation == "own_uid" else None  # another user does not enter a private directory
    directory = Path(tempfile.mkdtemp(prefix="code-", dir=reachable))
    try:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as report:
            stdin.write(input.encode())
            stdin.seek(0)
            (directory / PROGRAM).write_text(program)
            start = _start(isolation, directory, report.fileno(), limits, command)
            text = json.dumps(asdict(start), allow_nan=False)
            output, errors = await _played(text, stdin, report.fileno(), limits)
            report.seek(0)
            end_report = CodeReport(**json.loads(report.read() or "{}"))
    finally:
        await uninterrupted(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))
    if end_report.failure:
        raise RunCodeFailed(f"{' '.join(command)} cannot be started ({isolation}): {end_report.failure}")
    too_long = max(len(output), len(errors)) > limits.output_bytes
    limit: Any = "output_bytes" if too_long else end_report.limit
    if limit is None and end_report.exit_code is None:
        raise RunCodeFailed(f"{' '.join(command)}: its starter ended without a report ({isolation})")
    shown = [text[: limits.output_bytes].decode(errors="replace") for text in (output, errors)]
    return CodeResult(shown[0], shown[1], None if limit else end_report.exit_code, limit)


_uids = count(random.randrange(UIDS))


def _start(isolation: Isolation, directory: Path, report: int, limits: CodeLimits, command: Sequence[str]) -> CodeStart:
    """Returns the CodeStart with which the starter process starts the program in `directory`. `report`: the descriptor
    of the file to which the starter writes its report."""
    return CodeStart(
        parent=os.getpid(),
        isolation=isolation,
        command=command,
        directory=str(directory),
        readable=[sys.base_prefix, sys.prefix, *map(os.path.abspath, limits.readable)],
        uid=FIRST_UID + next(_uids) % UIDS,
        report=report,
        wall_s=limits.wall_s,
        cpu_s=limits.cpu_s,
        memory_bytes=limits.memory_bytes,
        disk_bytes=limits.disk_bytes,
        processes=limits.processes,
    )


async def _played(start: str, stdin: Any, report: int, limits: CodeLimits) -> tuple[bytes, bytes]:
    """Runs the starter process, and the program in it, to the end. `start`: a CodeStart as JSON. `report`: the
    descriptor of the file to which the starter writes its report. Returns the program's output and errors. If one of
    them exceeds `limits.output_bytes` bytes, it is cut off, at most 64 KiB after this limit. Raises RunCodeFailed if
    the starter exceeds its time."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", STARTER.format(root=str(Path(__file__).parents[1])), start),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"LANG": "C.UTF-8"},
        pass_fds=[report],
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    streams = (process.stdout, process.stderr)
    try:
        async with asyncio.timeout(limits.wall_s + START_S):
            output, errors = await asyncio.gather(*(_read(stream, limits.output_bytes, process) for stream in streams))
            await process.wait()
        return output, errors
    except TimeoutError:
        raise RunCodeFailed(f"the starter of a program took {START_S:g} s longer than the program may") from None
    finally:
        await uninterrupted(end_starter(process, "a program of run_code"))


async def _read(stream: asyncio.StreamReader, limit: int, process: asyncio.subprocess.Process) -> bytes:
    """Reads a stream to its end, and returns its contents. If they exceed `limit` bytes, makes the starter kill the
    program, and cuts the contents off, at most 64 KiB after the limit."""
    text = b""
    while chunk := await stream.read(2**16):
        if len(text) <= limit:
            text += chunk
            if len(text) > limit:
                process.send_signal(signal.SIGTERM)
    return text


async def end_starter(process: asyncio.subprocess.Process, name: str) -> None:
    """Sends SIGTERM to a starter process, and waits for its end. The starter then kills its program and all processes
    of the program. If processes do not die, logs an error and kills the starter. `name` names the program in
    messages."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(START_S):
            await process.wait()
    except TimeoutError:
        log.error("%s has processes that SIGKILL has not ended within %g s; they are left behind", name, START_S)
        with suppress(ProcessLookupError):
            process.kill()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _turn() -> asyncio.Semaphore:
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max(2, os.cpu_count() or 1)))
