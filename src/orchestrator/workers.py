"""Runs slow functions in processes of their own: `await run_in_worker(function, *args, timeout_s=5)`.

    environment --run_in_worker--> Workers --one call at a time--> a process: `orchestrator.worker_process`
                                      |
                                      +-- over its limit, dead, or cancelled: killed; the next call starts another

The orchestrator plays thousands of rollouts on one thread: a function that computes there for more than a few
milliseconds delays all of them (`perf/event_loop_lag`), and cannot be stopped. In a worker it can: a process that
exceeds its limit is killed, and its caller gets a WorkerTimeout.

The function and its arguments are pickled, so a module must hold the function by name. Its result is JSON: numbers,
text, lists and tables, which run no code here. An exception comes back as its class name and its arguments. The limit
counts from when the process has imported that module and is about to call the function. Waiting for a free process
counts only for the limit of the rollout.

A process gets the environment variables in `PASSED_ON` and in `env.variables`, and no other environment variable. Each
call has a random token of its own (bytes, not of a language model), which its answer must repeat: so output of code
left behind by an earlier call is no answer. That is no sandbox: code that runs inside the process reads its memory,
where the token is, and everything that the user can read. A program that a model wrote belongs in
`orchestrator.untrusted.run_code`.

A process ends with its caller: the orchestrator closes all of them, and Linux kills them when it dies.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from orchestrator import worker_process
from orchestrator.worker_process import HEADER, MOST_BYTES, TOKEN_BYTES
from trireme.core.own_packages import ENTRY
from trireme.core.redaction import is_secret

T = TypeVar("T")

START_S = 60.0
"""Seconds for a process to start, and to import the function."""
END_S = 10.0
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "*_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Patterns of the environment variables that a process gets, to find programs, modules, models and the network.
Variables with the name of a secret, and proxies with a password, are left out."""


class WorkerTimeout(Exception):
    """A call exceeded its limit; its process was killed."""


class WorkerDied(Exception):
    """The process of a call ended before it answered the call, or wrote an invalid answer and was killed."""


class WorkerError(Exception):
    """A function raised an exception whose class is not built into Python. The error is raised as a subclass of
    WorkerError that has the name of the exception's class."""


class Workers:
    """Holds at most `size` worker processes, which are started on demand. The processes get the environment variables
    that `variables` names, in addition to PASSED_ON. A Workers object belongs to one event loop."""

    def __init__(self, size: int, variables: Sequence[str] = ()) -> None:
        self._free = asyncio.Semaphore(size)
        self._variables = tuple(variables)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def run(self, function: Callable[..., T], *args: object, timeout_s: float) -> T:
        """Calls `function(*args)` in a worker process, and returns the result in JSON's types. If the function raises
        an exception of a class that is built into Python, raises an exception of this class here. For any other
        exception, raises a WorkerError with the name of its class. Raises WorkerTimeout after `timeout_s` seconds, and
        WorkerDied."""
        name = f"{function.__module__}.{function.__qualname__}"
        request = pickle.dumps((function, *args))
        async with self._free:
            if self._idle:
                worker = self._idle.pop()
            else:
                worker = await Worker.start(self._variables)
            self._all.add(worker)
            try:
                value, error = await worker.call(request, name, timeout_s)
            except BaseException:  # also cancelled: the answer is not awaited any more
                self._all.discard(worker)
                await worker.kill()
                raise
            self._idle.append(worker)
        if error is not None:
            raise error
        return value

    async def close(self) -> None:
        """Ends all processes; running calls raise WorkerDied."""
        workers = self._all
        self._all = set()
        self._idle.clear()
        await asyncio.gather(*(worker.kill() for worker in workers))


class Worker:
    """One worker process, and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, variables: Sequence[str]) -> Worker:
        """Starts a process that waits for its first call."""
        ours, theirs = socket.socketpair()
        process = _process(theirs, variables)
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def call(self, request: bytes, name: str, timeout_s: float) -> tuple[Any, Exception | None]:
        """Sends a pickled call of the function `name`. Returns the function's result and None, or None and the
        exception that it raised. Raises WorkerTimeout after `timeout_s` seconds, and WorkerDied."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._writer.write(HEADER.pack(len(token) + len(request)) + token + request)
        await self._receive(token, START_S, f"the start of a worker process for {name}")
        call = f"{name} in a worker process"
        answer = await self._receive(token, timeout_s, call)
        try:
            return _outcome(json.loads(answer))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WorkerDied(f"{call} wrote what is no answer ({error!r}); the process was killed") from None

    async def _receive(self, token: bytes, timeout_s: float, label: str) -> bytes:
        """Returns the next message that begins with the call's `token`. Raises WorkerTimeout after `timeout_s` seconds,
        and WorkerDied if the process ends or writes anything else. `label` names the call in messages."""
        try:
            async with asyncio.timeout(timeout_s):
                head = await self._reader.readexactly(HEADER.size + TOKEN_BYTES)
                (size,) = HEADER.unpack(head[: HEADER.size])
                genuine = secrets.compare_digest(head[HEADER.size :], token)
                if not genuine or not TOKEN_BYTES <= size <= TOKEN_BYTES + MOST_BYTES:
                    raise WorkerDied(f"{label}: something else than the call wrote an answer; the process was killed")
                return await self._reader.readexactly(size - TOKEN_BYTES)
        except TimeoutError:
            raise WorkerTimeout(f"{label} took longer than {timeout_s:g} s; the process was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(
                f"{label}: the process died without an answer. It may have exceeded its memory, crashed or called "
                "exit: run the function alone"
            ) from None

    async def kill(self) -> None:
        """Kills the process and waits for its end."""
        self._writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait, END_S)


def _process(connection: socket.socket, variables: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a worker process that answers calls on `connection`, one end of a socket pair. Closes this end in the
    present process. The new process gets the present process's module search path, and ends when the thread of the
    event loop ends."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    with connection:
        return subprocess.Popen(
            [sys.executable, "-m", ENTRY, worker_process.__name__, str(os.getpid())],
            stdin=connection.fileno(),
            env=passed_on(variables) | {"PYTHONPATH": path},
        )


def _outcome(answer: Any) -> tuple[Any, Exception | None]:
    """Converts a decoded answer of `worker_process` to (result, None) or (None, exception). Raises ValueError,
    TypeError or KeyError if `answer` has another form."""
    if "result" in answer:
        return answer["result"], None
    error = _exception(answer["error"], answer["args"])
    error.add_note(answer["note"])
    return None, error


def _exception(name: str, args: Sequence[object]) -> Exception:
    """Returns an exception of the built-in class `name` with the arguments `args`. If Python has no such class, or the
    class does not accept `args`, returns a WorkerError with this name."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(*args)
        except TypeError:  # such as UnicodeDecodeError, whose arguments are not JSON
            pass
    return type(name, (WorkerError,), {})(*args)


def passed_on(variables: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables, {name: value}, for a process that grades a model's output or runs it as code:
    the variables that PASSED_ON allows, except secrets, and the variables that `variables` names."""
    usual = {name for name in os.environ if any(fnmatchcase(name, pattern) for pattern in PASSED_ON)}
    secret = {name for name in usual if is_secret(name, os.environ[name] if name.lower().endswith("_proxy") else "")}
    return {name: value for name, value in os.environ.items() if name in {*usual - secret, *variables}}


_current: Workers | None = None


@asynccontextmanager
async def workers(size: int, variables: Sequence[str] = ()) -> AsyncIterator[None]:
    """Provides at most `size` worker processes for `run_in_worker` in the body of an `async with`. The processes get
    the environment variables that `variables` names, in addition to PASSED_ON."""
    global _current
    _current = started = Workers(size, variables)
    try:
        yield
    finally:
        _current = None
        await started.close()


async def run_in_worker(function: Callable[..., T], *args: object, timeout_s: float) -> T:
    """Calls `function(*args)` in another process for at most `timeout_s` seconds, and returns the result. The result is
    made of JSON values: tuples become lists.

    If the function raises an exception of a class that is built into Python, raises an exception of this class here.
    For any other exception, raises a WorkerError with the name of its class. Raises WorkerTimeout when the call takes
    longer, and WorkerDied when the process ends by itself.
    """
    if _current is None:
        raise RuntimeError(
            "run_in_worker outside a run: write `async with orchestrator.workers.workers(2): ...` around it"
        )
    return await _current.run(function, *args, timeout_s=timeout_s)
