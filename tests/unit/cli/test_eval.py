"""`trireme eval`: whose weights are evaluated, and what is printed. tests/e2e/test_eval_command.py runs it."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from adapter_support import adapted_model, logits, make_adapter_run, make_base
from plan_support import machines
from rich.console import Console
from tools_support import BASE_MODEL, make_run
from transformers import AutoModelForCausalLM

from trireme.checkpoint.store import CheckpointStore
from trireme.cli.eval import UNREAD, Subject, configured, table
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput
from trireme.core.types import WeightIdentity
from trireme.plan.base import Plan
from trireme.plan.rl import EVALUATION_ROOMS

FLAGS = ["--env.id", "sort", "--inference.sampling.max-tokens", "8"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", 2, 4)
    return tmp_path / "run"


def test_of_a_run_the_newest_commit_is_taken_or_the_one_that_is_asked_for(run: Path) -> None:
    newest, older = Subject.of(str(run), None), Subject.of(str(run), 2)
    assert newest.model == str(run / "checkpoints" / "step_000004" / "inference")
    assert (newest.identity.version, older.identity.version) == (4, 2)
    assert newest.run == run
    assert str(newest).startswith(f"step_000004 of {run} (weights 4:")
    assert str(Subject.of("some/model", None)) == "the model some/model"


@pytest.mark.parametrize("part", ["", "inference"])
def test_a_commit_is_taken_by_its_own_directory(run: Path, part: str) -> None:
    subject = Subject.of(str(run / "checkpoints" / "step_000002" / part), None)
    assert (subject.identity.version, subject.run) == (2, run)


def test_a_commit_that_was_left_for_another_lineage_has_the_configuration_of_its_run(run: Path) -> None:
    parked = run / "branches" / "abc" / "checkpoints" / "step_000002"
    parked.parent.mkdir(parents=True)
    (run / "checkpoints" / "step_000002").rename(parked)
    subject = Subject.of(str(parked), None)
    assert (subject.identity.version, subject.run) == (2, run)


def test_a_damaged_commit_is_refused(run: Path) -> None:
    weights = next((run / "checkpoints" / "step_000004" / "inference").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadInput, match=rf"the commit .*step_000004.*{weights.name}"):
        Subject.of(str(run / "checkpoints" / "step_000004"), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def store(base: Path, tmp_path: Path) -> CheckpointStore:
    return make_adapter_run(tmp_path / "run", base)


def test_adapters_are_merged_into_their_base_for_the_time_of_the_evaluation(store: CheckpointStore, base: Path) -> None:
    subject = Subject.of(str(store.root), 2)
    assert subject.model == str(store.commit(2) / "inference")
    assert configured(subject, UNREAD, FLAGS).config.model.name == str(base), (
        "all is checked with the base, before anything is merged"
    )
    with ExitStack() as ending:
        whole = Path(subject.whole(Console(quiet=True), ending))
        assert whole.parent == store.root / "exports"
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(whole)),
            logits(adapted_model(store.commit(2) / "inference", base)),
            rtol=0,
            atol=1e-5,
        )
    assert list((store.root / "exports").iterdir()) == []


def test_adapters_whose_base_changed_are_refused(store: CheckpointStore, base: Path) -> None:
    subject = Subject.of(str(store.root), 2)
    file = sorted(base.glob("*.safetensors"))[0]
    contents = file.read_bytes()
    file.write_bytes(contents[:-1] + b"\1")
    with pytest.raises(BadInput, match="which now has weights with digest"), ExitStack() as ending:
        subject.whole(Console(quiet=True), ending)
    file.write_bytes(contents)
    assert not (store.root / "exports").exists()


def test_anything_else_is_a_model() -> None:
    assert Subject.of(str(BASE_MODEL), None) == Subject(str(BASE_MODEL), WeightIdentity(1, 0, "as-loaded"), None)
    assert Subject.of("some/model", None).model == "some/model"
    with pytest.raises(BadInput, match="--step 3 for some/model"):
        Subject.of("some/model", 3)


def test_the_configuration_is_that_of_the_run_but_for_the_model_and_what_is_given(run: Path) -> None:
    written = {
        "model": {"name": "gone", "tokenizer": None},
        "orchestrator": {"batch_size": 32},
        "env": {"id": "sort", "args": {"digits": [3, 4]}},
        "inference": {"sampling": {"max_tokens": 5}},
        "trainer": {"shards": 8},
    }
    (run / "config.json").write_text(json.dumps(written))
    subject = Subject.of(str(run), None)
    config = configured(subject, UNREAD, ["--eval.samples", "4"]).config
    assert config.model.name == subject.model
    assert config.model.start == "gone", "environments that ask the start of the run ask it still"
    assert config.eval.samples == 4
    assert config.inference.sampling.max_tokens == 5
    assert config.eval_envs[0].args == {"digits": [3, 4]}


def test_no_trainer_is_planned() -> None:
    config = configured(
        Subject.of(str(BASE_MODEL), None), UNREAD, [*FLAGS, "--trainer.shards", "8", "--inference.replicas", "2"]
    ).config
    facts = ModelFacts.of(config, required=True)
    plan = Plan(config, facts, machines(cpus=16, gpus=2), EVALUATION_ROOMS)
    assert plan.actor_names == ["inference replica 0", "inference replica 1", "orchestrator"]
    assert plan.gpus_needed == 2
    plan = Plan(config, facts, machines(cpus=2), EVALUATION_ROOMS)
    assert (plan.gpus_needed, plan.threads) == (0, 1)


def test_the_table_has_means_with_their_intervals() -> None:
    row = {
        "perf/evaluation_s": 1.0,
        "eval/sort/version": 3.0,
        "eval/sort/n": 128.0,
        "eval/sort/avg@2": 0.51234,
        "eval/sort/avg@2/ci95": 0.03,
    }
    console = Console(width=100)
    with console.capture() as printed:
        console.print(table(row))
    lines = printed.get().splitlines()[1:]
    assert [line.split() for line in lines] == [["sort", "n", "128"], ["sort", "avg@2", "0.5123", "+-", "0.0300"]]
