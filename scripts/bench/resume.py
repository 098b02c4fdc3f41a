"""Measures how much longer a resume takes than a start: from the command to the first completed step, alternately.

    python scripts/bench/resume.py [--repeats 3]

The model is the random one of `checkpoint.py`, 100 million parameters, with their AdamW state in the commit; all else
is the quickstart's. The first round warms the caches and is reported apart. The last line of the output is the result
as one JSON object. Leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from _common import ROOT, Result, median, run_rl
from checkpoint import make_model

CONFIG = ROOT / "configs" / "quickstart.toml"
FIRST, LAST = 2, 4
SMALL_BATCH = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "2"]


def measure(model: Path) -> tuple[float, float, int]:
    """Seconds to the first step of a new run, and of its resume at step FIRST; bytes of the commit."""
    flags = [*SMALL_BATCH, "--model.name", str(model), "--checkpoint.every", "0"]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        fresh = run_rl(CONFIG, *flags, "--max-steps", str(FIRST), directory=Path(directory))
        (commit,) = (Path(directory) / "run" / "checkpoints").iterdir()
        nbytes = sum(file.stat().st_size for file in commit.rglob("*") if file.is_file())
        resumed = run_rl(
            CONFIG, *flags, "--max-steps", str(LAST), "--resume", directory=Path(directory), first_step=FIRST
        )
    return fresh.first_step_s, resumed.first_step_s, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds (default: 3)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: expected at least 1")
    fresh_s, resumed_s = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        model = Path(directory) / "model"
        parameters = make_model(model)
        for file in (ROOT / "assets" / "sort-base").glob("tokenizer*"):
            shutil.copy(file, model)
        for i in range(args.repeats + 1):
            fresh, resumed, nbytes = measure(model)
            fresh_s.append(round(fresh, 2))
            resumed_s.append(round(resumed, 2))
            print(f"round {i}: first step after {fresh:.1f} s, resumed {resumed:.1f} s", flush=True)
    extra = median([r - f for f, r in zip(fresh_s[1:], resumed_s[1:], strict=True)])
    Result(
        name="resume_time",
        value=extra,
        unit="s that a resume takes longer than a start, to the first step",
        ratio=round(median(resumed_s[1:]) / median(fresh_s[1:]), 3),
        target=None,
        holds=None,
        against="the start of the same run",
        detail={
            "parameters": parameters,
            "commit_mib": round(nbytes / 2**20, 1),
            "fresh_s": fresh_s,
            "resumed_s": resumed_s,
        },
    ).print()


if __name__ == "__main__":
    main()
