"""The process of a worker (`orchestrator.workers`): `python -m orchestrator.worker_process PARENT`, which answers calls
on the socket that is its standard input.

    call    size, token of the call, pickle of a function and its arguments
    answer  size, token                                          the function is imported, and about to be called
            size, token, {"result": ...}  or  {"error": class name, "args": [...], "note": traceback}

An answer is JSON of at most MOST_BYTES, which runs no code in the orchestrator, whatever wrote it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_BYTES = 4 * 2**30
"""The most memory that a worker may allocate; when it needs more, Python raises MemoryError in the worker."""
MOST_BYTES = 16 * 2**20
"""The most bytes of an answer."""
TOKEN_BYTES = 32
"""The length of a call's token, which each answer to the call repeats."""
HEADER = struct.Struct("!Q")
"""The number of bytes that follow: the token and a text."""
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


def main(parent: int) -> None:
    """Answers the calls that arrive on the socket at standard input, one after the other, until the other end closes
    the socket. When the process `parent` ends, the system kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process in order
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_DUMPABLE, 0)  # programs that a function starts read neither the socket nor the token
    if os.getppid() != parent:  # it ended before that
        sys.exit()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with take_connection() as connection, connection.makefile("rwb") as stream:
        while header := stream.read(HEADER.size):
            token = stream.read(TOKEN_BYTES)
            request = stream.read(HEADER.unpack(header)[0] - TOKEN_BYTES)
            call = load(request)
            send(stream, token, b"")
            send(stream, token, answer(call))


def take_connection() -> socket.socket:
    """Returns the socket that was standard input, and replaces standard input by /dev/null, so that programs that a
    function starts do not inherit the socket."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def load(request: bytes) -> Callable[[], object]:
    """Unpickles a call; this imports the call's function. Returns a function that makes the call. If unpickling fails,
    returns a function that raises the error."""
    try:
        function, *args = pickle.loads(request)
    except BaseException as error:
        failure = error  # Python forgets `error` at the end of this block

        def fail() -> None:
            raise failure

        return fail
    return lambda: function(*args)


def answer(call: Callable[[], object]) -> bytes:
    """Makes a call. Returns the JSON of an answer (see the module's docstring), with the call's result or exception."""
    try:
        return encoded(call())
    except BaseException as error:
        note = "in a worker process:\n" + "".join(traceback.format_exception(error))
        args = [arg if isinstance(arg, str | int | None) else repr(arg) for arg in error.args]
        return json.dumps({"error": type(error).__name__, "args": args, "note": note}, allow_nan=False).encode()


def encoded(result: object) -> bytes:
    """Returns an answer, as JSON, that contains the result of a call. Raises TypeError if the result is not a JSON
    value, ValueError if the JSON exceeds MOST_BYTES."""
    try:
        text = json.dumps({"result": result}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        expected = "numbers that are finite, text, lists and tables"
        raise TypeError(
            f"the result of type {type(result).__name__} cannot be sent back: {error}; {expected} can"
        ) from None
    if len(text) > MOST_BYTES:
        raise ValueError(f"the result cannot be sent back: it has {len(text)} bytes; expected at most {MOST_BYTES}")
    return text


def send(stream: BinaryIO | Any, token: bytes, text: bytes) -> None:
    """Writes one message of an answer to `stream`: the message's size in bytes, the call's `token` (random bytes, not a
    token of a language model), and `text`."""
    stream.write(HEADER.pack(len(token) + len(text)) + token + text)
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
