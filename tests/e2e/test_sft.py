"""Supervised training: real Ray and FSDP2 over gloo, the command in a process of its own, killed and stopped at several
points. In the end all that it leaves is what a run leaves that nothing happened to, bit for bit. It trains adapters;
examples/sl_loop.py trains all weights."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from resume_support import assert_same_run, rows_of, run_and_kill
from run_support import DEADLINE_S, SFT, Ended, Running, run_rl
from store_support import double, stored
from trainer_support import VOCAB, make_model

from trireme.checkpoint.bucket import Bucket
from trireme.checkpoint.store import HEAD, CheckpointStore
from trireme.checkpoint.stored_run import StoredRun
from trireme.cli.trireme import main as trireme
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_SIGTERM
from trireme.supervision.status import Status, read_incidents

EXAMPLES, BATCH, EPOCHS = 21, 5, 2
STEPS = 8  # 2 epochs of 18, in batches of 5: the last step has one example
KILLED_AT = "commit.data@1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data of which 3 examples are held out, and a configuration."""
    directory = tmp_path_factory.mktemp("sft")
    make_model(directory / "model", "qwen3", tied=True)
    rng = np.random.default_rng(0)
    with (directory / "train.jsonl").open("w") as lines:
        for _ in range(EXAMPLES):
            tokens = rng.integers(0, VOCAB, rng.integers(4, 12)).tolist()
            lines.write(json.dumps({"tokens": tokens, "weights": [0, *[1] * (len(tokens) - 1)]}) + "\n")
    file = directory / "sft.toml"
    file.write_text(
        f"""
        deterministic = true
        [model]
        name = "{directory}/model"
        dtype = "float32"
        [data]
        train = "{directory}/train.jsonl"
        test_examples = 3
        batch_size = {BATCH}
        epochs = {EPOCHS}
        [eval]
        every = 3
        [trainer]
        shards = 2
        learning_rate = 1e-2
        schedule = "cosine"
        warmup_steps = 2
        micro_batch_tokens = 24
        [trainer.lora]
        rank = 8
        [checkpoint]
        every = 3
        keep_last = 2
        """
    )
    return file


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that nothing happens to."""
    outcome = run_rl(tmp_path_factory.mktemp("r"), config=config, module=SFT)
    assert outcome.code == EXIT_OK, outcome.out
    outcome.assert_nothing_left()
    return outcome


def stop_after_step_2(line: str, process: subprocess.Popen[str]) -> None:
    if line.split()[:2] == ["step", f"2/{STEPS}"]:
        process.send_signal(signal.SIGTERM)


def test_it_learns_and_says_so(reference: Ended) -> None:
    rows = reference.rows
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 3, 6, 7]
    assert rows[-1]["test/version"] == STEPS
    assert (rows[-1]["epoch"], rows[-1]["progress"]) == (EPOCHS, 1.0)
    trained = [n for row in rows_of(reference.root / "trained.jsonl") for n in row["examples"]]
    assert [sorted(trained[:18]), sorted(trained[18:])] == [list(range(18))] * 2


@pytest.mark.long
def test_killed_and_stopped_it_comes_to_the_same(config: Path, reference: Ended, tmp_path: Path) -> None:
    stopped = run_rl(tmp_path, config=config, module=SFT, on_line=stop_after_step_2)
    assert stopped.code == EXIT_SIGTERM, stopped.out
    assert "uv run sft @" in stopped.out
    assert [checkpoint.name for checkpoint in CheckpointStore(stopped.root).checkpoints()] == [
        f"step_{len(stopped.rows):06d}"
    ]
    run_and_kill(tmp_path, ["--resume"], at=KILLED_AT, config=config, module=SFT)
    once = tmp_path / "once"
    once.mkdir()
    faults = {"TRIREME_FAULTS": "trainer.forward_backward=kill", "TRIREME_FAULT_ONCE": str(once)}
    outcome = run_rl(tmp_path, "--resume", config=config, module=SFT, environ=faults)
    assert outcome.code == EXIT_OK, outcome.out
    lost, built = read_incidents(outcome.root)
    assert "continues from step" in built.what
    assert f"! {lost.part}: {lost.what}" in outcome.out
    status = Status.read(outcome.root)
    assert status is not None
    assert status.ended is not None
    assert {(part.name, part.restarts) for part in status.parts} == {("trainer_0", 1), ("trainer_1", 1)}
    assert (status.step, status.ended.exit_code) == (len(outcome.rows), EXIT_OK)
    assert_same_run(outcome.root, reference.root)
    outcome.assert_nothing_left()


@pytest.mark.long
def test_a_run_in_object_storage_goes_on_after_its_machine_is_lost(
    config: Path, reference: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once its first checkpoint is in the store, with everything on its disk deleted, the same command resumes
    it in an empty directory, and comes to what a run in a directory comes to."""
    with double() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        command = ["@", str(config), "--resume", "auto", "--run.name", "run"]
        command += ["--run.output-dir", server.url, "--run.local-dir", str(tmp_path)]
        # The second checkpoint does not come to an end, so neither does training, and the first one has its time.
        faults = {"TRIREME_FAULTS": "commit.manifest@2=freeze", "TRIREME_FAULT_REACHED": str(tmp_path / "reached")}
        with (tmp_path / "out").open("w") as out:
            running = Running.start(*command, environ=faults, out=out, module=SFT)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not has_checkpoint(server.url):
                assert running.process.poll() is None, (tmp_path / "out").read_text()
                assert time.monotonic() < deadline, f"{server.url} has no checkpoint:\n{(tmp_path / 'out').read_text()}"
                time.sleep(0.1)
        finally:
            running.kill_tree()
            running.files_left()
        shutil.rmtree(tmp_path / "run")

        outcome = run_rl(tmp_path, *command, module=SFT, directory=False)
        assert outcome.code == EXIT_OK, outcome.out
        assert "was brought from" in " ".join(outcome.out.split())
        assert f"resumed from {tmp_path}/run/checkpoints/step_000003" in " ".join(outcome.out.split())
        assert_same_run(outcome.root, reference.root)
        outcome.assert_nothing_left()
        stored_run = stored(server.url, "run")
        assert list(stored_run.of_branch()) == [6, STEPS], "the end is in the store, and what was pruned is not"
        assert (
            sum(part.size for part in stored_run.files["metrics.jsonl"])
            == (outcome.root / "metrics.jsonl").stat().st_size
        )


def has_checkpoint(url: str) -> bool:
    """Returns True once the run in the store has a checkpoint."""
    head = Bucket(f"{url}/run").read(HEAD)
    return head is not None and bool(StoredRun.from_json(head[0]).of_branch())


def test_what_it_made_opens_with_transformers_and_peft(config: Path, reference: Ended, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    assert trireme(["export", str(reference.root), "--out", str(out), "--dtype", "bfloat16", "--merge"]) == EXIT_OK
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size
    base = AutoModelForCausalLM.from_pretrained(config.parent / "model")
    adapter = reference.root / "checkpoints" / f"step_{STEPS:06d}" / "inference"
    trained = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name).float(), rtol=0.01, atol=1e-3)
    assert len(AutoTokenizer.from_pretrained(adapter)) == model.config.vocab_size


def test_the_tools_know_such_runs(reference: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["watch"], ["report", "--output", str(tmp_path / "page.html")]):
        assert trireme([*command, str(reference.root)]) == EXIT_OK
    out = capsys.readouterr().out
    assert f"finished at step {STEPS}" in " ".join(out.split())
    assert f"step {STEPS}/{STEPS}" in out
    assert "held out" in (tmp_path / "page.html").read_text()


def test_other_data_or_seed_are_refused_and_nothing_starts(config: Path, reference: Ended, tmp_path: Path) -> None:
    shutil.copytree(reference.root, tmp_path / "run")
    other = tmp_path / "other.jsonl"
    other.write_text((config.parent / "train.jsonl").read_text() + '{"tokens": [1, 2]}\n')
    refused = run_rl(tmp_path, "--resume", "--data.train", str(other), "--seed", "1", config=config, module=SFT)
    assert refused.code == EXIT_BAD_INPUT
    assert "data.digest" in refused.out
    assert "data.seed" in refused.out
