"""The command `trireme serve` for tests: at one port and in one directory, killed and started again."""

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
from cluster_support import free_port
from run_support import Running, wait_until_disconnected

from trireme.core.errors import EXIT_INTERRUPTED

LIMIT_S = 600.0


def logprobs_of(output: Any) -> np.ndarray:
    """Returns the log-probabilities of all datums of a pass, [T]."""
    return np.concatenate([of_datum["logprobs"].data for of_datum in output.loss_fn_outputs])


class Server:
    """The command, at one port and in one directory; it may be killed and started again."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory, self.flags = directory, flags
        self.port = free_port()
        self.key = ""
        self.before: list[Running] = []
        self.start()

    def start(self) -> None:
        place = ("--run.output-dir", str(self.directory), "--service.port", str(self.port))
        flags = ("--trainer.shards", "1", *self.flags)
        self.running = Running.start("serve", "@", "examples/sort.toml", *place, *flags, module="trireme.cli.trireme")
        self.lines: list[str] = []
        self.serves = threading.Event()
        threading.Thread(target=self._read, args=(self.running,), daemon=True).start()
        assert self.serves.wait(LIMIT_S), "".join(self.lines)

    def _read(self, running: Running) -> None:
        assert running.process.stdout is not None
        for line in running.process.stdout:
            self.lines.append(line)
            if "TINKER_BASE_URL" in line:
                (keys,) = self.directory.glob("**/service.keys")
                self.key = next(word for word in keys.read_text().split() if word.startswith("tml-client-"))
                self.serves.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill_all(self) -> None:
        """Kills the server and all that it has started, as the end of a job does."""
        self.running.kill_tree()
        self.before.append(self.running)

    def stop(self) -> set[str]:
        """Ends the command as Ctrl-C does. Returns the temporary files that the last one has left."""
        self.running.process.send_signal(signal.SIGINT)
        assert self.running.process.wait(60) == EXIT_INTERRUPTED, "".join(self.lines)
        assert wait_until_disconnected(self.running.mark, 20.0) == []
        for process in (*self.before, self.running):
            files = process.files_left()
            assert process.shm_left() == set()
        return files
