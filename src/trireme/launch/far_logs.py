"""Gathers logs and traces of nodes that do not see the run directory, every few seconds and at the end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.core.errors import TriremeError
from trireme.launch.gathering import FarNode
from trireme.process import waits
from trireme.run.tails import append

EVERY_S = 5.0
ANSWER_S = 10.0
"""Time limit for the answer of a node."""
LAST_S = 60.0
"""How long the last of a node's logs are gathered at the end of an attempt."""
PATIENCE = 3
"""Rounds in a row without an answer after which it is said."""


class GatheredLogs:
    """How much of each file has been gathered in this command. Processes may outlive their attempt, so this does."""

    def __init__(self) -> None:
        self._first_attempt: int | None = None
        self._known: dict[str, dict[str, int]] = {}

    def following(
        self, root: Path, attempt: int, nodes: Sequence[FarNode], note: Callable[[str], None]
    ) -> LogCollector:
        """Returns the collector for an attempt of the run in `root`; `note` records an incident."""
        self._first_attempt = self._first_attempt or attempt
        return LogCollector(root, self._first_attempt, self._known, nodes, note)


class LogCollector:
    """Appends what the processes on `nodes` have logged to the files of the run in `root`, as long as the `with` block
    takes, and once more after it. Files of attempts before the first one of this command are older, and stay."""

    def __init__(
        self,
        root: Path,
        first_attempt: int,
        known: dict[str, dict[str, int]],
        nodes: Sequence[FarNode],
        note: Callable[[str], None],
    ) -> None:
        """`known`: how much of each file is there, by node."""
        self._root, self._first_attempt, self._known = root, first_attempt, known
        self._nodes, self._note = nodes, note
        self._failed: Counter[str] = Counter()  # rounds in a row without an answer, by node
        self._why: dict[str, str] = {}
        self._ending = threading.Event()

    def __enter__(self) -> LogCollector:
        self._thread = threading.Thread(target=self._follow, name="logs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(2 * ANSWER_S * len(self._nodes))
        for node in self._nodes:
            deadline = time.monotonic() + LAST_S
            while self.gather(node):
                if time.monotonic() > deadline:  # a replica that outlives the attempt writes on
                    self._why[node.node] = f"after {LAST_S:g} s there was still more"
                    self._say(node)
                    break
            if 0 < self._failed[node.node] < PATIENCE:
                self._say(node)

    def _follow(self) -> None:
        while not self._ending.wait(EVERY_S):
            for node in self._nodes:
                while self.gather(node) and not self._ending.is_set():
                    pass

    def gather(self, node: FarNode) -> bool:
        """Gathers what is new on one node. Returns False if there was nothing, or no answer: after some, that is
        said."""
        known = self._known.setdefault(node.node, {})
        try:
            asked = node.files.grown.remote(self._root, known, self._first_attempt)
            parts = node.get(asked, "logs and traces", time.monotonic() + ANSWER_S)
            for part in parts:
                append(self._root, part)
                known[part.path] = part.end
        except TriremeError as error:
            self._failed[node.node] += 1
            self._why[node.node] = str(error)
            if waits.died(error):
                node.forget()
            if self._failed[node.node] == PATIENCE:
                self._say(node)
            return False
        self._failed[node.node] = 0
        return bool(parts)

    def _say(self, node: FarNode) -> None:
        files = ", ".join(sorted(Path(path).stem for path in self._known[node.node] if path.endswith(".log")))
        self._note(
            f"logs and traces of node {node.name} ({files or 'none yet'}) are not complete here: what was written "
            f"there after its last answer stays there, and is lost if the node is: {self._why[node.node]}"
        )
