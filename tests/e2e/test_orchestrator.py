"""The orchestrator's actor and handle over Ray, with a sampler that needs no replica."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orchestrator_support import NamedSampler, update
from tokenizers import Tokenizer, models

from orchestrator.handle import OrchestratorHandle
from trireme.config import Config
from trireme.core.errors import RoomFailed, StorageFailed
from trireme.process import waits

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="<eos>")).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 16, "max_position_embeddings": 64}))
    return directory


def start(
    model_dir: Path,
    log_dir: Path | None = None,
    faults: str = "",
    evaluation: dict[str, Any] | None = None,
    first: int = 0,
    **env: Any,
) -> OrchestratorHandle:
    cfg = Config.model_validate(
        {
            "max_steps": 3,
            "model": {"name": str(model_dir)},
            "trainer": {"num_minibatches": 2},
            "orchestrator": {"batch_size": 4, "group_size": 4, "retries": 0, "stale_policy": "wait"},
            "env": {"id": "orchestrator_support:Guesses", "name": "guesses", **env},
            "eval": evaluation or {},
            "inference": {"sampling": {"max_tokens": 4}},
        }
    )
    importable = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent), "TRIREME_FAULTS": faults}}
    sampler = partial(NamedSampler, first=first)
    return OrchestratorHandle.start(cfg, sampler, {"num_cpus": 0, "runtime_env": importable}, log_dir)


def wait_ready(handle: OrchestratorHandle) -> None:
    refs, names = handle.ready_refs()
    waits.get_all(refs, owners=names, timeout_s=60)


@pytest.fixture(scope="module")
def handle(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrchestratorHandle]:
    """Dies when it is asked for a minibatch of the fourth step."""
    handle = start(model_dir, log_dir=tmp_path_factory.mktemp("logs"), faults="orchestrator.minibatch@7=kill")
    wait_ready(handle)
    yield handle
    handle.stop()


def test_a_run_of_three_steps_and_a_sudden_death(handle: OrchestratorHandle) -> None:
    update(handle, 0)
    for step in range(3):
        minibatches = list(handle.minibatches(step, 0))
        assert [(m.num_groups, m.last, m.divisor) for m in minibatches] == [(2, False, 8), (2, True, 8)]
        for minibatch in minibatches:
            assert minibatch.provenance.step == step
            assert minibatch.batch.columns["versions"].max() <= step
        update(handle, step + 1)
        row = handle.release(step).metrics
        assert 0 < row["env/guesses/reward/total"] < 1
        assert row["off_policy/max"] <= 1
        assert row["ledger/trained"] == 4 * (step + 1)
        assert row["weights/reprefill_tokens"] == 10 * step, "of the update to the version that was trained with"
    with pytest.raises(RoomFailed, match=r"orchestrator \(a minibatch of step 4\) died.*orchestrator_0\.log"):
        next(handle.minibatches(3, 0))


class GivenUp(Exception):
    """Stands for what a driver's tick raises after a signal."""


def give_up() -> None:
    raise GivenUp


def test_a_step_is_given_up_and_another_process_goes_on_from_its_start(model_dir: Path, tmp_path: Path) -> None:
    """The driver is in a hurry, so an evaluation is given up too, which that process makes."""
    hanging = {"every": 1, "samples": 2, "env": {"args": {"hang_from": 5}}}
    faults = "orchestrator.save@3=raise"
    first = start(model_dir, faults=faults, args={"hang_from": 6}, evaluation=hanging)
    second = start(model_dir, first=1, evaluation={"every": 3, "samples": 2})
    wait_ready(first)
    update(first, 0)
    list(first.minibatches(0, 0))
    update(first, 1, on_tick=first.give_up_evaluation)
    released = first.release(0)
    assert [group["problem"] for group in released.trained] == ["0.0.0", "0.0.1", "0.0.2", "0.0.3"]
    assert "eval/guesses/version" not in released.metrics
    minibatches = first.minibatches(1, 0, on_tick=give_up)
    taken = next(minibatches)
    with pytest.raises(GivenUp):
        next(minibatches)
    records = first.save_state(tmp_path / "commit" / "orchestrator").wait(60)
    names = ("state.json", "groups.jsonl", "groups.safetensors")
    assert {record.path for record in records} == {f"orchestrator/{name}" for name in names}
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match=r"cannot write .*/file/orchestrator"):
        first.save_state(tmp_path / "file" / "orchestrator").wait(60)
    with pytest.raises(RoomFailed, match=r"its part of a checkpoint.*raised InjectedFault"):
        first.save_state(tmp_path / "third" / "orchestrator").wait(60)
    first.stop()

    wait_ready(second)
    second.load_state(tmp_path / "commit" / "orchestrator")
    update(second, 1)
    again = list(second.minibatches(1, 0))
    np.testing.assert_array_equal(again[0].batch.tokens, taken.batch.tokens)
    update(second, 2)
    released = second.release(1)
    assert [group["problem"] for group in released.trained] == ["0.0.4", "0.0.5", "0.0.6", "0.0.7"]
    assert released.metrics["ledger/trained"] == 8
    row = released.metrics
    assert (row["eval/guesses/version"], row["eval/guesses/n"], row["eval/guesses/failed"]) == (1, 16, 0)
    second.stop()
