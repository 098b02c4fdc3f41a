"""Measures the cost of losing a replica and a shard.

    python scripts/bench/recovery.py [--repeats 5]

replica    a run of the counting task whose two replicas have a core each, with half of the trainer's shards. Of one
           replica either the engine is killed, whose actor starts another one, or the actor, with which its engine
           dies. The figure: from SIGKILL until the successor samples, over the bare start of that process, alone on
           that core.
shard      the quickstart, with one shard that is killed just after a checkpoint; from SIGKILL to the end of the next
           completed step, over the start of both shards from the same checkpoint, alone on the machine.

What happened when is read from the traces. The last line of the output is the result as one JSON object, whose figure
is the successor's after the loss of an engine, with defaults. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from _common import ROOT, Result, median, room_of, run_for_json, stop, wait_for_row
from _rooms import Task, let_actors_import_benchmarks
from counting import make_model

sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from chaos_support import log_of

if TYPE_CHECKING:
    from inference.handle import InferenceHandle
    from trainer.handle import TrainerHandle
    from trireme.config import Config

Value = TypeVar("Value")
TASK = Task(hidden=128, layers=2, batch_size=8, group_size=4, sequences=16, prompt=16, median=64, sigma=0.3)
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SMALL = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--checkpoint.async-save", "false"]
LOST_CORE = 0
KEPT_CORE = 1
MANY = 100_000
"""Steps: more than there will be."""
WARM_UP_STEPS = 5
BEFORE_S = 20.0
LOOK_S = 0.05
DEADLINE_S = 300.0
COMMIT_AT = 4
SUCCESSOR_TARGET = 1.3
SHARD_TARGET = 2.0


@dataclass(frozen=True)
class Replica:
    """One loss of a replica, in seconds."""

    bare_start_s: float
    until_it_samples_s: float

    @property
    def successor(self) -> float:
        return self.until_it_samples_s / self.bare_start_s


@dataclass(frozen=True)
class Shard:
    """One loss of a shard, in seconds."""

    loaded_start_s: float
    until_step_s: float

    @property
    def ratio(self) -> float:
        return self.until_step_s / self.loaded_start_s


@dataclass(frozen=True)
class Run:
    """A run of `rl` that continues until it is stopped."""

    process: subprocess.Popen[bytes]
    root: Path
    log: Path

    def wait_for(self, event: str, look: Callable[[], Value | None]) -> Value:
        """Waits until `found` returns a value, and returns it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := look()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{event} did not happen; the output is:\n{self.log.read_text()}")
            time.sleep(LOOK_S)
        return value

    def wait_for_step(self, step: int) -> None:
        wait_for_row(self.process, self.root / "metrics.jsonl", step, self.log, time.monotonic() + DEADLINE_S)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """All processes below the driver, each with the part that it is of, by its log ("" where it has none)."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        logs = [(log_of(process.pid), process) for process in below]
        return [(log.stem if log and log.suffix == ".log" else "", process) for log, process in logs]

    def trace(self, part: str, attempt: int = 1) -> list[dict[str, Any]]:
        """The events of a part that are written so far."""
        file = self.root / "trace" / f"attempt_{attempt}" / f"{part}.json"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for line in lines if (event := _event(line))]

    def incidents(self) -> list[dict[str, Any]]:
        file = self.root / "incidents.jsonl"
        if file.exists():
            return [json.loads(line) for line in file.read_text().splitlines()]
        return []


def _event(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line.lstrip("[,"))
    except ValueError:  # torn by a kill, or not yet whole
        return None


@contextmanager
def running(directory: str, config: Path, *flags: str) -> Iterator[Run]:
    """A run in `directory`, which is stopped at the end of the block."""
    place = ["--run.output-dir", directory, "--run.name", "run", "--max-steps", str(MANY)]
    command = [sys.executable, "-m", "trireme.cli.rl", "@", str(config), *place, *flags]
    log = Path(directory) / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Run(process, Path(directory) / "run", log)
    finally:
        stop(process)


# ------------------------------------------------------------------------------------------------------------- replica


def lose_replica(config: Path, bare_start_s: float, lost: str) -> Replica:
    """Kills a process of replica 0: `lost` is "replica actor" or "engine core"."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, running(directory, config) as run:
        run.wait_for_step(WARM_UP_STEPS)
        spread(run)
        time.sleep(BEFORE_S)
        (process,) = (p for part, p in run.processes() if part == "inference_0" and room_of(p) == lost)
        killed = time.time()
        process.send_signal(signal.SIGKILL)
        samples = run.wait_for("the successor's first request", lambda: first_request(run))
        log = (logs(run) / "inference_0.log").read_text()
        if lost == "engine core" and "starts another engine" not in log:
            raise RuntimeError("the successor came in another way: its actor has started no other engine")
    return Replica(bare_start_s, samples - killed)


def logs(run: Run) -> Path:
    return run.root / "logs" / "attempt_1"


def spread(run: Run) -> None:
    """Pins every thread to its core. Later processes of Ray inherit the core of Ray's service."""
    survivors = {"inference_1", "trainer_1", "orchestrator_0"}
    for part, process in run.processes():
        core = KEPT_CORE if part in survivors else LOST_CORE
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    for thread in psutil.Process(run.process.pid).threads():
        os.sched_setaffinity(thread.id, {KEPT_CORE})


def first_request(run: Run) -> float | None:
    """Returns when replica 0 had a request in flight again, in seconds since 1970. Until its loss is an incident, an
    actor with a dead engine may still take some."""
    incidents = run.incidents()
    if not incidents:
        return None
    counted = (event for event in run.trace("inference_0") if event["ph"] == "C" and event["args"]["number"])
    return next((at for event in counted if (at := event["ts"] / 1e6) > incidents[0]["at"]), None)


# --------------------------------------------------------------------------------------------------------------- shard


def lose_shard() -> Shard:
    flags = [*SMALL, "--checkpoint.every", str(COMMIT_AT), "--checkpoint.keep-every", str(COMMIT_AT)]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        with running(directory, QUICKSTART, *flags) as run:
            checkpoint = run.root / "checkpoints" / f"step_{COMMIT_AT:06d}"
            run.wait_for("the checkpoint", checkpoint.exists)
            (shard,) = (process for part, process in run.processes() if part == "trainer_1")
            killed = time.time()
            shard.send_signal(signal.SIGKILL)
            step = run.wait_for("a step of the next attempt", lambda: spans(run, "driver_0", "step"))[0]
        loaded_start_s = bare("shards", run.root / "config.json", checkpoint)
    return Shard(loaded_start_s, (step["ts"] + step["dur"]) / 1e6 - killed)


def spans(run: Run, part: str, name: str) -> list[dict[str, Any]]:
    """Returns the times of the second attempt."""
    return [event for event in run.trace(part, attempt=2) if event["ph"] == "X" and event["name"] == name]


# ---------------------------------------------------------------------------------------------------------------- bare


def bare(room: str, config: Path, checkpoint: Path | None = None) -> float:
    """Seconds that `room` takes to start, alone on the machine, below a process that has started it once before."""
    command = [sys.executable, __file__, "--bare", room, "--config", str(config)]
    return float(run_for_json([*command, *(["--checkpoint", str(checkpoint)] if checkpoint else [])], {})[1]["seconds"])


def start_bare(room: str, config_json: Path, checkpoint: Path | None) -> float:
    if room == "replica":
        os.sched_setaffinity(0, {LOST_CORE})
    from trireme.config import Config
    from trireme.config.load import WRITTEN_BY
    from trireme.process.environ import prepare_ray_environment

    keys = json.loads(config_json.read_text())
    keys.pop(WRITTEN_BY, None)  # only a run's own file says by which versions it was written
    config = Config.model_validate(keys)
    prepare_ray_environment(None, threads=1, deterministic=False)
    import ray

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        try:
            start = start_replica if room == "replica" else start_shards
            start(config, Path(directory) / "logs", checkpoint)
            return start(config, Path(directory) / "logs", checkpoint)
        finally:
            ray.shutdown()


def start_replica(config: Config, log_dir: Path, _checkpoint: Path | None) -> float:
    from inference.handle import InferenceHandle

    started = time.monotonic()
    group = InferenceHandle.start(config, [{"num_cpus": 1}], log_dir)
    return until_ready(group, started, lambda: None)


def start_shards(config: Config, log_dir: Path, checkpoint: Path | None) -> float:
    from trainer.handle import TrainerHandle
    from trireme.checkpoint.manifest import Manifest

    assert checkpoint is not None
    started = time.monotonic()
    group = TrainerHandle.start(config, [{"num_cpus": 1}] * config.trainer.mesh.processes, log_dir)
    return until_ready(
        group, started, lambda: group.load_state(checkpoint / "trainer", Manifest.read(checkpoint).identities)
    )


def until_ready(group: InferenceHandle | TrainerHandle, started: float, then: Callable[[], object]) -> float:
    from trireme.process import waits

    refs, names = group.ready_refs()
    waits.get_all(refs, owners=names, timeout_s=DEADLINE_S)
    then()
    seconds = time.monotonic() - started
    group.stop()
    return seconds


def resolved(config: Path, to: Path) -> None:
    """The whole configuration, as a run would write it."""
    from trireme.config.load import load

    to.write_text(load(["@", str(config)]).config.model_dump_json())


def report(engines: Sequence[Replica], actors: Sequence[Replica], shards: Sequence[Shard]) -> None:
    successor = median([engine.successor for engine in engines])
    shard = median([engine.ratio for engine in shards])
    Result(
        name="recovery",
        value=median([engine.until_it_samples_s for engine in engines]),
        unit="s",
        ratio=successor,
        target=SUCCESSOR_TARGET,
        holds=successor < SUCCESSOR_TARGET and shard < SHARD_TARGET,
        against="the bare start-up of a replica",
        detail={
            "shard": {"ratio": shard, "target": SHARD_TARGET},
            "engine": summary(engines),
            "actor": summary(actors),
            "shards": [asdict(engine) for engine in shards],
        },
    ).print()


def summary(replicas: Sequence[Replica]) -> dict[str, object]:
    return {
        "successor": median([replica.successor for replica in replicas]),
        "replicas": [asdict(replica) for replica in replicas],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--bare", choices=["replica", "shards"], help="start one room, in this process")
    parser.add_argument("--config", type=Path, help="of --bare: a resolved configuration")
    parser.add_argument("--checkpoint", type=Path, help="of --bare shards: what they read")
    args = parser.parse_args()
    if args.bare:
        print(json.dumps({"seconds": start_bare(args.bare, args.config, args.checkpoint)}), flush=True)
        return
    let_actors_import_benchmarks()
    engines = []
    actors = []
    shards = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        make_model(directory / "model", hidden=TASK.hidden, layers=TASK.layers)
        config = directory / "task.json"
        config.write_text(json.dumps(with_two_of_each(TASK.config(directory / "model"))))
        resolved(config, directory / "resolved.json")
        for _ in range(args.repeats):
            bare_start_s = bare("replica", directory / "resolved.json")
            engines.append(lose_replica(config, bare_start_s, "engine core"))
            actors.append(lose_replica(config, bare_start_s, "replica actor"))
            shards.append(lose_shard())
            print(engines[-1], actors[-1], shards[-1], flush=True)
    report(engines, actors, shards)


def with_two_of_each(config: dict[str, Any]) -> dict[str, object]:
    """Half of each room to each core; batches wait long enough in between that the replicas are what limits the run."""
    config["inference"] |= {"replicas": 2}
    config["trainer"] |= {"shards": 2}
    config["orchestrator"] |= {"max_steps_off_policy": 4}
    return config


if __name__ == "__main__":
    main()
