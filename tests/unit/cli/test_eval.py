"""`trireme eval`: whose weights are evaluated, and what is printed. tests/e2e/test_eval_command.py runs it."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from adapter_support import adapted_model, logits, make_adapter_run, make_base
from plan_support import machines
from rich.console import Console
from tools_support import BASE_MODEL, make_run
from transformers import AutoModelForCausalLM

from trireme.checkpoint.store import KEEP, CheckpointStore
from trireme.cli import eval as eval_command
from trireme.cli.eval import UNREAD, Subject, configured, subjects_of, table
from trireme.config import Config
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import BadInput, RoomFailed
from trireme.core.types import WeightIdentity
from trireme.plan.rl import EVALUATION_ROOMS
from trireme.plan.whole import Plan
from trireme.tools.evaluations import Evaluations

FLAGS = ["--env.id", "sort", "--inference.sampling.max-tokens", "8"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run", 2, 4)
    return tmp_path / "run"


def test_of_a_run_the_newest_checkpoint_is_taken_or_the_one_that_is_asked_for(run: Path) -> None:
    newest, older = Subject.of(str(run), None), Subject.of(str(run), 2)
    assert newest.model == str(run / "checkpoints" / "step_000004" / "inference")
    assert (newest.identity.version, older.identity.version) == (4, 2)
    assert newest.run == run
    assert str(newest).startswith(f"step_000004 of {run} (weights 4:")
    assert str(Subject.of("some/model", None)) == "the model some/model"
    assert Subject.of(str(BASE_MODEL), None) == Subject(str(BASE_MODEL), WeightIdentity(1, 0, "as-loaded"), None)


def test_a_checkpoint_is_taken_by_its_own_directory_but_no_damaged_one(run: Path) -> None:
    """One that was left for another lineage has the configuration of its run too."""
    directory = run / "checkpoints" / "step_000002"
    parked = run / "branches" / "abc" / "checkpoints" / "step_000002"
    parked.parent.mkdir(parents=True)
    subjects = [Subject.of(str(directory), None), Subject.of(str(directory / "inference"), None)]
    directory.rename(parked)
    subjects.append(Subject.of(str(parked), None))
    assert [(subject.identity.version, subject.run) for subject in subjects] == [(2, run)] * 3
    weights = next((run / "checkpoints" / "step_000004" / "inference").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadInput, match=rf"the checkpoint .*step_000004.*{weights.name}"):
        Subject.of(str(run / "checkpoints" / "step_000004"), None)


def test_adapters_are_merged_into_their_base_for_the_time_of_the_evaluation(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    store = make_adapter_run(tmp_path / "run", base)
    subject = Subject.of(str(store.root), 2)
    assert subject.model == str(store.checkpoint(2) / "inference")
    assert configured(subject, UNREAD, FLAGS).config.model.name == str(base), (
        "all is checked with the base, before anything is merged"
    )
    with ExitStack() as ending:
        whole = Path(subject.whole(Console(quiet=True), ending))
        assert whole.parent == store.root / "exports"
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(whole)),
            logits(adapted_model(store.checkpoint(2) / "inference", base)),
            rtol=0,
            atol=1e-5,
        )
    assert list((store.root / "exports").iterdir()) == []


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


def test_steps_are_taken_in_their_order_and_what_is_none_is_refused(run: Path) -> None:
    assert [subject.label for subject in subjects_of(str(run), "4,2,4")] == ["step 4", "step 2"]
    assert [subject.label for subject in subjects_of(str(run), "all")] == ["step 2", "step 4"]
    assert [subject.label for subject in subjects_of(str(run), None)] == ["step 4"]
    assert [subject.label for subject in subjects_of("some/model", None)] == ["some/model"]
    for steps in ("", "4,", "-1", "newest", "4;2", "1e1"):
        with pytest.raises(BadInput, match="one step such as 40, several such as 20,40,60, or `all`"):
            subjects_of(str(run), steps)
    with pytest.raises(BadInput, match="--step all for some/model, which has no checkpoint"):
        subjects_of("some/model", "all")
    with pytest.raises(BadInput, match="--step 4 for some/model"):
        subjects_of("some/model", "4")
    with pytest.raises(BadInput, match="there are: 2, 4"):
        subjects_of(str(run), "2,3")


@dataclass
class Rooms:
    """Stands in for the rooms: the mean reward of a step is `rewards[step]`, an exception of it is raised after a
    problem has been evaluated."""

    rewards: dict[int, float | Exception]
    evaluated: list[int] = field(default_factory=list)
    begun: dict[int, list[str]] = field(default_factory=dict)
    """The lines of problems that were evaluated before, at the last evaluation of a step."""

    def evaluate(
        self,
        config: Config,
        plan: Plan,
        subjects: Sequence[Subject],
        console: Console,
        stored: Evaluations,
        add: Callable[[Subject, Mapping[str, float]], None],
    ) -> None:
        for subject in subjects:
            step = subject.identity.version
            self.evaluated.append(step)
            self.begun[step] = stored.read_lines(subject.identity)
            reward = self.rewards[step]
            if isinstance(reward, Exception):
                stored.append_lines(subject.identity, [f"problem {len(self.evaluated)}"])
                raise reward
            add(subject, {"eval/sort/n": 16.0, "eval/sort/avg@2": reward, "eval/sort/avg@2/ci95": 0.01})


def evaluate(rooms: Rooms, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Calls the command with `rooms` in the place of the real ones, and returns what it prints."""
    monkeypatch.setattr(eval_command, "_evaluate", rooms.evaluate)
    monkeypatch.setattr(eval_command, "planned", lambda *_: "a plan")
    console = Console(width=200)
    with console.capture() as printed:
        eval_command.main([*arguments, *FLAGS], console)
    return printed.get()


def test_a_call_that_was_interrupted_evaluates_the_rest_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = Rooms({2: 0.5, 4: RoomFailed("a replica died")})
    with pytest.raises(RoomFailed):
        evaluate(rooms, monkeypatch, str(run), "--step", "all")
    rooms.rewards[4] = 0.75
    out = run.parent / "numbers.jsonl"
    printed = evaluate(rooms, monkeypatch, str(run), "--step", "all", "--resume", "--output", str(out))
    assert rooms.evaluated == [2, 4, 4]
    assert "step 2 was evaluated before" in printed
    table_lines = [line.split() for line in printed.splitlines() if line.startswith(" step") and "+-" in line]
    assert table_lines == [["step", "2", "0.5000", "+-", "0.0100"], ["step", "4", "0.7500", "+-", "0.0100"]]
    numbers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [number["eval/sort/avg@2"] for number in numbers] == [0.5, 0.75]
    evaluate(rooms, monkeypatch, str(run), "--step", "2")
    assert rooms.evaluated == [2, 4, 4, 2], "without --resume it is evaluated again"


def test_problems_that_were_evaluated_before_an_interruption_are_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = Rooms({4: RoomFailed("a replica died")})

    def interrupted(*options: str) -> list[str]:
        with pytest.raises(RoomFailed):
            evaluate(rooms, monkeypatch, str(run), *options)
        return rooms.begun[4]

    assert interrupted() == []
    (file,) = (run / "evaluations").iterdir()
    assert interrupted("--resume") == ["problem 1"]
    with file.open("a") as out:
        out.write("a line that kill -9 cut o")
    assert interrupted("--resume") == ["problem 1", "problem 2"]
    assert interrupted("--resume", "--eval.samples", "4") == []
    assert interrupted("--resume") == ["problem 1", "problem 2", "problem 3"]
    assert interrupted() == [], "without --resume it begins anew"
    rooms.rewards[4] = 0.5
    evaluate(rooms, monkeypatch, str(run), "--resume")
    assert rooms.begun[4] == ["problem 6"]
    assert file not in (run / "evaluations").iterdir(), "the result replaces the problems"


def test_results_of_other_options_or_other_weights_are_not_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = Rooms({2: 0.5, 4: 0.75})
    evaluate(rooms, monkeypatch, str(run))
    evaluate(rooms, monkeypatch, str(run), "--resume", "--inference.replicas", "2", "--run.name", "other")
    assert rooms.evaluated == [4]
    evaluate(rooms, monkeypatch, str(run), "--resume", "--eval.samples", "4")
    evaluate(rooms, monkeypatch, str(run), "--resume", "--seed", "7")
    evaluate(rooms, monkeypatch, str(run), "--resume", "--step", "2")
    assert rooms.evaluated == [4, 4, 4, 2]


def test_the_best_checkpoint_by_a_metric_is_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = evaluate(Rooms({2: 0.75, 4: 0.5}), monkeypatch, str(run), "--step", "all", "--keep-best", "sort/avg@2")
    assert "0.7500 +- 0.0100 (best)" in printed
    assert "step 2 is the best by eval/sort/avg@2: its run will not delete it" in printed
    store = CheckpointStore(run)
    assert [(store.checkpoint(step) / KEEP).exists() for step in (2, 4)] == [True, False]
    assert store.prune(1, None) == []
    rooms = Rooms({2: 0.75, 4: 0.5})
    with pytest.raises(BadInput, match=r"--keep-best reward, .*\n.*one of sort/n, sort/avg@2"):
        evaluate(rooms, monkeypatch, str(run), "--step", "all", "--keep-best", "reward")
    assert rooms.evaluated == [2]


@pytest.mark.parametrize("option", [["--resume"], ["--keep-best", "sort/avg@2"]])
def test_what_needs_a_run_is_refused_for_a_model(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=f"{option[0]} for the model"):
        evaluate(Rooms({}), monkeypatch, str(BASE_MODEL), *option)
