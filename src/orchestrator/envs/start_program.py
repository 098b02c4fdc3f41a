"""Starts a program in this process's place, after limits have been set that hold for it: run as a script, which imports
nothing of Trireme, so that it takes some milliseconds.

    python -I -S start_program.py MEMORY_BYTES PARENT PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(memory_bytes: int, parent: int, command: list[str]) -> None:
    """Becomes the program. On Linux it ends with process `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            sys.exit(1)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
