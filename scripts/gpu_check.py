"""Checks on a machine with GPUs what only GPUs can show; says what it could not check, and what was missing.

    python scripts/gpu_check.py [--part trainer|engine|system|several ...] [--json FILE] [--minutes 10] [--device gpu]

`trainer` needs neither Ray nor vLLM, and takes other versions of torch than the pinned one: log-probabilities of rows,
of packed rows and with shared prefixes, attention, checkpointing, activations in host memory, compiled layers, offload,
memory against the plan, and MFU. `engine`: weights travel within the GPU; vLLM loads, takes weights and adapters in
flight, sleeps; tokens per second. `system`: the quickstart with trainer and replica on one GPU, a checkpoint and a
resume, and all tests marked gpu. `several`: NCCL and shards on two GPUs or more, a tensor-parallel replica on three.

Each check is a pass, a failure with its reason, or "not run" with what was missing. Parts are independent: each has a
process, a deadline and a log of its own. Prints a table, and one JSON object as the last line. Ends with 0 if nothing
failed, 1 if something did, and 2 if nothing could run. `--device cpu` runs what CPUs share, on small models: CI does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gpu_check.report import as_json, as_table, exit_code
from gpu_check.runner import SHARES, run_parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=SHARES, action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: what CPUs share, on small models")
    args = parser.parse_args()
    started = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="gpu-check-logs-"))
    outcomes = run_parts(args.part or list(SHARES), args.device, args.minutes * 60, logs)
    result = json.dumps(as_json(outcomes, args.device, time.monotonic() - started))
    print(as_table(outcomes))
    if args.json:
        args.json.write_text(result + "\n")
    print(result, flush=True)
    return exit_code(outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
