"""Stands in for `rl` in tests of sweeps: a process that writes the metrics of a run, as the flags of the sweep say.

The reward is the learning rate times 1000, plus the seed. A learning rate of 3 fails; one of 4 waits for a signal.
"""

import json
import signal
import sys
from pathlib import Path

from trireme.config.load import load
from trireme.core.errors import EXIT_INTERRUPTED, EXIT_SIGTERM


def main() -> int:
    loaded = load(sys.argv[1:])
    config = loaded.config
    if loaded.dry_run:
        print("the plan of seed", config.seed)
        return 0
    root = Path(config.run.output_dir, str(config.run.name))
    with (root.parent / "starts.txt").open("a") as starts:
        starts.write(f"{root.name} {'again' if config.resume.requested else 'new'}\n")
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    rate = config.trainer.learning_rate
    rate = rate if isinstance(rate, float) else 1.0
    if rate == 3 and not (root.parent / "mended").exists():
        print("error: given: a rate of 3\n  expected: another")
        return 2
    if rate == 4 and not config.resume.requested:
        print("waiting", flush=True)
        (root / "ready").touch()
        return {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_SIGTERM}[
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
        ]
    rows = [{"step": s, "version": s + 1, "reward/total": rate * 1000 + config.seed - 1 + s} for s in range(2)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main())
