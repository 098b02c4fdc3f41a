"""The entry points of the commands. They handle Ctrl-C before a command's modules are imported, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from types import FrameType

from trireme.core.errors import EXIT_INTERRUPTED
from trireme.core.own_packages import hidden_modules

LONG_STARTS = ("rl", "sft", "inference")
"""Commands that import for seconds before they can print anything else."""


def _end(_signum: int, _frame: FrameType | None) -> None:
    print("stopped by a signal; nothing was started", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def _start(command: str) -> int:
    signal.signal(signal.SIGINT, _end)
    if command in LONG_STARTS and not {"--help", "-h", "--version"} & {*sys.argv}:
        print("starting", file=sys.stderr, flush=True)
    for hidden in hidden_modules([os.getcwd(), *sys.path]):
        print(f"note: {hidden}", file=sys.stderr)
    main = import_module(f"trireme.cli.{command}").main
    code: int = main()
    return code


def rl() -> int:
    """Runs the command `rl` and returns its exit code."""
    return _start("rl")


def sft() -> int:
    """Runs the command `sft` and returns its exit code."""
    return _start("sft")


def inference() -> int:
    """Runs the command `inference` and returns its exit code."""
    return _start("inference")


def trireme() -> int:
    """Runs the command `trireme` and returns its exit code. `trireme rl` is the same as `rl`, and likewise for `sft`
    and `inference`."""
    if len(sys.argv) > 1 and sys.argv[1] in LONG_STARTS:
        return _start(sys.argv.pop(1))
    return _start("trireme")
