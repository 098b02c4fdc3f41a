"""How a run is asked to end. Signals are sent to a process of their own, as a shell or a scheduler would."""

import signal
import subprocess
import sys
import time

import pytest

from trireme.process.signals import BOTH_S, SAME_S

SCRIPT = """
import signal, sys, time
from trireme.process import signals
from trireme.core.errors import RoomFailed

def deaf(seconds):  # as in `ray.wait`: Python hears of a signal only afterwards
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("deaf", flush=True)
    wait(seconds)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

def wait(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

mode, grace = sys.argv[1], float(sys.argv[2])
try:
    if mode == "starting":
        signals.arm()
        print("ready", flush=True)
        try:
            wait(60)
        finally:
            wait(1)
    with signals.Stop(grace) as stop:
        print("ready", flush=True)
        while mode == "deaf" or stop.exit_code is None:
            wait(0.05)
        print("noted", flush=True)
        if mode == "slow":
            wait(60)
        if mode == "waits":
            deaf(1.2)
            wait(0.1)
        if mode == "room fails":
            raise RoomFailed("it got the signal too")
        stop.check()
except signals.StoppedWithoutCheckpoint as stopped:
    print(stopped if stopped.failure else "grace over", flush=True)
    sys.exit(stopped.exit_code)
except signals.Stopped as stopped:
    print("stopped", flush=True)
    sys.exit(stopped.exit_code)
"""


def start(mode: str, grace_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, str(grace_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def rest(process: subprocess.Popen[str]) -> tuple[str, int]:
    out, _ = process.communicate(timeout=30)
    return out, process.returncode


@pytest.mark.parametrize("mode", ["starting", "slow"])
def test_a_signal_is_answered_before_what_it_waits_for(mode: str) -> None:
    process = start(mode, grace_s=1)
    process.send_signal(signal.SIGINT)
    assert "stopping: waiting" in process.stderr.readline()
    assert process.poll() is None
    rest(process)


WITHOUT = "noted\nstopped by a signal, without a checkpoint: it got the signal too\n"


@pytest.mark.parametrize(
    ("mode", "grace_s", "says"),
    [
        ("starting", 30, "stopped\n"),
        ("training", 30, "noted\nstopped\n"),
        ("deaf", 0.2, "grace over\n"),
        ("room fails", 30, WITHOUT),  # it may have got it too, and nobody wants it built anew
    ],
)
@pytest.mark.parametrize(("send", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_where_it_is_looked_for(
    send: signal.Signals, code: int, mode: str, grace_s: float, says: str
) -> None:
    process = start(mode, grace_s)
    process.send_signal(send)
    assert rest(process) == (says, code)


def noted(mode: str, *lines: str) -> subprocess.Popen[str]:
    """Returns a process that has noted a signal."""
    process = start(mode, grace_s=30)
    process.send_signal(signal.SIGTERM)
    assert [process.stdout.readline() for _ in ("noted", *lines)] == ["noted\n", *lines]
    return process


def test_a_second_signal_ends_at_once() -> None:
    process = noted("slow")
    time.sleep(SAME_S + 0.2)
    process.send_signal(signal.SIGTERM)
    assert rest(process) == ("", 75)


def test_another_signal_ends_at_once_unless_both_came_together() -> None:
    """A launcher may turn Ctrl-C, which the terminal has sent to all, into a SIGTERM."""
    process = noted("slow")
    process.send_signal(signal.SIGINT)
    time.sleep(BOTH_S + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert rest(process) == ("", 130)


def test_a_signal_that_is_passed_on_while_the_driver_waits_in_ray_counts_once() -> None:
    process = noted("waits", "deaf\n")
    process.send_signal(signal.SIGTERM)
    assert rest(process) == ("stopped\n", 75)


@pytest.mark.parametrize(("mode", "says"), [("starting", "stopped\n"), ("slow", "noted\ngrace over\n")])
def test_a_signal_that_a_launcher_passes_on_counts_once(mode: str, says: str) -> None:
    """`uv run` passes on what the whole group of processes was sent. (In a terminal it knows that it must not.)"""
    process = start(mode, grace_s=1.5 * SAME_S)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert rest(process) == (says, 75)


ACTOR = """
import asyncio, ctypes, sys, threading
from trireme.process.signals import end_after

async def close():
    print("closing", flush=True)
    await asyncio.sleep(0.1)
    print("closed", flush=True)
    if sys.argv[1] == "fails":
        raise OSError("not closed")

async def live():
    end_after(close)
    print("ready", flush=True)
    await asyncio.sleep(600)

threading.Thread(target=asyncio.run, args=(live(),), daemon=True).start()
while True:
    ctypes.CDLL(None).pause()  # as an actor's main thread, which is in compiled code
"""


@pytest.mark.parametrize("how", ["works", "fails"])
def test_an_actor_closes_what_it_holds_and_then_ends_by_the_signal(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ACTOR, how], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout.readline() == "ready\n"
        for _ in range(2):  # another one does not cut it short
            actor.send_signal(signal.SIGTERM)
        assert actor.stdout.read() == "closing\nclosed\n"
        assert actor.wait(60) == -signal.SIGTERM
