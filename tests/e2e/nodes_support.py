"""Runs over nodes that are namespaces (`namespaces.py`), which share the directory of the runs, and a store of objects
on a machine of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespaces import Fabric, NamespaceNode
from resume_support import rows_of
from run_support import QUICKSTART, ROOT, assert_rows_keep_the_bound

from trireme.core.errors import EXIT_OK
from trireme.supervision.status import Status

DEADLINE_S = 900.0
"""On a machine on which much else runs."""
OUTPUTS = "outputs"
STORE_PORT, BUCKET = 9000, "runs"
STORE = f"""
import sys, time
from store_support import double
with double(sys.argv[1], {STORE_PORT}, {BUCKET!r}):
    print("serves", flush=True)
    time.sleep(86400)
"""


@dataclass
class NodesRun:
    """A run whose driver is on one of the nodes."""

    root: Path
    """Its directory."""
    process: subprocess.Popen[bytes]
    log: Path

    def rows(self) -> list[dict[str, Any]]:
        file = self.root / "metrics.jsonl"
        parsed = []
        for line in file.read_text().splitlines(keepends=True) if file.exists() else []:
            with suppress(json.JSONDecodeError):  # it is being written
                parsed.append(json.loads(line))
        return parsed

    @property
    def out(self) -> str:
        """What its terminal showed, as one line: the terminal breaks lines."""
        return " ".join(self.log.read_text().split())

    def until(self, is_so: Callable[[], bool], label: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.process.poll() is None, f"the run ended before {label}: {self.log.read_text()[-3000:]}"
            assert time.monotonic() < ends, f"waited for {label}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def at_step(self, step: int) -> None:
        self.until(lambda: len(self.rows()) >= step, f"step {step}")

    def end(self) -> None:
        assert self.process.wait(DEADLINE_S) == EXIT_OK, self.log.read_text()[-3000:]

    def places(self, net: Fabric) -> dict[str, str]:
        status = Status.read(self.root)
        assert status is not None
        names_by_node = {node.node: node.address for node in by_id(net)}
        return {part.name: names_by_node[part.node] for part in status.parts if part.node}

    def node_of(self, part: str, net: Fabric) -> NamespaceNode:
        address = self.places(net)[part]
        return next(node for node in net.nodes if node.address == address)

    def incidents(self) -> list[dict[str, Any]]:
        return rows_of(self.root / "incidents.jsonl")


@dataclass(frozen=True)
class Known:
    """A node of Ray, as STATUS names it."""

    node: str
    address: str


def by_id(net: Fabric) -> list[Known]:
    """Returns the cluster's nodes in the order of the fabric's."""
    ask = (
        "import ray, sys, json; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False); "
        "print(json.dumps([[n['NodeID'], n['NodeManagerAddress']] for n in ray.nodes() if n['Alive']]))"
    )
    output = net.nodes[0].run(sys.executable, "-c", ask, net.ray_address)
    assert output.returncode == 0, output.stderr
    names = {address: name for name, address in json.loads(output.stdout.splitlines()[-1])}
    return [Known(names.get(node.address, ""), node.address) for node in net.nodes]


def lose(net: Fabric, node: NamespaceNode) -> None:
    """Kills each process of a node at once; its network and its /tmp are gone with them."""
    os.kill(node.pid, signal.SIGKILL)  # the first process in its namespaces, with which the kernel kills the others
    net.nodes.remove(node)


@contextmanager
def running(
    net: Fabric,
    directory: Path,
    *flags: str,
    store: str = "",
    environ: Mapping[str, str] | None = None,
    own_disk: NamespaceNode | None = None,
) -> Iterator[NodesRun]:
    """Starts a run on the first node, in the place of the runs in `directory`, or in the `store` with its files there
    for the time being; or on the node `own_disk`, whose `directory` no other node sees. Ends it with the block."""
    node, outputs = own_disk or net.nodes[0], directory / OUTPUTS
    place = (
        ["--run.output-dir", store, "--run.local-dir", str(outputs)] if store else ["--run.output-dir", str(outputs)]
    )
    place_flags = [*place, "--run.name", "run", "--cluster.address", net.ray_address]
    command = [sys.executable, "-m", "trireme.cli.rl", "@", str(QUICKSTART), *place_flags, *flags]
    log = directory / f"output_{len(list(directory.glob('output_*')))}.txt"
    with log.open("wb") as output:
        env = {**node.environ, **(environ or {})}
        process = subprocess.Popen(node.inside(*command), cwd=ROOT, env=env, stdout=output, stderr=output)
    try:
        yield NodesRun(on_disk(own_disk, outputs) / "run" if own_disk else outputs / "run", process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)


def on_disk(node: NamespaceNode, path: Path) -> Path:
    """Returns where this process finds a path of a node's own /tmp."""
    return Path(f"/proc/{node.pid}/root{path}")


def start_store(node: NamespaceNode, directory: Path) -> str:
    """Starts a store of objects on a node, and returns the URL of its bucket. `directory`: where its log goes."""
    environ = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'unit' / 'support'}"}
    process = node.start(sys.executable, "-c", STORE, node.address, environ=environ)
    command = ["bash", "-c", f"exec 3<>/dev/tcp/{node.address}/{STORE_PORT}"]
    deadline = time.monotonic() + DEADLINE_S
    while node.run(*command).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            node.output.seek(0)
            raise AssertionError(f"the store did not start: {node.output.read().decode()}")
        time.sleep(0.5)
    return f"s3://{BUCKET}/group"


def store_environ(address: str) -> dict[str, str]:
    """Returns the variables by which a node finds the store at this address."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    return {"AWS_ENDPOINT_URL": f"http://{address}:{STORE_PORT}", **keys}


def assert_steps_once(rows: Sequence[Mapping[str, Any]], steps: int, bound: int) -> None:
    """Every step is there once, every problem has one end or is under way, and the bound held."""
    assert [row["step"] for row in rows] == list(range(steps))
    assert_rows_keep_the_bound(rows, bound)
