"""A node is lost with the places of two actors, and another one is added later: what starts again waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from cluster_support import Nodes, cluster_of_two
from run_support import DEADLINE_S

DRIVER = """
import sys, time
from contextlib import ExitStack

import ray

from trireme.core.errors import RoomFailed
from trireme.process.ray_cluster import PlacePool, await_places, reserve

def say(*words):
    print("driver:", *words, flush=True)

def progress(names, waited_s):
    say("waits for", *names)

@ray.remote
class Idle:
    def node(self):
        return ray.get_runtime_context().get_node_id()

ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
with ExitStack() as ending:
    _, options = reserve([{"num_cpus": 1.0}] * 4, 120.0, lambda *_: None, ending)
    await_places({"trainer": options}, 0.0, progress)
    say("reserved")
    sys.stdin.readline()
    end = time.monotonic() + 60
    while all(map(PlacePool.is_there, options)) and time.monotonic() < end:
        time.sleep(0.1)
    say("lost")
    try:
        await_places({"trainer": options}, 0.0, progress)
    except RoomFailed as failure:
        say("without patience:", failure)
    await_places({"trainer": options}, 120.0, progress)
    actors = [Idle.options(**each).remote() for each in options]
    say("on", len(set(ray.get([actor.node.remote() for actor in actors], timeout=60))), "nodes")
ray.shutdown()
"""


def told(driver: subprocess.Popen[str], nodes: Nodes) -> Iterator[str]:
    """What the driver prints; a node is lost when all is reserved, and another comes when it is waited for."""
    lost = came = False
    assert driver.stdin is not None
    assert driver.stdout is not None
    for printed in driver.stdout:
        own, _, line = printed.strip().partition("driver: ")
        if own or not line:
            continue  # Ray's own, about the lost node
        yield line
        if line == "reserved" and not lost:
            os.kill(nodes.raylet(1), signal.SIGKILL)
            print("lost", file=driver.stdin, flush=True)
            lost = True
        elif line.startswith("without patience") and not came:
            nodes.join()
            came = True


@pytest.mark.long
def test_what_has_no_place_waits_for_a_node_that_comes_later() -> None:
    with cluster_of_two(2) as nodes:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", DRIVER, nodes.address], **pipes) as driver:
            timer = threading.Timer(DEADLINE_S, driver.kill)
            timer.start()
            lines = list(told(driver, nodes))
            timer.cancel()
    waits = "waits for a place in the cluster for the trainer (2 of 4 actors)"
    assert lines[:3] == ["reserved", "lost", waits], lines
    assert "without patience: waited 0 s (timeouts.place_s) for a place in the cluster for the trainer" in lines[3]
    assert lines[-1] == "on 2 nodes", lines
    assert set(lines[4:-1]) <= {waits, waits.replace("2 of", "1 of")}
