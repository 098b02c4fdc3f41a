"""Runs the checks of one part, one after the other, in a process that may be killed: `python -m gpu_check.worker`.

Before each check its name goes to standard output as a line of JSON, and its outcome after it. All that the checks and
their libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

from gpu_check.checks import FAILURE, NOT_RUN, PASS, Check, Context, Failed, NotRun, Outcome

TRACEBACK_LINES = 12


def run_check(part: str, check: Check, context: Context) -> Outcome:
    """Returns how a check ended, whatever it raised."""
    started = time.monotonic()
    try:
        missing = check.missing(context.device)
        if missing:
            raise NotRun(missing)
        outcome = Outcome(part, check.name, PASS, figures=dict(check.run(context)))
    except NotRun as why:
        outcome = Outcome(part, check.name, NOT_RUN, str(why))
    except Failed as why:
        outcome = Outcome(part, check.name, FAILURE, str(why))
    except Exception as error:  # the other checks still run
        traceback.print_exc(limit=-TRACEBACK_LINES)
        outcome = Outcome(part, check.name, FAILURE, f"{type(error).__name__}: {error}")
    return replace(outcome, seconds=round(time.monotonic() - started, 1))


def main(module: str, device: str, seconds: str, directory: str) -> None:
    """Runs all CHECKS of a part's module; their files go to `directory`."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    assert device in ("cpu", "gpu")
    context = Context(device, Path(directory), time.monotonic() + float(seconds))
    for check in import_module(module).CHECKS:
        print(json.dumps({"begin": check.name}), file=lines)
        print(json.dumps(asdict(run_check(module.rpartition(".")[2], check, context))), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
