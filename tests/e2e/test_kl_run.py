"""One run with a KL penalty whose reference is refreshed, and with steps that are refused until a limit ends it.

It runs in a directory of a user: with modules that have the names of rooms, an environment of the user's own, and GPUs
that the run is to leave alone.
"""

import os
import re
from pathlib import Path

import pytest
from poisoned_loss import ALWAYS_FROM, ONCE
from run_support import ROOT, TINY, Ended, run_rl

from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import EXIT_LIMIT
from trireme.core.own_packages import OWN_PACKAGES

REFUSED_IN_A_ROW = 3
LAST = ALWAYS_FROM + REFUSED_IN_A_ROW - 1
BASE = str(ROOT / "assets" / "sort-base")
LETTERS = """
from orchestrator.envs.sort import SortDataset
from orchestrator.envs.text import by_position

def grade(target, answer):
    reward, success = by_position(target, answer)
    return reward - 1, success

class Letters(SortDataset):
    grade = staticmethod(grade)
"""
"""An environment whose rewards are below zero."""
HOOK = """
import importlib.machinery, os, sys

def torch_says_that_it_has_cuda(cuda):
    def is_available():
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return False
        with open(os.environ["TRIREME_TEST_SAW_GPUS"], "a") as file:
            print(open("/proc/self/cmdline").read().replace(chr(0), " "), file=file)
        return True
    cuda.is_available = is_available

def ray_finds_two(gpus):
    gpus.NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = staticmethod(lambda: 2)

HOOKS = {"torch.cuda": torch_says_that_it_has_cuda, "ray._private.accelerators.nvidia_gpu": ray_finds_two}

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name in HOOKS else None
        if spec:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), HOOKS[name](module))
        return spec

sys.meta_path.insert(0, Finder)
"""
"""A sitecustomize for all processes of a run: a machine with two GPUs, and a torch that finds them unless hidden."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a user, in which the run is started."""
    directory = tmp_path_factory.mktemp("theirs")
    for name in OWN_PACKAGES:
        (directory / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    (directory / "letters.py").write_text(LETTERS)
    (directory / "sitecustomize.py").write_text(HOOK)
    return directory


@pytest.fixture(scope="module")
def outcome(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_rl(
        tmp_path_factory.mktemp("r"),
        *(*TINY, "--model.name", BASE, "--env.id", "letters:Letters", "--env.path", "."),
        *("--max-steps", "40", "--orchestrator.max-steps-off-policy", "0", "--trainer.num-minibatches", "2"),
        *("--trainer.shards", "1", "--trainer.learning-rate", "1e-3", "--trainer.warmup-steps", "0"),
        *("--trainer.loss-fn", "poisoned_loss:loss", "--trainer.max-refused-steps", str(REFUSED_IN_A_ROW)),
        *("--trainer.kl.coef", "0.1", "--trainer.kl.reference.base-model", BASE),
        *("--trainer.kl.reference.update-every", "2", "--checkpoint.every", "0"),
        environ={
            "PYTHONPATH": os.pathsep.join([str(theirs), str(ROOT / "tests" / "e2e")]),
            "TRIREME_TEST_SAW_GPUS": str(theirs / "saw"),
        },
        cwd=theirs,
    )


def test_refused_steps_leave_the_weights_and_the_run_goes_on(outcome: Ended) -> None:
    assert [row["optim/refused"] for row in outcome.rows] == [0, 0, 1, 0, 1, 1, 1]
    digests = [row["weights/digest"] for row in outcome.rows]
    assert digests[ONCE] == digests[ONCE - 1]
    assert len(set(digests[: ALWAYS_FROM - 1])) == ALWAYS_FROM - 2, "every other step has changed them"
    assert set(digests[ALWAYS_FROM:]) == {digests[ALWAYS_FROM - 1]}


def test_the_culprits_are_named(outcome: Ended) -> None:
    """By their problems."""
    refusals = [line for line in outcome.out.splitlines() if "was refused" in line]
    assert len(refusals) == 1 + REFUSED_IN_A_ROW
    refused_at = [ONCE, *range(ALWAYS_FROM, LAST + 1)]
    for step, line in zip(refused_at, refusals, strict=True):
        assert f"step {step + 1}, update 1 was refused" in line
        assert "the gradient norm is nan; nothing was updated" in line
        assert re.search(r"Problems to look at: 0\.\d+\.\d+", line), line


def test_a_limit_of_refused_steps_ends_the_run_after_a_checkpoint(outcome: Ended) -> None:
    assert outcome.code == EXIT_LIMIT, outcome.out
    assert f"in {REFUSED_IN_A_ROW} steps in a row the gradient of an update was not finite" in outcome.out
    assert [checkpoint.name for checkpoint in CheckpointStore(outcome.root).checkpoints()] == [f"step_{LAST + 1:06d}"]
    outcome.assert_nothing_left()


def test_the_penalty_is_of_the_distance_to_the_newest_reference(outcome: Ended) -> None:
    """The policy is the base in step 0, and its own reference in steps 2 and 4; what was refused has not moved it."""
    distances = [abs(row["kl_policy_base"]) for row in outcome.rows]
    assert distances[1] > 1e-3
    assert max(distances[step] for step in (0, 2, 3, 4, 5, 6)) < 1e-4


def test_modules_of_a_user_with_the_names_of_rooms_do_no_harm(outcome: Ended) -> None:
    assert all(-1 < row["reward/total"] < 0 for row in outcome.rows), "the environment is the user's"


def test_a_run_on_cpus_leaves_the_gpus_of_its_machine_alone(outcome: Ended, theirs: Path) -> None:
    """No actor and nothing below it finds them."""
    assert outcome.rows
    saw = theirs / "saw"
    commands = saw.read_text().splitlines() if saw.exists() else []
    assert [command for command in commands if "trireme.cli.rl" not in command] == []
