"""A script that runs a program with a limit on memory, and leaves none of the program's processes behind. It imports
nothing of Trireme, so that it starts within some milliseconds.

    python -I -S start_program.py MEMORY_BYTES PARENT PROGRAM [ARGUMENT ...]

It stays as the program's parent and ends with its exit code. When the program has ended, or on SIGTERM, or when process
PARENT ends, it kills all processes that the program has started. It is their *subreaper*: orphans among them become its
children, even after `setsid` and a second fork.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAUSE_S = 0.001
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def main(memory_bytes: int, parent: int, command: list[str]) -> int:
    """Runs `command` with at most `memory_bytes` of data memory, as a child of this process. When it has ended, kills
    all processes that it started. `parent`: the process that started this one. Returns the program's exit code, or 128
    + the signal's number if the program was killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # they are waited for
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that
        return 1
    pid = os.getpid()
    program = os.fork()
    if not program:
        become(memory_bytes, pid, command)
    silence()
    code = wait_for(program)
    kill_descendants()
    return code


def become(memory_bytes: int, parent: int, command: list[str]) -> None:
    """Replaces this process by the program `command`, with at most `memory_bytes` of data memory. The program gets a
    Unix session of its own (`setsid`), so that `kill 0` in a script does not kill this process's parent. `parent`: the
    parent's process id. If the parent has already ended, exits instead. Does not return."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
        os._exit(1)


def silence() -> None:
    """Replaces this process's standard input, output and error by /dev/null, so that this process does not keep the
    caller's pipes open. The pipes then close when the started program and its children end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def wait_for(program: int) -> int:
    """Waits until the process `program` ends, and kills it on SIGTERM. Reaps orphans meanwhile. Returns the exit code;
    128 + the signal's number if the program was killed."""
    while True:
        if signal.sigwait(WATCHED) == signal.SIGTERM:
            os.kill(program, signal.SIGKILL)
        for pid, status in reap():
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                if code >= 0:
                    return code
                return 128 - code


def reap() -> list[tuple[int, int]]:
    """Reaps the children that have ended. Returns their process ids and wait statuses."""
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if not pid:
            return reaped
        reaped.append((pid, status))


def kill_descendants() -> None:
    """Kills all descendants of this process, again and again until none is left: the children of a killed process
    become children of this process, and may start more.
    """
    while pids := descendants():
        for pid in pids:
            kill(pid)
        reap()
        time.sleep(PAUSE_S)


def descendants() -> list[int]:
    """Returns the ids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):  # it has ended
                continue
            children.setdefault(parent, []).append(int(name))
    pids = []
    below = [os.getpid()]
    while below:
        direct = children.get(below.pop(), [])
        pids += direct
        below += direct
    return pids


def kill(pid: int) -> None:
    """Kills one process, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
