"""Kills parts of a run from outside at moments that it comes to for certain, and checks all that the run leaves.

A moment is a fault point at which one process freezes (`trireme.process.faults`); while it does, the victim is found
among the processes of the run and killed, or stopped; then the frozen one continues. `scripts/chaos.py` runs all
victims at all moments.
"""

import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster_support import Nodes, cluster_of_two
from resume_support import rows_of
from run_support import (
    DEADLINE_S,
    KILLED_GONE_S,
    Ended,
    Running,
    assert_bound_and_conservation,
    in_directory,
    marked_processes,
    run_rl,
    wait_until_disconnected,
)

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_OK
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import Status

STEPS, BATCH, GROUP, BOUND, HEARTBEAT_S = 8, 4, 4, 1, 20
CHAOS = [
    *("--max-steps", str(STEPS), "--checkpoint.every", "2", "--inference.replicas", "2", "--trainer.shards", "2"),
    *("--orchestrator.batch-size", str(BATCH), "--orchestrator.group-size", str(GROUP), "--eval.every", "4"),
    *("--orchestrator.max-steps-off-policy", str(BOUND), "--eval.problems", "8", "--inference.memory-gb", "0.03"),
    *("--timeouts.start-s", "180", "--timeouts.step-s", "240", "--orchestrator.generation-timeout-s", "25"),
    *("--timeouts.update-s", "60", "--timeouts.checkpoint-s", "60", "--timeouts.heartbeat-s", str(HEARTBEAT_S)),
]
"""A small run that has everything: two shards, two replicas, a checkpoint every second step, an evaluation every
fourth."""
MOMENTS = {
    "start-up": "trainer.start[0]@1=freeze",
    "sampling": "inference.sample[0]@8=freeze",
    "forward/backward": "trainer.forward_backward[0]@4=freeze",
    "publish": "trainer.publish[0]@5=freeze",
    "in-flight update": "inference.loaded[0]@4=freeze",
    "checkpoint": "commit.trainer@2=freeze",
    "evaluation": "orchestrator.evaluation@2=freeze",
    "recovery": "trainer.optim_step[1]@5=kill,trainer.load[0]@1=freeze",
}
"""Where the run freezes: all but the first when there is a checkpoint, the last while trainer and orchestrator are
built again, because another shard was killed."""
PARTS: dict[str, tuple[tuple[str, int], ...]] = {
    "shard": (("trainer_1", 0),),
    "every shard": (("trainer_0", 0), ("trainer_1", 0)),
    "orchestrator": (("orchestrator_0", 0),),
    "replica set": (("replica_set_0", 0),),
    "replica": (("inference_0", 0),),
    "engine": (("inference_0", 1),),
}
"""Who is killed: parts, by the names of their logs, and which of their processes, in the order of their start."""
REPLACED = ("replica", "engine")
"""Their successor comes while the run goes on."""
LAST_STEP = f"trainer.optim_step[0]@{STEPS}=freeze"
"""Where the run freezes again until that successor serves: the steps are shorter than its start."""
BY_HAND = ("driver", "everything")
"""After these somebody has to go on with `--resume`."""
VICTIMS = (*PARTS, "raylet", *BY_HAND)
PROBLEMS_A_BATCH = 16
"""Of the data of `sort`, whatever the run's batch size."""
FOUND_S, LINGER_S = 60.0, 1.0
CPUS_PER_NODE = 3
"""Of five actors of one CPU each three go to the head, and two to the second node."""


@dataclass(frozen=True)
class Cell:
    """`victim` gets `sends` at `moment`."""

    victim: str
    moment: str
    sends: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.sends.name} to {self.victim} at {self.moment}"


def log_of(pid: int) -> Path | None:
    """The file that a process prints to; None when it has ended, or prints elsewhere."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return None


def parts_of(mark: str) -> dict[str, list[int]]:
    """The living processes of each part of a run, by the log that they write, in the order of their start."""
    pids_by_part = defaultdict(list)
    for pid in marked_processes(mark):
        log = log_of(pid)
        if log and log.suffix == ".log" and log.parent.name.startswith("attempt_"):
            pids_by_part[log.stem].append(pid)
    return {part: sorted(pids, key=started_at) for part, pids in pids_by_part.items()}


def started_at(pid: int) -> int:
    """In ticks since the machine was started; 0 when it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def wait_for(label: str, happened: Callable[[], bool], running: Running | None, timeout_s: float) -> None:
    """Raises AssertionError when it does not happen in time, or the run ends before."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert running is None or running.process.poll() is None, f"the run ended before {label}"
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {label}"
        time.sleep(0.02)


def victims(victim: str, running: Running, nodes: Nodes | None) -> list[int]:
    """Process ids of who is to be killed; those of parts that are still to start are waited for."""
    if victim == "driver":
        return [running.process.pid]
    if victim == "raylet":
        assert nodes is not None
        return [nodes.raylet(1)]
    expected_parts = PARTS[victim]

    def all_there() -> bool:
        parts = parts_of(running.mark)
        return all(len(parts.get(part, [])) > which for part, which in expected_parts)

    wait_for(f"the processes of {victim}", all_there, running, FOUND_S)
    parts = parts_of(running.mark)
    return [parts[part][which] for part, which in expected_parts]


def strike(cell: Cell, running: Running, nodes: Nodes | None = None) -> list[int]:
    """Sends the signal, and returns the ids of the processes that got it. A lost node is replaced by another; a driver
    that was stopped is continued after a while."""
    if cell.victim == "everything":
        running.kill_tree()
        return []
    struck = victims(cell.victim, running, nodes)
    for pid in struck:
        os.kill(pid, cell.sends)
    if nodes and cell.victim == "raylet":
        nodes.join()
    if cell.victim == "driver" and cell.sends == signal.SIGSTOP:
        time.sleep(1.5 * HEARTBEAT_S)
        running.process.send_signal(signal.SIGCONT)
    return struck


def armed(directory: Path, faults: Sequence[str]) -> dict[str, str]:
    """The environment in which each of `faults` happens once; what freezes does until its file (`reached`) is
    removed."""
    (directory / "once").mkdir()
    (directory / "reached").mkdir()
    return {
        "TRIREME_FAULTS": ",".join(faults),
        "TRIREME_FAULT_ONCE": str(directory / "once"),
        "TRIREME_FAULT_REACHED": str(directory / "reached"),
    }


def reached(directory: Path, faults: str) -> Path:
    """The file that is there while the last of `faults`, which were armed with `directory`, freezes."""
    return directory / "reached" / faults.split(",")[-1]


@contextmanager
def started(place: Path, flags: Sequence[str], environ: Mapping[str, str]) -> Iterator[Running]:
    """A run in `place`, whose output goes to `out.txt` there. It is killed if it is still there in the end."""
    with (place / "out.txt").open("w") as out:
        running = Running.start(*in_directory(place), *flags, environ=dict(environ), out=out)
    try:
        yield running
    except AssertionError as error:
        error.add_note((place / "out.txt").read_text())
        raise
    finally:
        if running.process.poll() is None:
            running.kill_tree()


def run_cell(place: Path, cell: Cell, flags: Sequence[str] = CHAOS) -> Ended:
    """Runs one cell to the end of the run, by `--resume` where that is needed."""
    with ExitStack() as ending:
        directory, nodes = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="tr-"))), None
        replaced = cell.victim in REPLACED and cell.moment != "recovery"
        environ = armed(directory, [MOMENTS[cell.moment], *([LAST_STEP] if replaced else [])])
        if cell.victim == "raylet":
            nodes = ending.enter_context(cluster_of_two(CPUS_PER_NODE, environ))
        address = ["--cluster.address", nodes.address] if nodes else []
        running = ending.enter_context(started(place, [*flags, *address], environ))
        moment, last = reached(directory, MOMENTS[cell.moment]), reached(directory, LAST_STEP)
        wait_for(f"{cell.moment} ({MOMENTS[cell.moment]})", moment.exists, running, DEADLINE_S)
        struck = strike(cell, running, nodes)
        time.sleep(LINGER_S)  # what is frozen is still there when the victim is no more
        moment.unlink()
        if replaced:
            wait_for(f"the last step ({LAST_STEP})", last.exists, running, DEADLINE_S)
            wait_for("its successor", lambda: successors_serve(place / "run"), running, DEADLINE_S)
            last.unlink()
        if cell.victim == "raylet" and cell.sends == signal.SIGSTOP:
            # Workers of a raylet that is stopped cannot end: they ask only whether its process is there. Continued, it
            # learns that the cluster has given its node up, and ends with them.
            running.process.wait(DEADLINE_S)
            os.kill(struck[0], signal.SIGCONT)
        outcome = end_of(running, place)
    if cell.victim in BY_HAND and cell.sends == signal.SIGKILL:
        assert outcome.code == -signal.SIGKILL, outcome.out
        assert (outcome.remaining, outcome.shm) == ([], set()), (outcome.remaining, outcome.shm, outcome.out)
        return run_rl(place, *flags, "--resume")
    return outcome


def successors_serve(root: Path) -> bool:
    """Returns True if all replicas serve, and one of them is a successor."""
    status = Status.read(root)
    replicas = [part for part in status.parts if part.room == "inference"] if status else []
    return all(part.health == PartHealth.HEALTHY for part in replicas) and any(part.restarts for part in replicas)


def end_of(running: Running, place: Path) -> Ended:
    """Waits for the end of a run whose output goes to `out.txt`."""
    code = running.process.wait(DEADLINE_S)
    remaining = wait_until_disconnected(running.mark, KILLED_GONE_S)
    out = (place / "out.txt").read_text()
    return Ended(code, out, place / "run", remaining, running.files_left(), running.shm_left())


def assert_whole(outcome: Ended, steps: int = STEPS) -> None:
    """The run is at its end, and all that it says holds: every step once, every problem in one terminal state, the
    bound, a last checkpoint that verifies, nothing left behind."""
    assert outcome.code == EXIT_OK, outcome.out
    assert [row["step"] for row in outcome.rows] == list(range(steps))
    assert_bound_and_conservation(outcome, BOUND)
    assert_every_problem_once(outcome)
    newest, passed_over = CheckpointStore(outcome.root).newest()
    assert passed_over == {}
    assert newest is not None
    assert newest.path.name == f"step_{steps:06d}"
    outcome.assert_nothing_left()


def assert_every_problem_once(outcome: Ended) -> None:
    """Problems are begun in the order of the data. Those that were not trained on, of all that were begun, are as many
    as the ledger says ended otherwise or are still under way."""
    trained = rows_of(outcome.root / "trained.jsonl")
    assert [row["step"] for row in trained] == [row["step"] for row in outcome.rows]
    groups = [group for row in trained for group in row["groups"]]
    assert all(row["step"] - group["floor"] <= BOUND for row in trained for group in row["groups"])
    numbers = [number_of(group["problem"]) for group in groups]
    last: Mapping[str, float] = outcome.rows[-1]
    assert len(numbers) == len(set(numbers)) == BATCH * len(trained) == last["ledger/trained"]
    otherwise = sum(last[f"ledger/{end}"] for end in ("filtered", "dropped", "failed", "active", "to_resample"))
    begun = last["ledger/dispatched"] - last["ledger/resampled"] + last["ledger/to_resample"]
    assert len(numbers) + otherwise == begun
    assert set(numbers) <= set(range(int(begun))), "a problem was trained on that was never counted as begun"


def number_of(problem: str) -> int:
    """The place of a problem (`epoch.batch.position`) in the data of the first epoch."""
    epoch, batch, position = map(int, problem.split("."))
    assert epoch == 0
    return batch * PROBLEMS_A_BATCH + position
