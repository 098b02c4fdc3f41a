"""Each room writes its standard output and errors, and those of its children, to a file of the attempt."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path


def redirect(log_dir: Path | None, name: str) -> None:
    """Sends this process's stdout and stderr (the descriptors, so that children inherit them) to `log_dir/name.log`.

    With `log_dir` none they stay where they are. From then on SIGUSR1 writes the stacks of all threads there: so a
    process can be asked where it is, also one that answers nothing.
    """
    if log_dir is None:
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    write_stacks_when_asked()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )


def write_stacks_when_asked() -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads to where its errors go."""
    faulthandler.register(signal.SIGUSR1)
