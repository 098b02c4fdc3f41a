"""The environment of all tests, how many processes run them, their deadline, and what they cost in CPU seconds.

Wall clock says little: hosts differ by a factor of two, and other programs run on them. So each test's CPU seconds are
counted, in all processes that it starts, and printed as if the host took one second for a fixed calibration loop.
"""

import faulthandler
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, process_time

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# A token of their own for the tests' clusters: without one Ray writes one into the home directory.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

WORKERS = 2
SAMPLE_S, FRESH_S = 1.0, 0.1
DEAREST = 30
PRINTED_FROM_S = 10.0
"""Sessions below this many CPU seconds are not worth the second that the calibration takes."""
COST = "cpu_seconds"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns 0 (no workers: quick start, live output) for one file or one test, and two for anything larger."""
    several = len(config.args) > 1 or Path(config.args[0].partition("::")[0]).is_dir()
    return WORKERS if several else 0


class Meter:
    """Counts the CPU seconds of this process and of all that descend from it, those of Ray and vLLM among them.

    The kernel adds a process's time to its parent's only if the parent waits for it, and Ray's processes outlive
    theirs. So all descendants are looked at once a second, and the sum never falls: a process that vanished keeps the
    time at which it was last seen.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lost = 0.0
        self.known: set[tuple[int, int]] = set()
        self.looked = -FRESH_S
        self.lock = threading.Lock()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        pause = threading.Event()  # tests patch time.sleep
        while True:
            self.read()
            pause.wait(SAMPLE_S)

    def read(self) -> float:
        """Returns the CPU seconds so far; a value of the last tenth of a second is good enough."""
        with self.lock:
            if monotonic() - self.looked > FRESH_S:
                now = self.living() + self.lost
                self.lost += max(0.0, self.seconds - now)
                self.seconds = max(self.seconds, now)
                self.looked = monotonic()
            return self.seconds

    def living(self) -> float:
        """Looks at all processes: those known, and the children of those, with the time of children that have ended."""
        processes = list(all_processes())
        tree = {os.getpid()} | {pid for pid, _, start, _ in processes if (pid, start) in self.known}
        size = 0
        while size < len(tree):
            size = len(tree)
            tree |= {pid for pid, parent, _, _ in processes if parent in tree}
        self.known = {(pid, start) for pid, _, start, _ in processes if pid in tree}
        return sum(seconds for pid, _, _, seconds in processes if pid in tree)


def all_processes() -> Iterator[tuple[int, int, int, float]]:
    """Yields (pid, parent, start, CPU seconds with those of ended children) of each process of this machine."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            yield int(entry), int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Costs:
    """The plugin: measures each test where it runs, and prints the sums where all results come together."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.spent = 0.0
        self.tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.spent = self.spent or self.meter.read()  # imports and collection count for no test
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.when == "teardown":
            before, self.spent = self.spent, self.meter.read()
            item.user_properties.append((COST, self.spent - before))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid] = dict(report.user_properties)[COST]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.tests.values()) < PRINTED_FROM_S:
            return
        unit = calibrate()
        tiers: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            tiers["/".join(test.split("/")[:2])] += seconds / unit
        terminalreporter.section(f"CPU seconds, divided by {unit:.2f}, which the calibration loop took")
        for tier, seconds in tiers.items():
            terminalreporter.write_line(f"{seconds:8.1f}  {tier}")
        terminalreporter.write_line(f"{sum(tiers.values()):8.1f}  all of them; the dearest:")
        for test in sorted(self.tests, key=self.tests.__getitem__, reverse=True)[:DEAREST]:
            terminalreporter.write_line(f"{self.tests[test] / unit:8.1f}  {test}")


def calibrate() -> float:
    """CPU seconds of a fixed piece of work, half in Python and half in numpy: 0.6 to 2 on a rented core."""
    begin = process_time()
    total = 0
    for number in range(9_500_000):
        total += number * number % 7
    values = np.random.default_rng(0).random((256, 256))
    for _ in range(240):
        values = np.tanh(values @ values.T)
    return process_time() - begin


class Deadline:
    """Ends the process that runs a test for longer than its deadline, and prints where each of its threads stands.

    A test that waits for ever would hold up all others and say nothing. Without the process pytest-xdist reports the
    test as failed by name and begins its file again in a new process, once (`--max-worker-restart`): a test that hangs
    each time ends them all. The marker `long` has no deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stderr = os.dup(2)  # of the process itself: a test's own is captured and would be lost

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("long") is None:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deadline", type=float, default=900.0, help="seconds after which a test that hangs is ended")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")
    config.pluginmanager.register(Deadline(config.getoption("--deadline")), "deadline")
