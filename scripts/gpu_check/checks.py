"""A check, how it ends, and what it needs. Nothing here imports torch, so a machine without it is told so."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PASS = "pass"
FAILURE = "failure"
NOT_RUN = "not run"
Ending = Literal["pass", "failure", "not run"]
Figures = Mapping[str, Any]
"""What was measured, by name with its unit; texts are notes."""


class NotRun(Exception):
    """A check that cannot show anything here raises it, with the reason."""


class Failed(Exception):
    """A check with a wrong result raises it, with the actual and the expected result."""


@dataclass(frozen=True)
class Outcome:
    """How one check ended."""

    part: str
    """The name of its part."""
    check: str
    """The name of the check."""
    ending: Ending
    """Passed, failed, or did not run."""
    reason: str = ""
    """Why it failed or did not run."""
    figures: Figures = field(default_factory=dict)
    """What it measured."""
    seconds: float = 0.0
    """How long it took."""


@dataclass
class Context:
    """What a part's checks share."""

    device: Literal["cpu", "gpu"]
    """Where models compute."""
    directory: Path
    """A directory of the part's own, which is removed at its end."""
    deadline: float
    """By `time.monotonic`: when the part is ended."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Results of checks that later ones use."""

    @property
    def on_gpu(self) -> bool:
        """True: models compute on GPUs."""
        return self.device == "gpu"

    @property
    def torch_device(self) -> str:
        """Returns the name of that device in PyTorch."""
        if self.on_gpu:
            return "cuda"
        return "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return max(0.0, self.deadline - time.monotonic())

    def need_time(self, seconds: float, task: str) -> None:
        """Raises NotRun when fewer seconds are left than `what` needs."""
        if self.left_s < seconds:
            raise NotRun(f"{task} needs about {seconds:.0f} s, {self.left_s:.0f} s are left: give more --minutes")


@dataclass(frozen=True)
class Check:
    """One check of a part."""

    name: str
    """What the table calls it."""
    run: Callable[[Context], Figures]
    """Raises Failed or NotRun; any other exception is a failure too."""
    needs: Sequence[str] = ()
    """Packages without which it cannot run."""
    gpus: int = 1
    """GPUs that it needs, if models compute on GPUs."""
    only_gpu: str = ""
    """Why it shows nothing on CPUs; empty: it does."""

    def missing(self, device: str) -> str:
        """Says what this machine lacks for the check; empty if nothing."""
        lacks = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if lacks:
            return f"{', '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} not installed"
        if device == "cpu":
            if self.only_gpu:
                return f"--device cpu: {self.only_gpu}"
            return ""
        gpus, how = find_gpus()
        if gpus == 0:
            return f"no GPU: {how}"
        if gpus >= self.gpus:
            return ""
        return f"{self.gpus} GPUs are needed, there is {gpus}"


def find_gpus() -> tuple[int, str]:
    """Returns how many GPUs PyTorch can use here, and what was found: its CUDA version, the driver, and what
    CUDA_VISIBLE_DEVICES hides."""
    import torch

    from trireme.process.machine import VISIBLE

    visible = os.environ.get(VISIBLE)
    devices = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    driver = Path("/proc/driver/nvidia/version")
    gpus = (
        f"PyTorch {torch.__version__} "
        + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
        + f"; {', '.join(devices) or 'no /dev/nvidia*'}; "
        + (driver.read_text().splitlines()[0] if driver.exists() else "no driver")
        + f"; {VISIBLE} is {'not set' if visible is None else repr(visible)}"
    )
    return (torch.cuda.device_count() if torch.cuda.is_available() else 0), gpus
