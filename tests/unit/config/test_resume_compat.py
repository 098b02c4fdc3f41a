"""A resume must find some things unchanged, and others may change."""

import shutil
from pathlib import Path

import pytest

from trireme.config import Config
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.config.resume_compat import fixed_parts

ROOT = Path(__file__).parents[3]


def parts(*flags: str) -> dict:
    config: Config = load(["@", str(ROOT / "configs/quickstart.toml"), *flags], environ={}).config
    return fixed_parts(config, ModelFacts.of(config, required=True))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.shards", "3"),
        ("--inference.replicas", "2"),
        ("--trainer.micro-batch-tokens", "64"),
        ("--trainer.learning-rate", "1e-5"),
        ("--max-steps", "7"),
        ("--orchestrator.max-steps-off-policy", "3"),
        ("--orchestrator.batch-size", "4"),
    ],
)
def test_may_change(flags: tuple[str, str]) -> None:
    assert parts(*flags) == parts()


@pytest.mark.parametrize(
    ("flags", "room"),
    [
        (("--trainer.loss-fn", "importance_sampling"), "loss"),
        (("--trainer.loss-fn-config.clip-low-threshold", "0.7"), "loss"),
        (("--trainer.loss-normalization", "sum"), "loss"),
        (("--orchestrator.advantage", "std"), "loss"),
        (("--seed", "1"), "data"),
        (("--env.args.max-digits", "5"), "data"),
        (("--renderer.strip-thinking-from-history", "false"), "data"),
    ],
)
def test_may_not_change(flags: tuple[str, str], room: str) -> None:
    before, after = parts(), parts(*flags)
    assert [name for name in before if before[name] != after[name]] == [room]


def test_the_same_model_elsewhere_is_the_same_and_another_is_seen(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "assets/sort-base", tmp_path / "copy")
    assert parts("--model.name", str(tmp_path / "copy")) == parts()
    tokenizer = tmp_path / "copy" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    described = tmp_path / "copy" / "config.json"
    described.write_text(described.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    before, after = parts(), parts("--model.name", str(tmp_path / "copy"))
    assert [name for name in before if before[name] != after[name]] == ["model", "tokenizer"]


def test_the_reference_may_move_and_not_change(tmp_path: Path) -> None:
    def weights(directory: Path, *flags: str) -> dict:
        kl = ("--trainer.kl.coef", "0.1", "--trainer.kl.reference.base-model", str(directory))
        return parts(*kl, *flags)

    before = weights(ROOT / "assets/sort-base")
    shutil.copytree(ROOT / "assets/sort-base", tmp_path / "copy")
    assert weights(tmp_path / "copy") == before
    shutil.copytree(tmp_path / "copy", tmp_path / "trained")
    file = tmp_path / "trained" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # weights that are trained differ everywhere, and in the last byte
    file.write_bytes(content)
    for other in (
        weights(tmp_path / "trained"),
        weights(ROOT / "assets/sort-base", "--trainer.kl.reference.load-checkpoint-path", str(tmp_path / "trained")),
        weights(ROOT / "assets/sort-base", "--trainer.kl.reference.update-every", "2"),
        weights(Path("m")),
    ):
        assert [name for name in before if before[name] != other[name]] == ["loss"]
    assert parts("--trainer.kl.reference.base-model", str(tmp_path / "trained")) == parts(), "no penalty, no matter"


def test_data_are_fixed_with_names_and_weights_of_environments_but_no_secret() -> None:
    def data(*flags: str) -> dict:
        return parts("--env", '[{id = "sort"}, {id = "guess"}]', *flags)["data"]

    assert data("--env.1.group-size", "4") == data()
    for flags in (("--env.1.weight", "2"), ("--env.1.name", "game"), ("--env.1.args.max-turns", "3")):
        assert data(*flags) != data()
    flags = ("--env.args.api-key", "correct horse")  # what is fixed is written to each manifest
    assert "correct horse" not in str(parts(*flags))
    assert parts(*flags) == parts(*flags) != parts()
