"""Runs one program in isolation, with limits on its memory, time and processes.

`orchestrator.untrusted` starts this module as a process of its own. The module imports only the standard library and
`start_program`, so it starts within milliseconds.

    run_code --CodeStart as JSON--> the starter --> init, process 1 of its own namespace --> the program
                 report <----------'                 (`namespaces` alone)

The isolation is one of three, and `run_code` tries which of them works on a machine:

    namespaces  of the kernel: the program sees no other processes, no network, and only READABLE and the named files
    own_uid     root lends the program an unused user id
    none        the program is a process of the same user

In each of them the program gets limits, a directory of its own and an environment of a few variables. The starter kills
the program and its descendants when the program ends or exceeds a limit, on SIGTERM, and when process `parent` ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil

from orchestrator.envs.start_program import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    WATCHED,
    kill,
    kill_descendants,
    reap,
    silence,
)

NEW_SPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC and NEWUTS."""
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
SYS_MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
INSIDE = 1
"""The program's user and group within its namespaces."""
PROGRAM = "program"
"""The name of the program's file in its directory."""
LOOK_S = 0.05
"""Seconds between two checks of the program's memory and time."""
OPEN_FILES = 64
MOST_INODES = 8192
PAGE = os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class CodeStart:
    """Describes the program to start, and its limits (`orchestrator.untrusted.CodeLimits`)."""

    parent: int
    """The id of the process that starts the starter; the program ends with it."""
    isolation: str
    command: Sequence[str]
    """The command that runs the file PROGRAM."""
    directory: str
    """The directory of that file, with nothing else in it."""
    readable: Sequence[str]
    """Directories that the program may read in addition to READABLE."""
    uid: int
    """An unused user id, for root."""
    report: int
    """Number of an open file, which gets a CodeReport as JSON."""
    wall_s: float
    cpu_s: float
    memory_bytes: int
    disk_bytes: int
    processes: int


@dataclass(frozen=True)
class CodeReport:
    """Says how a program ended."""

    exit_code: int | None = None
    """128 + the signal's number for a program that was killed by a signal; None for a program that did not begin, or
    that the starter stopped."""
    limit: str | None = None
    """The limit that it exceeded, by its name in CodeStart."""
    failure: str | None = None
    """The reason why it could not begin."""


def main(text: str) -> int:
    """Runs the program that `text`, a CodeStart as JSON, describes. Writes a CodeReport as JSON to the open file that
    `text` names. Returns 1 if the parent process is already gone, else 0."""
    start = CodeStart(**json.loads(text))
    os.set_inheritable(start.report, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # they are waited for
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != start.parent:  # it ended before that
        return 1
    try:
        report = run(start)
    except OSError as error:
        report = CodeReport(failure=f"{type(error).__name__}: {error}")
    os.write(start.report, json.dumps(asdict(report), allow_nan=False).encode())
    return 0


def run(start: CodeStart) -> CodeReport:
    """Runs the program until its end, and kills its remaining processes. Raises OSError if the isolation is not
    possible.
    """
    failures, failed = os.pipe()
    if start.isolation == "namespaces":
        enter_namespaces(start.uid)
    libc.prctl(PR_SET_DUMPABLE, 0)  # the program, of the same user, does not read this process
    child = os.fork()
    if not child:
        os.close(failures)
        begin(start, failed)
    os.close(failed)
    silence()
    try:
        report = watch(start, child)
        if report.exit_code is None:
            kill(child)  # with process 1 the kernel ends all of a namespace
    finally:
        if start.isolation == "own_uid":
            kill_user(start.uid)
        kill_descendants()
    failure = os.read(failures, 2**12).decode(errors="replace")
    if failure:
        return CodeReport(failure=failure)
    return report


def watch(start: CodeStart, child: int) -> CodeReport:
    """Waits until the process `child` ends, a limit is exceeded, or SIGTERM arrives. Returns a report with the exit
    code or the exceeded limit; after SIGTERM the report is empty. Kills nothing."""
    deadline = time.monotonic() + start.wall_s
    while True:
        received = signal.sigtimedwait(WATCHED, LOOK_S)
        for pid, status in reap():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                code = code if code >= 0 else 128 - code
                return CodeReport(code, "cpu_s" if code == 128 + signal.SIGXCPU else None)
        if received and received.si_signo == signal.SIGTERM:
            return CodeReport()
        if time.monotonic() > deadline:
            return CodeReport(limit="wall_s")
        processes = below(child)
        if sum(map(resident, processes)) + unlinked(processes) > start.memory_bytes:
            return CodeReport(limit="memory_bytes")


def below(pid: int) -> list[int]:
    """Returns the ids of the process `pid` and of its present descendants."""
    pids = [pid]
    for process in pids:
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                    pids += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return pids


def resident(pid: int) -> int:
    """Returns the resident memory of the process `pid` in bytes; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def unlinked(processes: Sequence[int]) -> int:
    """Returns the size in bytes of the unlinked files that the processes have open. Such files may be in memory without
    being mapped. Each file counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in processes:
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                file = os.stat(f"/proc/{pid}/fd/{number}")
                if not file.st_nlink:
                    sizes[file.st_dev, file.st_ino] = 512 * file.st_blocks
        except OSError:  # it has ended, or closed the file
            continue
    return sum(sizes.values())


def kill_user(uid: int) -> None:
    """Kills all processes of the user `uid`, from a child process that becomes this user."""
    child = os.fork()
    if not child:
        try:
            os.setresuid(uid, uid, uid)
            if os.getresuid() == (uid, uid, uid) and uid:  # else it would end all that this user runs
                kill(-1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


# ---- namespaces


def check(result: int, action: str) -> None:
    """Raises OSError if `result`, of a call of the C library, is negative. `action` names the call in the message."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def enter_namespaces(uid: int) -> None:
    """Moves this process and its children into new namespaces. If this process is root, maps user 1 in the namespaces
    to the unused id `uid`. Otherwise maps user 1 to the user id of this process, the only id that may be mapped."""
    user = os.geteuid()
    group = os.getegid()
    if user:
        check(libc.unshare(NEW_SPACES), "unshare")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{INSIDE} {user} 1")
        write("/proc/self/gid_map", f"{INSIDE} {group} 1")
        return
    os.setgroups([])
    pid = os.getpid()
    entered, enter = os.pipe()
    mapper = os.fork()  # outside, where root may map the ids of others
    if not mapper:
        try:
            os.close(enter)
            os.read(entered, 1)
            write(f"/proc/{pid}/uid_map", f"0 0 1\n{INSIDE} {uid} 1")
            write(f"/proc/{pid}/gid_map", f"0 0 1\n{INSIDE} {uid} 1")
        finally:
            os._exit(0)  # without a map the next step fails, and says so
    os.close(entered)
    unshared = libc.unshare(NEW_SPACES)
    number = ctypes.get_errno()
    os.close(enter)
    os.waitpid(mapper, 0)
    ctypes.set_errno(number)
    check(unshared, "unshare")


def write(path: str, text: str) -> None:
    """Writes `text` to a file of the kernel, such as one in /proc, by one system call."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mounts a file system."""
    words = [word and word.encode() for word in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), options and options.encode()), f"mount {target}")


def build_root(start: CodeStart) -> None:
    """Builds an in-memory file system for the program, mounted at the program's directory, and makes it the root
    directory of this process."""
    root = start.directory
    work = f"{start.directory}/tmp"
    with open(f"{root}/{PROGRAM}", "rb") as file:
        program = file.read()
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MOST_INODES},mode=0755")
    os.makedirs(work)  # before what is shown: an environment below /tmp would be covered by it
    mount("tmpfs", work, "tmpfs", MS_NOSUID | MS_NODEV, f"size={start.disk_bytes},nr_inodes={MOST_INODES},mode=1777")
    roots: list[str] = []
    for path in sorted({*READABLE, *start.readable}, key=len):
        if not any(f"{path}/".startswith(f"{other}/") for other in roots) and os.path.lexists(path):
            roots.append(path)
            show(path, root + path)
    os.makedirs(f"{root}/dev")
    for name in DEVICES:
        bind(f"/dev/{name}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.makedirs(f"{root}/proc")
    os.symlink("/tmp", f"{root}/dev/shm")
    with suppress(OSError):  # some containers forbid it: then the program has no /proc
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
        write(f"{root}/proc/sys/kernel/shmmni", "0")  # shared segments would be memory of no process
    mount("none", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    with open(f"{work}/{PROGRAM}", "wb") as file:
        file.write(program)
    os.chroot(root)  # which also forbids the program namespaces of its own
    os.chdir("/tmp")


def show(path: str, target: str) -> None:
    """Makes the file, directory or link `path` of the machine appear at `target` too, read-only."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    bind(path, target)
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    flags = ctypes.c_uint(AT_RECURSIVE)
    check(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, attributes, size), f"mount {target}")


def bind(path: str, target: str) -> None:
    """Makes the file or directory `path` appear at `target` too (a bind mount)."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(path, target, None, MS_BIND | MS_REC)


# ---- the processes


def begin(start: CodeStart, failed: int) -> None:
    """Turns this new process into the program. With the isolation `namespaces` it becomes process 1 of its namespace
    instead, and starts the program as its child. Writes an error to the descriptor `failed`. Does not return."""
    directory = start.directory
    user = None
    lower = 0
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if start.isolation == "namespaces":
            build_root(start)
            user = INSIDE if os.geteuid() == 0 else None
            lower = 0 if user else 2  # the starter and process 1 count as the program's
            directory = "/tmp"
            program = os.fork()
            if program:
                silence()
                be_init(program)
        elif start.isolation == "own_uid":
            user = start.uid
            os.chown(directory, user, user)
            os.chown(f"{directory}/{PROGRAM}", user, user)
        os.chdir(directory)
        become(start, directory, user, lower)
    except Exception as error:
        os.write(failed, f"{type(error).__name__}: {error}"[: 2**11].encode())
    finally:
        os._exit(1)


def be_init(program: int) -> None:
    """Acts as process 1 of a namespace: reaps orphans until the process `program` ends, then exits with the program's
    exit code (128 + the signal's number if it was killed)."""
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def become(start: CodeStart, directory: str, user: int | None, lower: int) -> None:
    """Sets limits and environment, and replaces this process by the program in `directory`. `user`: the user id to
    change to first (None: keep the present one). `lower`: how many processes the kernel counts towards the program's
    limit on processes although they do not belong to the program; the limit is raised by this number. Raises OSError if
    the program cannot be started."""
    os.setsid()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # another user id has none
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limit(resource.RLIMIT_DATA, start.memory_bytes)
    limit(resource.RLIMIT_FSIZE, start.disk_bytes)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, ceil(start.cpu_s))
    if start.isolation != "none":  # there it would count all processes of the user
        limit(resource.RLIMIT_NPROC, start.processes + lower)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.execvpe(start.command[0], [*start.command, PROGRAM], environment)


def limit(kind: int, soft: int) -> None:
    """Limits the resource `kind` to `soft` for this process and its children. If the existing hard limit is lower than
    `soft`, the hard limit applies."""
    hardest = resource.getrlimit(kind)[1]
    if hardest != resource.RLIM_INFINITY:
        soft = min(soft, hardest)
    above = 1 if kind == resource.RLIMIT_CPU and hardest == resource.RLIM_INFINITY else 0  # first comes SIGXCPU
    resource.setrlimit(kind, (soft, soft + above))
