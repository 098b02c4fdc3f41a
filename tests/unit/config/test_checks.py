"""Checks across keys, against the model and against the installation."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import config_support
import pytest
from config_support import refused
from config_support import small as config
from model_support import FACTS
from wandb.sdk import wandb_login

from trireme.config import Config
from trireme.config.checks import check, check_trackers
from trireme.config.model_facts import ModelFacts


def refusal(run_config: Config, facts: ModelFacts | None = FACTS) -> str:
    return refused(lambda: check(run_config, facts))


SYNCHRONOUS = {"max_steps_off_policy": 0}
GROUPS_OF_8 = {"batch_size": 16, "group_size": 8}
REPEATABLE = {"deterministic": True, "orchestrator": {**GROUPS_OF_8, **SYNCHRONOUS}}
STORE = {"output_dir": "s3://bucket/runs"}
TWO = {"sampling": {"max_tokens": 8}, "replicas": 2}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"service": {"port": 0}, "inference": {"on_update": "drain"}},
        ["service.port = 0 with inference.on_update = drain"],
    ),
    ({"service": {"port": 0}, **REPEATABLE}, ["deterministic = true"]),
    (
        {"inference": {"encoding": "delta", "transport": "ipc"}},
        ["inference.encoding = delta with inference.transport = ipc"],
    ),
    (
        {"orchestrator": {**GROUPS_OF_8, "max_concurrent": 7}},
        ["orchestrator.max_concurrent = 7 with groups of 8 rollouts", "sampled together"],
    ),
    (
        {**REPEATABLE, "orchestrator": {**GROUPS_OF_8, **SYNCHRONOUS, "max_concurrent": 127}},
        ["orchestrator.max_concurrent = 127 with deterministic = true", "to 128 or more"],
    ),
    (
        {"orchestrator": {"generation_timeout_s": 100}, "timeouts": {"batch_s": 100}},
        ["generation_timeout_s = 100 with timeouts.batch_s = 100", "--timeouts.batch-s"],
    ),
    ({"deterministic": True}, ["--orchestrator.max-steps-off-policy 0"]),
    ({"deterministic": True, "orchestrator": SYNCHRONOUS, "cluster": {"device": "gpu"}}, ["cluster.device cpu"]),
    ({"clean": True, "resume": {"latest": True}}, ["leave one out"]),
    ({"resume": {"force": True}}, ["something to resume"]),
    ({"resume": {"latest": "auto"}}, ["--resume auto without --run.name"]),
    ({"resume": {"latest": True}, "run": STORE}, ["--resume without --run.name"]),
    ({"resume": {"latest": "auto", "step": 3}, "run": {"name": "r"}}, ["never come further"]),
    (
        {"trainer": {"kl": {"reference": {"update_every": 3}}}},
        ["trainer.kl.reference.update_every with trainer.kl.coef = 0"],
    ),
    ({"cluster": {"min_replicas": 3}, "inference": TWO}, ["cluster.min_replicas = 3 with inference.replicas = 2"]),
    ({"trainer": {"shards": 10**6}}, ["trainer.shards * trainer.replicate = 1,000,000", "at most 10,000 processes"]),
    ({"trainer": {"replicate": 10**12}}, ["trainer.shards * trainer.replicate = 1,000,000,000,000"]),
    (
        {"orchestrator": {"batch_size": 10**6, "group_size": 2}},
        ["orchestrator.batch_size * orchestrator.group_size = 2,000,000", "at most 1,000,000 rollouts of a step"],
    ),
    ({"inference": {**TWO, "replicas": 10**5}}, ["inference.replicas * inference.tensor_parallel = 100,000"]),
    (
        {"trainer": {"share_prefixes": "on", "lora": {"rank": 8, "dropout": 0.1}}},
        ["trainer.share_prefixes = on with trainer.lora.dropout = 0.1"],
    ),
    ({"trainer": {"num_substeps": 3}}, ["orchestrator.batch_size = 16", "15 or 18"]),
    ({"trainer": {"num_substeps": 2, "num_minibatches": 3}}, ["orchestrator.batch_size = 16", "12 or 18"]),
    ({"trainer": {"num_minibatches": 5}}, ["orchestrator.batch_size = 16", "15 or 20"]),
    (
        {"orchestrator": {"batch_size": 2}, "trainer": {"num_substeps": 4}},
        ["orchestrator.batch_size = 2", "divisible by num_substeps = 4"],
    ),
    (
        {"trainer": {"loss_fn": "ppo", "loss_fn_config": {"clip": 0.2}}},
        ["parameters of ppo: clip_low_threshold, clip_high_threshold"],
    ),
    (
        {"trainer": {"loss_fn": "importance_sampling", "loss_fn_config": {"clip_low_threshold": 0.8}}},
        ["parameters of importance_sampling: max_ratio, mask_ratio_low, mask_ratio_high"],
    ),
    (
        {"trainer": {"loss_fn_config": {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}}},
        ["0 <= low <= 1 <= high"],
    ),
    ({"trainer": {"loss_fn": "dro"}}, ["add --trainer.loss-fn-config.beta VALUE"]),
    ({"trainer": {"loss_fn": "grpo"}}, ["--trainer.loss-fn ppo with --orchestrator.advantage std"]),
    ({"trainer": {"loss_fn": "RLOO"}}, ["--orchestrator.advantage leave_one_out"]),
    ({"trainer": {"loss_fn": "cross_entropy"}}, ["a loss for reinforcement learning"]),
    ({"trainer": {"loss_fn": "no_such_package:loss"}}, ["No module named 'no_such_package'"]),
    *(
        (
            {"inference": {"sampling": {"max_tokens": 10}, "tensor_parallel": ranks}},
            [f"inference.tensor_parallel = {ranks} for", "4 attention heads, and 2 of keys and values", "1, 2, 4"],
        )
        for ranks in (3, 8)
    ),
    ({"model": {"max_seq_len": 10}}, ["shorter than the sequence"]),
    ({"inference": {"sampling": {"max_tokens": 64}}}, ["shorter than the sequence"]),
    ({"eval": {"max_tokens": 64}}, ["lower --eval.max-tokens"]),
    ({"model": {"max_seq_len": 65}}, ["at most 64, the max_position_embeddings of m"]),
    (
        {"model": {"max_seq_len": 7}, "inference": {"sampling": {"max_tokens": 4}}},
        ["at least 8", "--model.max-seq-len 8"],
    ),
]
"""Keys that exclude each other, or the model, and what the refusal names."""
ACCEPTED: list[dict[str, Any]] = [
    {"service": {"port": 0}},
    {"orchestrator": {**GROUPS_OF_8, "max_concurrent": 8}},
    {**REPEATABLE, "orchestrator": {**GROUPS_OF_8, **SYNCHRONOUS, "max_concurrent": 128}},
    {"orchestrator": {**GROUPS_OF_8, **SYNCHRONOUS, "max_concurrent": 127}},
    {"renderer": {"strip_thinking_from_history": False}},
    {"deterministic": True, "orchestrator": SYNCHRONOUS},
    {"resume": {"latest": "auto"}, "run": {"name": "r"}},
    {"run": STORE},
    {"resume": {"latest": True}, "run": {**STORE, "name": "r"}},
    {"resume": {"latest": "auto", "step": 3, "dir": "outputs/other"}, "run": {"name": "r"}},
    {"trainer": {"kl": {"coef": 0.1, "reference": {"base_model": "m", "update_every": 3}}}},
    {"cluster": {"min_replicas": 2}, "inference": TWO},
    {"trainer": {"shards": 5_000, "replicate": 2}},
    {"trainer": {"packing": "packed"}},
    *({"inference": {"sampling": {"max_tokens": 10}, "tensor_parallel": ranks}} for ranks in (1, 2, 4)),
]
"""The nearest ones that go together."""


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=[named[0] for _, named in REFUSED])
def test_keys_that_exclude_each_other_are_refused_by_name(options: dict[str, Any], named: list[str]) -> None:
    text = refusal(config(**options))
    assert [part for part in named if part not in text] == []


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_keys_that_go_together_are_accepted(options: dict[str, Any]) -> None:
    check(config(**options), FACTS)


def test_a_learning_rate_is_asked_for_where_the_family_is_unknown() -> None:
    other = replace(FACTS, model_type="gemma3")
    assert re.search(r"gemma3(.|\n)*--trainer\.learning-rate", refusal(config(), other))
    check(config(trainer={"learning_rate": 1e-5}), other)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "README.md"):
        (tmp_path / name).touch()
    options = {"model": {"name": str(tmp_path)}}
    assert f"model.name = {tmp_path}, a directory without a tokenizer" in refusal(config(**options))
    check(config(model={"name": str(tmp_path), "tokenizer": "m"}), FACTS)
    (tmp_path / "tekken.json").touch()  # a tokenizer of some kind may be in it
    check(config(**options), FACTS)


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("mlflow", {"mlflow": {"experiment": "x", "tracking_uri": "http://127.0.0.1:5000"}}),
        ("trackio", {"trackio": {"project": "x"}}),
    ],
)
def test_a_tracker_without_its_package(package: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"uv sync --extra {package}" in refused(lambda: check_trackers(config(**options)))
    check(config(**options), FACTS)  # an evaluation of the run needs no tracker


def test_a_tracker_without_its_account_or_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    nowhere = config(mlflow={"experiment": "x"})
    assert "set --mlflow.tracking-uri http://HOST:5000" in refused(lambda: check_trackers(nowhere))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(nowhere)
    secret = config(mlflow={"experiment": "x", "tracking_uri": "http://me:secret@127.0.0.1:5000"})
    assert "MLFLOW_TRACKING_PASSWORD" in (message := refused(lambda: check_trackers(secret)))
    assert ":secret" not in message


@pytest.mark.parametrize(
    ("mode", "key", "accepted"), [("online", "", False), ("online", "a" * 40, True), ("offline", "", True)]
)
def test_weights_and_biases_without_a_key(
    mode: str, key: str, accepted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own, because W&B remembers a key for the whole process. The service of W&B, which connects to
    its server, does not start."""
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    program = (
        "from config_support import small; from trireme.config.checks import check_trackers; import psutil; "
        f"check_trackers(small(wandb={{'project': 'x', 'mode': {mode!r}}})); assert not psutil.Process().children()"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(config_support.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == accepted, done.stderr
    assert ("wandb.mode = online without an API key" in done.stderr) == (not accepted)


def test_the_login_of_weights_and_biases_needs_its_server() -> None:
    """When this fails, `wandb.login(prompt=False, verify=False)` can replace `authenticate_session` in the checks."""
    assert "update_user_settings()" in inspect.getsource(wandb_login._login)


@pytest.mark.parametrize(
    ("options", "least", "largest"),
    [
        ({}, 8, 64),
        ({"num_substeps": 2}, 4, 32),
        ({"num_minibatches": 2}, 32, 32),
        ({"shards": 16}, 32, 64),  # 16 rollouts for each
        ({"shards": 100}, 64, 64),
        ({"num_substeps": 64}, 1, 1),
    ],
)
def test_the_size_of_a_minibatch(options: dict, least: int, largest: int) -> None:
    run_config = config(orchestrator={"batch_size": 64, "group_size": 8}, trainer=options)
    assert run_config.groups_per_minibatch == (least, largest)
    repeatable = run_config.model_copy(update={"deterministic": True})
    assert repeatable.groups_per_minibatch == ((largest, largest) if "num_minibatches" not in options else (32, 32))


def test_rollouts_of_two_hours_need_one_option_and_prolong_no_deadline_of_the_trainer() -> None:
    run_config = config(orchestrator={"batch_size": 16, "generation_timeout_s": 7200, "retries": 1})
    assert check(run_config, FACTS) == []
    assert run_config.timeouts == config().timeouts
    assert run_config.batch_deadline_s == 4 * 7200 + run_config.patience_s
    assert config(timeouts={"batch_s": 50}).batch_deadline_s == 50


def test_a_batch_deadline_that_leaves_no_time_for_a_second_group_warns() -> None:
    def warnings(seconds: float) -> list[str]:
        options = {"batch_size": 16, "generation_timeout_s": seconds}
        return check(config(orchestrator=options, timeouts={"batch_s": 100}), FACTS)

    (warning,) = warnings(51)
    assert "orchestrator.generation_timeout_s = 51: a rollout that hangs fails after that time" in warning
    assert "timeouts.batch_s = 100 may end the run" in warning
    assert warnings(50) == []


def test_an_update_that_waits_for_answers_needs_their_time() -> None:
    def warnings(on_update: str, update_s: float) -> list[str]:
        return check(config(inference={"on_update": on_update}, timeouts={"update_s": update_s}), FACTS)

    (warning,) = warnings("drain", 599)
    assert "inference.on_update = drain with timeouts.update_s = 599" in warning
    assert "may take up to 600 s" in warning
    short = {"sampling": {"max_tokens": 10}, "on_update": "drain", "answer_s": 100}
    assert check(config(inference=short, timeouts={"update_s": 100}), FACTS) == []
    assert warnings("drain", 600) == warnings("recompute_kv", 599) == warnings("keep_kv", 599) == []


def test_policies_that_favour_short_answers_and_steps_of_days_warn() -> None:
    (warning,) = check(config(orchestrator={**GROUPS_OF_8, "stale_policy": "drop", "max_steps_off_policy": 2}), FACTS)
    assert "takes longer than 2 of the trainer's steps is given up for good" in warning
    assert "wait, the default, trains on every problem" in warning
    assert check(config(orchestrator={**GROUPS_OF_8, "stale_policy": "drop", "max_steps_off_policy": 0}), FACTS) == []
    assert check(config(orchestrator={**GROUPS_OF_8, "stale_policy": "wait", "max_steps_off_policy": 2}), FACTS) == []
    long = {"sampling": {"max_tokens": 10_000}}
    warnings = check(config(orchestrator={"batch_size": 100_000, "group_size": 8}, inference=long), None)
    (warning,) = [warned for warned in warnings if "days" in warned]
    assert "orchestrator.batch_size = 100,000: a step samples up to" in warning
    assert check(config(orchestrator={"batch_size": 512}), FACTS) == []


@pytest.mark.parametrize("advantage", ["mean", "std", "leave_one_out"])
def test_group_of_one(advantage: str) -> None:
    text = refusal(config(orchestrator={"batch_size": 16, "group_size": 1, "advantage": advantage}))
    parts = ("orchestrator.group_size = 1", "at least 2 rollouts", "--orchestrator.group-size")
    assert [part for part in parts if part not in text] == []
    two = config(orchestrator={"batch_size": 3, "group_size": 1}, trainer={"num_substeps": 2})
    assert refusal(two).startswith("2 problems")


def test_seq_limit() -> None:
    limits = [config(model={"max_seq_len": 32}).seq_limit(FACTS), config().seq_limit(FACTS), config().seq_limit(None)]
    assert limits == [32, 64, None]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.1)])
def test_samplers_that_the_trainer_cannot_match(name: str, value: float) -> None:
    [warning] = check(config(inference={"sampling": {"max_tokens": 10, name: value}}), FACTS)
    assert f"inference.sampling.{name} = {value:g}" in warning
    assert "cannot match" in warning


def mixed(*envs: dict, held_out: list[dict] | None = None, **orchestrator: Any) -> Config:
    values = config().model_dump() | {"env": list(envs), "eval": {"env": held_out or []}}
    values["orchestrator"] |= orchestrator
    return Config.model_validate(values)


def test_environments_have_names_of_their_own_in_evaluations_too() -> None:
    assert check(mixed({"id": "sort"}, {"id": "sort", "name": "long"}), FACTS) == []
    text = refusal(mixed({"id": "sort"}, {"id": "guess"}, {"id": "my.sort:Sort", "name": "sort"}))
    assert "env has 2 environments of the name 'sort'" in text
    assert "`env.0.name = ...`" in text
    assert "env/all/*" in refusal(mixed({"id": "sort", "name": "all"}, {"id": "guess"}))
    envs = {"id": "sort"}, {"id": "guess"}
    assert check(mixed(*envs, held_out=[{"name": "guess"}, {"id": "letters:Letters"}]), FACTS) == []
    text = refusal(mixed(*envs, held_out=[{"args": {"max_turns": 2}}]))
    assert "the name of one of the run's environments (sort, guess)" in text
    assert "eval.env has 2 environments" in refusal(mixed(*envs, held_out=[{"name": "guess"}, {"name": "guess"}]))


def test_groups_of_each_environment_can_be_compared_and_have_room() -> None:
    text = refusal(mixed({"id": "sort"}, {"id": "guess", "group_size": 1}))
    assert "group_size = 1 of environment guess" in text
    assert check(mixed({"id": "sort", "group_size": 2}, {"id": "guess", "group_size": 4}, group_size=1), FACTS) == []
    envs = {"id": "sort", "group_size": 2}, {"id": "guess", "group_size": 16}
    assert "room for a whole group, 16 rollouts" in refusal(mixed(*envs, max_concurrent=15))
    assert check(mixed(*envs, max_concurrent=16), FACTS) == []
    run_config = mixed(*envs).model_copy(update={"trainer": config(trainer={"num_substeps": 4}).trainer})
    assert check(run_config, FACTS) == [], "the size of a batch counts groups, of whatever size"
