"""The whole system: `rl` with real Ray, FSDP2 over gloo and vLLM on CPU, as a user runs it."""

from __future__ import annotations

import json
import shutil
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from run_support import KILLED_GONE_S, ROOT, TINY, Ended, assert_bound_and_conservation, at_step, run_rl

from trireme.checkpoint.rows import ROLLOUTS, recorded_steps
from trireme.core.errors import EXIT_FAILED, EXIT_OK
from trireme.run.rollout_records import TABLE_COLUMNS, read_records
from trireme.tools.timeline import Span, timeline

LONG = [*TINY, "--trainer.shards", "1", "--max-steps", "200"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_rl(
        tmp_path_factory.mktemp("r"),
        *TINY,
        *("--max-steps", "12", "--trainer.shards", "2", "--inference.replicas", "2"),
        *("--wandb.project", "test", "--wandb.mode", "offline"),
        *("--eval.every", "4", "--eval.problems", "24", "--eval.samples", "2"),
    )


class TestTwoShardsTwoReplicas:
    """One asynchronous run, looked at from all sides."""

    def test_reaches_its_last_step(self, ended: Ended) -> None:
        assert ended.code == EXIT_OK, ended.out
        assert [row["step"] for row in ended.rows] == list(range(12))
        assert [row["version"] for row in ended.rows] == list(range(1, 13))

    def test_age_is_above_zero_and_within_the_bound(self, ended: Ended) -> None:
        assert sum(row["off_policy/mean"] for row in ended.rows) > 0
        assert_bound_and_conservation(ended, bound=1)

    def test_every_update_agrees_with_the_trainer(self, ended: Ended) -> None:
        assert max(row["weights/canary_max_diff"] for row in ended.rows) < 1e-4
        assert len({row["weights/digest"] for row in ended.rows}) == 12

    def test_evaluations_are_of_one_version_each_and_lose_nothing(self, ended: Ended) -> None:
        """A token of another version would have stopped the run."""
        evaluated = {row["step"]: row["eval/sort/version"] for row in ended.rows if "eval/sort/version" in row}
        assert evaluated == {0: 0, 4: 4, 8: 8, 11: 12}
        for step in evaluated:
            row = ended.rows[step]
            assert (row["eval/sort/n"], row["eval/sort/failed"], row["eval/sort/problems"]) == (48, 0, 24)
            assert 0 < row["eval/sort/reward/total"] < 1
            assert row["eval/sort/pass@1"] <= row["eval/sort/pass@2"]
            assert row["eval/sort/avg@2/ci95"] > 0
            assert row["eval/sort/success"] == pytest.approx(row["eval/sort/pass@1"])
        assert ended.out.count("evaluation of version") == 4

    def test_prints_plan_steps_and_what_next(self, ended: Ended) -> None:
        for expected in ("trainer", "orchestrator", "inference", "written to", "12/12", "What next", "tokens"):
            assert expected in ended.out

    def test_each_room_has_a_log(self, ended: Ended) -> None:
        logs = sorted((ended.root / "logs" / "attempt_1").glob("*.log"))
        assert len(logs) == 5
        assert not any("Failed to load weights" in log.read_text() for log in logs), "a false alarm at every update"

    def test_each_step_left_rollouts_to_read(self, ended: Ended) -> None:
        files = recorded_steps(ended.root / ROLLOUTS)
        assert list(files) == list(range(12))
        groups = read_records(files[11])
        assert [group["why"] for group in groups[:2]] == ["best", "worst"]
        turn = groups[0]["rollouts"][0]["turns"][0]
        assert turn["observation_text"].startswith("Sort: ")
        assert len(turn["logprobs"]) == len(turn["action"]) == sum(tokens for _, tokens in turn["versions"])

    def test_each_room_traced_what_it_did(self, ended: Ended) -> None:
        shown = timeline(ended.root, None, lambda _: None)
        assert shown is not None
        spans: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for process in shown.processes:
            for span in (span for track in process.tracks for row in track.rows for span in row):
                spans[process.name][span.name].append(span)
        assert list(shown.steps) == list(range(12))
        shards, replicas = ("trainer_0", "trainer_1"), ("inference_0", "inference_1")
        assert set(spans) == {"driver_0", "orchestrator_0", *shards, *replicas}
        assert set(spans["driver_0"]) >= {"wait_for_batch", "forward_backward", "optim", "publish", "commit"}
        assert set(spans["orchestrator_0"]) >= {"wait", "group", "evaluation"}
        for shard in shards:
            assert [len(spans[shard][name]) for name in ("forward_backward", "optim", "publish")] == [12, 12, 13]
            self.assert_within(spans[shard]["forward_backward"], spans["driver_0"]["forward_backward"])
        for replica in replicas:
            assert [span.args["version"] for span in spans[replica]["update"]] == list(range(13))
            assert spans[replica]["sampling"]
        groups = spans["orchestrator_0"]["group"]
        assert len(groups) == ended.rows[-1]["ledger/dispatched"]
        played = [span for span in groups if "versions" in span.args]  # the others were under way at the end
        assert len(played) >= 12 * 4
        assert all(span.args["floor"] <= span.args["versions"][0] for span in played)

    def assert_within(self, inner: list[Span], outer: list[Span]) -> None:
        """All processes have one clock: a shard's work for a call lies within the driver's wait for it."""
        for one, other in zip(inner, outer, strict=True):
            assert one.end is not None
            assert other.end is not None
            assert other.start <= one.start < one.end <= other.end

    def test_wandb_has_the_run_offline_with_its_rollouts(self, ended: Ended) -> None:
        (run,) = (ended.root / "wandb").glob("offline-run-*")
        assert list(run.glob("*.wandb"))
        tables = [json.loads(file.read_text()) for file in run.glob("files/media/table/rollouts_*.table.json")]
        assert sorted({row[0] for table in tables for row in table["data"]}) == list(range(12)), "of each step"
        assert all(table["columns"] == TABLE_COLUMNS for table in tables)

    def test_leaves_nothing(self, ended: Ended) -> None:
        ended.assert_nothing_left()


@pytest.mark.long
def test_a_synchronous_run_of_another_architecture_is_on_policy_at_any_temperature(tmp_path: Path) -> None:
    """max_steps_off_policy = 0: every group has age 0, and sampler and trainer compute the same distribution, with
    sub-steps, streaming and a temperature other than 1 too. Here of a Llama with random weights and an output head of
    its own: every update agrees with the trainer."""
    model = tmp_path / "llama"
    shutil.copytree(ROOT / "assets" / "sort-base", model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    make_llama(model)
    ended = run_rl(
        tmp_path,
        *TINY,
        *("--model.name", str(model), "--trainer.shards", "1"),
        *("--orchestrator.max-steps-off-policy", "0", "--inference.sampling.temperature", "1.3"),
        *("--trainer.num-substeps", "2", "--trainer.num-minibatches", "2", "--trainer.learning-rate", "1e-6"),
    )
    assert ended.code == EXIT_OK, ended.out
    assert_bound_and_conservation(ended, bound=0)
    assert all(row["optim/kl_sample_train_v2"] < 1e-4 for row in ended.rows)
    assert all(row["ledger/active"] == 0 for row in ended.rows)
    assert max(row["weights/canary_max_diff"] for row in ended.rows) < 1e-4
    assert max(row["optim/grad_norm"] for row in ended.rows) > 0, "some random answers are better than others"


def make_llama(path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, initializer_range=0.2, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(path)


def test_modules_of_a_user_with_the_names_of_rooms_do_no_harm(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("trainer", "orchestrator", "inference", "service"):
        (theirs / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    (theirs / "letters.py").write_text(
        "from orchestrator.envs.sort import SortDataset\n"
        "def grade(target, answer):\n"
        "    return 0.5, 0.0\n"
        "class Letters(SortDataset):\n"
        "    grade = staticmethod(grade)\n"
    )
    model = ["--model.name", str(ROOT / "assets" / "sort-base")]
    place = ["--env.id", "letters:Letters", "--env.path", "."]
    ended = run_rl(tmp_path, *TINY, *model, *place, environ={"PYTHONPATH": str(theirs)}, cwd=theirs)
    assert ended.code == EXIT_OK, ended.out
    assert [row["reward/total"] for row in ended.rows] == [0.5] * 3
    ended.assert_nothing_left()


def test_a_killed_driver_takes_everything_along(tmp_path: Path) -> None:
    """The kernel ends the cluster's services and our rooms within seconds. Two agents of Ray's may first try for 60 s
    (fixed in `ray._private.utils.publish_error_to_driver`) to report the death of one to another."""
    ended = run_rl(tmp_path, *LONG, on_line=at_step(2, signal.SIGKILL), gone_s=KILLED_GONE_S)
    assert ended.code == -signal.SIGKILL
    assert ended.left == []
    assert ended.shm == set()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param("trainer.forward_backward@2=raise", r"trainer shard", marks=pytest.mark.long),
        pytest.param("orchestrator.minibatch@2=raise", r"orchestrator", marks=pytest.mark.long),
        pytest.param("inference.received@2=corrupt", r"corrupted on the way", marks=pytest.mark.long),
        ("inference.loaded@2=corrupt", "the engine has loaded other values than were published"),
    ],
)
def test_a_fault_in_a_room_stops_a_run_without_restarts_with_its_reason(tmp_path: Path, fault: str, told: str) -> None:
    ended = run_rl(tmp_path, *LONG, "--cluster.max-restarts", "0", environ={"TRIREME_FAULTS": fault})
    assert ended.code == EXIT_FAILED, ended.out
    assert told in ended.out.replace("\n", " ")
    assert len(ended.rows) < 200
    ended.assert_nothing_left()
