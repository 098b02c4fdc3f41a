"""`trireme export --push`: exports on a hub, by the hub's own client against a stub on loopback."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import cli_support
import pytest
from checkpoint_support import snapshot
from hub_stub import TOKEN, StubHub, stub_hub
from huggingface_hub import constants, metadata_load
from huggingface_hub.utils import _http
from tools_support import make_run

from trireme.checkpoint.manifest import Manifest
from trireme.checkpoint.store import CheckpointStore, VerifiedCheckpoint
from trireme.cli.trireme import main
from trireme.core.errors import EXIT_OK
from trireme.tools.push import model_card

NAME = "me/sort"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    """The hub that the hub's client talks to, with a valid token."""
    with stub_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = make_run(tmp_path / "sort-1", 2, 4)
    config = {"model": {"name": "Qwen/Qwen3-0.6B"}, "env": {"args": {"api_key": "a-key-of-an-environment"}}}
    (store.root / "config.json").write_text(json.dumps(config))
    return store


def push(store: CheckpointStore, *flags: str) -> int:
    return main(["export", str(store.root), "--push", NAME, *flags])


Refused = Callable[..., str]


@pytest.fixture
def refused(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Pushes what is refused; returns what is said."""

    def push_in_vain(name: str = NAME, root: Path = store.root) -> str:
        message = cli_support.refused(capsys, "export", root, "--push", name)
        assert TOKEN not in message
        return message

    return push_in_vain


def test_an_export_is_on_the_hub_private_and_whole_with_a_card(
    hub: StubHub, store: CheckpointStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert push(store, "--step", "2") == EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == f"it is now {hub.address}/{NAME}"
    assert hub.private[NAME]
    files = hub.repositories[NAME]
    exported = snapshot(store.root / "exports" / "step_000002-float32")
    assert {name: data for name, data in files.items() if name != ".gitattributes"} == exported
    assert set(exported) - {"README.md"} == set(snapshot(store.checkpoint(2) / "inference"))
    (card := tmp_path / "README.md").write_bytes(files["README.md"])
    metadata = metadata_load(card)
    identity = Manifest.read(store.checkpoint(2)).identity
    head = store.head()
    assert (metadata["base_model"], metadata["library_name"]) == ("Qwen/Qwen3-0.6B", "transformers")
    assert metadata["trireme"] == {
        "run": "sort-1",
        "run_id": head.run_id,
        "step": 2,
        "digest": identity.digest,
        "weights": "whole model, as trained",
    }
    assert identity.digest in card.read_text().partition("# sort-1, step 2")[2]
    assert "a-key-of-an-environment" not in card.read_text()


def test_an_interrupted_push_sends_the_rest_alone(hub: StubHub, store: CheckpointStore, refused: Refused) -> None:
    hub.gone_after_puts = 2
    assert "push again: files that the hub has are not sent again" in refused()
    assert len(hub.puts) == 2
    hub.gone_after_puts = None
    written = {file: file.stat().st_mtime_ns for file in store.root.glob("exports/*/*")}
    assert push(store) == EXIT_OK
    assert {file: file.stat().st_mtime_ns for file in store.root.glob("exports/*/*")} == written, "used again"
    assert len(hub.puts) == len(set(hub.puts)) == len(list(store.root.glob("exports/*/*.safetensors")))
    assert push(store) == EXIT_OK
    assert len(hub.puts) == len(set(hub.puts))


@pytest.fixture
def storage(hub: StubHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of the hub's large files, which go by Xet, as they do by default."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.storage = f"local://{tmp_path}/storage"
    return tmp_path / "storage"


def blocks(storage: Path) -> dict[Path, int]:
    """Returns the blocks of large files in a storage of Xet, and when each was written."""
    files = storage.glob("xet/xorbs/xorbs/default.*")
    return {file: file.stat().st_mtime_ns for file in files if file.suffix != ".tagset"}


def test_an_interrupted_push_by_xet_is_repeated_and_stores_nothing_twice(
    hub: StubHub, store: CheckpointStore, storage: Path, refused: Refused
) -> None:
    hub.loses_commits = True
    assert "push again: files that the hub has are not sent again" in refused()
    stored = blocks(storage)
    assert len(stored) == 1
    assert set(hub.repositories[NAME]) == {".gitattributes", "README.md"}
    hub.loses_commits = False
    assert push(store) == EXIT_OK
    exported = snapshot(store.root / "exports" / "step_000004-float32")
    hashes = {name: hashlib.sha256(data).hexdigest().encode() for name, data in exported.items()}
    large = {name for name in exported if name.endswith(".safetensors")}
    assert hub.repositories[NAME] == {
        ".gitattributes": b"",
        **{name: hashes[name] if name in large else data for name, data in exported.items()},
    }
    assert blocks(storage) == stored


def test_a_later_step_replaces_the_weights_and_leaves_none_behind(hub: StubHub, store: CheckpointStore) -> None:
    assert push(store, "--step", "2") == EXIT_OK
    hub.repositories[NAME]["model-00009.safetensors"] = b"of an export with more files"
    hub.repositories[NAME]["picture.png"] = b"of the owner"
    assert push(store, "--step", "4", "--dtype", "bfloat16") == EXIT_OK
    exported = snapshot(store.root / "exports" / "step_000004-bfloat16")
    assert hub.repositories[NAME] == exported | {".gitattributes": b"", "picture.png": b"of the owner"}


@pytest.mark.parametrize(
    "files", [{"model.safetensors": b"precious"}, {"README.md": b"| run id | `00000000` |"}, {"README.md": b"\xff"}]
)
def test_a_repository_with_something_else_stays_as_it_is(
    files: dict[str, bytes], hub: StubHub, store: CheckpointStore, refused: Refused
) -> None:
    hub.repositories[NAME] = dict(files)
    assert "a repository that holds something else" in refused()
    assert hub.repositories[NAME] == files
    assert not (store.root / "exports").exists(), "refused before the export"


def test_without_a_token_or_a_hub_it_says_so(hub: StubHub, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "hf auth login" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub answered 401 (Invalid credentials" in refused()
    assert hub.repositories == {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "the hub cannot be reached" in refused()


@pytest.mark.parametrize(
    ("state", "value", "message"),
    [
        ("hidden", {NAME}, "the hub answered 409 (You already created this model repo)"),
        ("writers", {"they"}, "the hub answered 403 (You don't have the rights to create a model under me)"),
        ("broken", True, "the hub answered 503"),
        ("gone_after_puts", 0, "the hub cannot be reached, or did not answer as a hub (http://"),
    ],
)
def test_what_the_hub_answers_is_said(state: str, value: object, message: str, hub: StubHub, refused: Refused) -> None:
    setattr(hub, state, value)
    assert message in refused()


def test_names_and_runs_that_cannot_be_pushed(hub: StubHub, tmp_path: Path, refused: Refused) -> None:
    root = make_run(tmp_path / "empty").root
    for name in ("sort", "me/sort/1", "me/so rt", "/sort", "me/", "me/-sort"):
        assert "correct the name" in refused(name)
    assert "which holds no checkpoint" in refused(root=root)
    (root / "HEAD").unlink()
    assert "which has no file HEAD" in refused(root=root)


def test_the_card_of_an_adapter_names_peft_and_no_path_of_this_machine(store: CheckpointStore, tmp_path: Path) -> None:
    (store.root / "config.json").write_text(json.dumps({"model": {"name": str(tmp_path / "my-base")}}))
    checkpoint = VerifiedCheckpoint(store.checkpoint(2), Manifest.read(store.checkpoint(2)))
    text = model_card(store.root, "bfloat16", checkpoint, "adapter")
    (card := tmp_path / "README.md").write_text(text)
    metadata = metadata_load(card)
    assert (metadata["library_name"], metadata.get("base_model")) == ("peft", None)
    assert metadata["trireme"]["weights"] == "adapter, bfloat16"
    assert "`my-base`" in text
    assert str(tmp_path) not in text
