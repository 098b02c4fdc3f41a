"""Examines nodes that join the cluster while a run is under way, as those of the run were before its start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from trireme.core.errors import TriremeError
from trireme.doctor.examination import Declared, Expected
from trireme.doctor.findings import UNSHARED, findings
from trireme.doctor.report import model_line, network_line
from trireme.launch.doctor import examine, join_address, joined_nodes, show_warnings
from trireme.plan.base import Plan

EVERY_S = 2.0
"""How often the cluster is asked for its nodes: well within the time in which a process starts on a new one."""
END_S = 10.0
"""How long the end of a run waits for an examination that is under way."""
log = logging.getLogger(__name__)


class Joiners:
    """Looks for new nodes as long as the `with` block takes, and examines each together with the head: whatever is
    wrong is a warning, as the run may do without them. Nodes that are alive when it is made are known."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan, self._console = plan, console
        self._known = {node.id for node in joined_nodes() if node.alive}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="joiners", daemon=True)

    def __enter__(self) -> Joiners:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(END_S)

    def _follow(self) -> None:
        while not self._ending.wait(EVERY_S):
            try:
                self.look()
            except Exception:  # a run never ends because of what only warns
                if not self._ending.is_set():
                    log.warning("nodes that joined were not looked at", exc_info=True)

    def look(self) -> None:
        """Examines the nodes that have joined since the last call, and says what is wrong with them."""
        new = [node for node in joined_nodes() if node.alive and node.id not in self._known]
        if not new:
            return
        self._known |= {node.id for node in new}
        try:
            self._examine(new)
        except TriremeError as error:
            names = ", ".join(node.name for node in new)
            said = f"warning: {names} joined, and was not looked at: {error}; `trireme doctor` looks at all nodes"
            self._console.print(said, style="yellow", markup=False)

    def _examine(self, new: Sequence[Declared]) -> None:
        config = self._plan.config
        found = examine(config, {node.id for node in new})
        names = [node.name for node in found.nodes if node.id in {each.id for each in new}]
        facts = {name: facts for name, facts in found.facts.items() if name in names}  # the head was looked at before
        # Which actors will be there is not known, so neither is the memory that they need.
        expected = replace(Expected.of(config, self._plan), head=join_address(), memory={}, grace_s=0.0)
        wrong = findings(replace(found, facts=facts), expected)
        if self._ending.is_set():
            return
        self._console.print(f"joined: {', '.join(names)}; {network_line(found)}", markup=False)
        if said := model_line(replace(found, facts=facts)):
            self._console.print(said, markup=False)
        show_warnings([finding for finding in wrong if finding.check != UNSHARED], self._console)
