"""`trireme scale RUN --replicas N`: changes the number of replicas of a live run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trireme.core.errors import RoomFailed
from trireme.core.refusals import Refusal
from trireme.run.rundir import command_of, resume_command
from trireme.supervision.roster import PartHealth, RunPart
from trireme.supervision.status import DriverProcess, Status, request_scale

POLL_S = 0.2
PATIENCE_S = 1.0
"""Seconds. A wait is reported only if it takes longer."""
T = TypeVar("T")


def scale(root: Path, replicas: int, wait: bool, say: Callable[[str], None]) -> None:
    """Requests `replicas` replicas from the driver of the run in `root`, and waits until the driver agrees; with
    `wait`, until all of these replicas serve. `say` gets lines of progress.

    Raises BadInput if the run cannot have that many replicas. Raises RoomFailed if its driver ends or does not answer
    in time, or if the replicas do not serve in time.
    """
    config = _checked(root, replicas)
    timeouts = config["timeouts"]
    status = Status.read(root)
    start_s = max(timeouts["start_s"], status.start_s if status else 0.0)
    until = partial(_until, root, time.monotonic() + start_s + timeouts["update_s"], say)
    with request_scale(root, replicas) as answered:
        say(until(answered, lambda: "it has not answered yet; it does when all rooms have started"))

    def all_serve() -> bool | None:
        serving = [part.serves for part in _replicas(root)]
        return (len(serving) == sum(serving) == replicas) or None

    if wait:
        until(all_serve, lambda: standing(root, replicas))
        say(standing(root, replicas))


def _checked(root: Path, replicas: int) -> dict[str, Any]:
    """Returns the configuration of the run in `root`. Raises BadInput if the request is refused without asking the
    driver: no live driver, a run without replicas, a number below 1, a deterministic run."""
    idle = f"scale for {root}, which has no driver", "a live run"
    if not (root / "config.json").exists():
        raise Refusal(*idle, "start it first")
    config: dict[str, object] = json.loads((root / "config.json").read_bytes())
    if command_of(root) != "rl":
        raise Refusal(f"scale for {root}, a run of {command_of(root)}", "a run of rl", "choose a run of rl")
    if replicas < 1:
        raise Refusal(
            f"--replicas {replicas}",
            "1 or more: a run trains on what its replicas sample",
            "to end the run, send its driver SIGTERM; to keep it going, ask for --replicas 1",
        )
    if config["deterministic"]:
        raise Refusal(
            f"scale for {root}, which is deterministic",
            "a run that need not repeat bit for bit: what is sampled depends on the number of replicas",
            f"start another one with --inference.replicas {replicas}",
        )
    driver = DriverProcess.read(root)
    if driver is None or driver.alive is False:
        raise Refusal(*idle, f"{resume_command(root)} --inference.replicas {replicas}")
    return config


def _until(
    root: Path, end: float, say: Callable[[str], None], poll: Callable[[], T | None], describe: Callable[[], str]
) -> T:
    """Calls `poll` until it returns a value other than None, and returns this value. `describe` returns a text on the
    awaited event. If the wait lasts longer than PATIENCE_S seconds, `say` gets this text, then again whenever the text
    changes. Raises RoomFailed if the driver of the run in `root` ends, or if the monotonic time `end` passes."""
    message = ""
    start = time.monotonic()
    while (value := poll()) is None:
        now = time.monotonic()
        if describe() != message and now > start + PATIENCE_S:
            message = describe()
            say(message)
        driver = DriverProcess.read(root)
        if driver is None or driver.alive is False:
            status = Status.read(root)
            reason = f": {status.ended.why}" if status and status.ended else ""
            raise RoomFailed(f"the driver of {root} ended{reason}")
        if now > end:
            raise RoomFailed(
                f"the driver of {root} (process {driver.pid} on {driver.node}) has not completed this change within "
                f"{now - start:.0f} s: {describe()}"
            )
        time.sleep(POLL_S)
    return value


def _replicas(root: Path) -> list[RunPart]:
    status = Status.read(root)
    if status:
        return [part for part in status.parts if part.room == "inference"]
    return []


def standing(root: Path, target: int) -> str:
    """Returns a text on how many of the `target` replicas serve, and on the states of the others, for example:

    2 of 4 replicas serve; inference_2 catching up, inference_3 starting (it waits for a place in the cluster)
    """
    replicas = _replicas(root)
    not_serving = [
        f"{part.name} {part.health}" + (f" ({part.why})" if part.why else "")
        for part in replicas
        if part.health != PartHealth.HEALTHY
    ]
    text = f"{sum(part.serves for part in replicas)} of {target} replicas serve"
    if not_serving:
        return f"{text}; {', '.join(not_serving)}"
    return text
