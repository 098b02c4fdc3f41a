"""The whole system: the quickstart on one device, a checkpoint and a resume, and all tests marked gpu."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from gpu_check.checks import Check, Context, Failed, Figures, NotRun
from gpu_check.engine import SYSTEM
from gpu_check.rooms import GPU_SHARE

ROOT = Path(__file__).parents[2]
STEPS = 6
EXTRA_STEPS = 3
BATCH = ("--orchestrator.batch-size", "4", "--orchestrator.group-size", "4", "--trainer.shards", "1")
TAIL_LINES = 15


def _quickstart(context: Context) -> Figures:
    """Runs the quickstart for some steps. On one GPU trainer and replica share it."""
    rows = _run(context, "--max-steps", str(STEPS))
    return _check_rows(rows, STEPS) | {"first step after, s": rows[0]["time/unix"] - context.memory["started"]}


def _resume(context: Context) -> Figures:
    """Continues that run from its checkpoint."""
    return _resumed(context, STEPS + EXTRA_STEPS)


def _turns(context: Context) -> Figures:
    """Continues it further, with trainer and replica in turns."""
    return _resumed(context, STEPS + 2 * EXTRA_STEPS, "--placement", "colocated")


def _resumed(context: Context, steps: int, *flags: str) -> Figures:
    if not (context.directory / "runs" / "run" / "HEAD").exists():
        raise NotRun("the quickstart left no checkpoint")
    return _check_rows(_run(context, "--max-steps", str(steps), "--resume", *flags), steps)


def _run(context: Context, *flags: str) -> list[dict[str, float]]:
    """Runs `rl` with the quickstart's configuration; returns the rows of its metrics. Raises Failed."""
    context.memory["started"] = time.time()
    place = ["--run.output-dir", str(context.directory / "runs"), "--run.name", "run"]
    if context.on_gpu:
        shared = ["--inference.gpu-memory-utilization", str(GPU_SHARE)]
    else:
        shared = []
    command = ["trireme.cli.rl", "@", "configs/quickstart.toml", "--cluster.device", context.device, *place, *shared]
    _call([*command, *BATCH, *flags], context)
    return [json.loads(line) for line in (context.directory / "runs" / "run" / "metrics.jsonl").open()]


def _call(module: Sequence[str], context: Context) -> str:
    """Runs a module of Python in the repository; returns what it printed. Raises Failed with the end of that."""
    command = [sys.executable, "-m", *module]
    try:
        process = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=context.left_s
        )
    except subprocess.TimeoutExpired as late:
        raise Failed(f"`{' '.join(module)}` had not ended after {late.timeout:.0f} s") from None
    print(process.stdout, file=sys.stderr)
    if process.returncode:
        tail = "\n".join(process.stdout.splitlines()[-TAIL_LINES:])
        raise Failed(f"`{' '.join(module)}` ended with exit code {process.returncode}: {tail}")
    return process.stdout


def _check_rows(rows: Sequence[dict[str, float]], steps: int) -> dict[str, float]:
    """Raises Failed unless there is a row for each step, within the bound on staleness."""
    if [row["step"] for row in rows] != list(range(steps)):
        raise Failed(f"rows of steps {[row['step'] for row in rows]}, expected 0 to {steps - 1}")
    oldest = max(row["off_policy/max"] for row in rows)
    if oldest > 1:
        raise Failed(f"a group of age {oldest} was trained on, the bound is 1")
    return {
        "steps": len(rows),
        "kl_sample_train_v2, most": max(row["optim/kl_sample_train_v2"] for row in rows),
        "reward at the end": rows[-1]["reward/total"],
    }


def _tests(context: Context) -> Figures:
    """Runs the tests that are marked gpu."""
    report = context.directory / "tests.xml"
    _call(["pytest", "-q", "-n", "0", "-m", "gpu", "tests/gpu", f"--junitxml={report}"], context)
    counts = _counts(report)
    if not counts["passed"]:
        raise NotRun(f"no test ran: {counts}")
    return counts


def _counts(report: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"passed": number["tests"] - number["failures"] - number["errors"] - number["skipped"], **number}


CHECKS: tuple[Check, ...] = (
    Check("quickstart on one device", _quickstart, SYSTEM),
    Check("checkpoint and resume", _resume, SYSTEM),
    Check("trainer and replica in turns", _turns, SYSTEM),
    Check("tests marked gpu", _tests, (*SYSTEM, "pytest"), only_gpu="the test suite runs what CPUs share of them"),
)
