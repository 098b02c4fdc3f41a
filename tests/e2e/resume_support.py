"""Kills whole runs at chosen points, and compares what resumed ones leave with what uninterrupted ones leave."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_support import DEADLINE_S, QUICKSTART, RL, ROOT, Running, in_directory

DETERMINISTIC = [
    *("@", str(ROOT / "configs" / "guess.toml"), "--deterministic", "--orchestrator.max-steps-off-policy", "0"),
    # Prompts of guess are too short to be shared, and of sort from ten digits on long enough.
    *("--env", '[{id = "guess"}, {id = "sort", group_size = 2, args = {min_digits = 10, max_digits = 12}}]'),
    *("--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--trainer.shards", "2"),
    *("--max-steps", "6", "--checkpoint.every", "2", "--checkpoint.keep-last", "1"),
    *("--eval.every", "2", "--eval.problems", "8"),
    *("--trainer.kl.coef", "0.05", "--trainer.kl.reference.base-model", "./assets/sort-base"),
    # A checkpoint's reference is then neither the first nor its own policy.
    *("--trainer.kl.reference.update-every", "3"),
    *("--trainer.share-prefixes", "on"),
]
"""A small run that has everything a checkpoint must know: two shards, games of several turns in two environments, a
reference model that is refreshed, evaluations, prefixes that are computed once."""
NOT_COMPARED = ("time/", "perf/")
"""Columns of metrics.jsonl that say how fast, not what. `attempt` differs by its meaning."""


def run_and_kill(
    tmp_path: Path,
    flags: Sequence[str],
    *,
    at: str | None = None,
    after_s: float = DEADLINE_S,
    config: Path = QUICKSTART,
    module: str = RL,
) -> str:
    """Starts `rl` and kills its whole tree of processes: at the fault point `at` (`name@passage`), or after `after_s`
    seconds, whatever it is doing then, or nothing any more. Returns what it printed. Raises AssertionError if it never
    comes to the point."""
    with tempfile.TemporaryDirectory(prefix="tr-") as directory:
        reached, out = Path(directory, "reached"), Path(directory, "out")
        faults = {"TRIREME_FAULT_REACHED": str(reached)} | ({"TRIREME_FAULTS": f"{at}=freeze"} if at else {})
        with out.open("w") as stream:
            running = Running.start(
                *in_directory(tmp_path, config),
                *flags,
                environ=faults,
                out=stream,
                module=module,
            )
        deadline = time.monotonic() + after_s
        try:
            while not reached.exists() and running.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert at is None or reached.exists(), f"never came to {at}:\n{out.read_text()}"
        finally:
            running.kill_tree()
            running.files_left()
        assert running.shm_left() == set()
        return out.read_text()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def comparable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name != "attempt" and not name.startswith(NOT_COMPARED)}
        for row in rows
    ]


def contents(checkpoint: Path) -> dict[str, str]:
    """Checksum of each file of a checkpoint, but for the orchestrator's, whose state names attempts, and DCP's table of
    contents, to which it gives a random id."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {
        file["path"]: file["checksum"]
        for file in files
        if not file["path"].startswith("orchestrator/") and file["path"] != "trainer/.metadata"
    }


def assert_same_run(root: Path, reference: Path) -> None:
    """The same rows, the same problems in the same steps, the same checkpoints: bit for bit."""
    assert comparable(rows_of(root / "metrics.jsonl")) == comparable(rows_of(reference / "metrics.jsonl"))
    assert comparable(rows_of(root / "trained.jsonl")) == comparable(rows_of(reference / "trained.jsonl"))
    steps = sorted(path.name for path in (reference / "checkpoints").iterdir())
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == steps
    for step in steps:
        assert contents(root / "checkpoints" / step) == contents(reference / "checkpoints" / step), step
