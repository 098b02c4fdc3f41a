"""What clients saved, on disk: names, lifetimes, damage, and directories that are not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.tinker.catalog import Catalog
from service.tinker.promises import UserError
from trireme.checkpoint.files import write_bytes

MODEL = "abc:train:0"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(tmp_path: Path, clock: Clock) -> Catalog:
    made = Catalog(tmp_path, "base", clock)
    made.begin(MODEL, {"renderer_name": "qwen3"})
    return made


def save(
    catalog: Catalog, name: str, contents: bytes = b"1234", ttl_s: int | None = None, overwrite: bool = False
) -> str:
    staging = catalog.staging(MODEL, "weights", name, overwrite)
    return catalog.keep(staging, [write_bytes(staging, "state.bin", contents)], ttl_s, {"own": "x"}).path


def test_another_catalog_of_the_same_directory_finds_it(catalog: Catalog, tmp_path: Path, clock: Clock) -> None:
    path = save(catalog, "first")
    assert path == f"tinker://{MODEL}/weights/first"
    directory, saved = Catalog(tmp_path, "base", clock).find(path, "weights")
    assert (directory / "state.bin").read_bytes() == b"1234"
    assert (saved.files, saved.user_metadata) == ({"state.bin": 4}, {"own": "x"})
    assert catalog.run(MODEL).user_metadata == {"renderer_name": "qwen3"}
    assert [run.model_id for run in catalog.runs()] == [MODEL]


def test_a_name_is_used_once_unless_it_is_to_be_replaced(catalog: Catalog) -> None:
    path = save(catalog, "first")
    with pytest.raises(UserError, match="overwrite = True"):
        save(catalog, "first")
    assert save(catalog, "first", b"123456", overwrite=True) == path
    assert catalog.find(path)[1].files == {"state.bin": 6}


def test_what_is_not_whole_does_not_count(catalog: Catalog) -> None:
    """A save that died, one that is tried again, and a file that was cut."""
    staging = catalog.staging(MODEL, "weights", "first", False)
    write_bytes(staging, "state.bin", b"12")
    assert catalog.saved(MODEL) == []
    with pytest.raises(UserError, match="nothing is saved"):
        catalog.find(f"tinker://{MODEL}/weights/first")
    path = save(catalog, "first")
    directory, _ = catalog.find(path)
    (directory / "state.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"state\.bin had 4 bytes and has 2"):
        catalog.find(path)


def test_it_is_deleted_when_its_time_is_over(catalog: Catalog, clock: Clock) -> None:
    short, long = save(catalog, "short", ttl_s=3600), save(catalog, "long", ttl_s=3600)
    kept = save(catalog, "kept")
    catalog.set_ttl(long, None)
    clock.now_s += 3600
    catalog.expire()
    assert [each.path for each in catalog.saved(MODEL)] == [long, kept]
    with pytest.raises(UserError, match="nothing is saved"):
        catalog.find(short)


@pytest.mark.parametrize(
    "path",
    [
        "weights/first",
        "tinker://abc:train:0/first",
        "tinker://abc:train:0/weights/..",
        "tinker://abc:train:0/weights/a/../../b",
        "tinker://../weights/first",
        "tinker://abc:train:0/external_weights/first",
    ],
)
def test_paths_lead_nowhere_else(catalog: Catalog, path: str) -> None:
    with pytest.raises(UserError, match="expected"):
        catalog.find(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 256])
def test_names_that_are_no_files_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(UserError, match="expected up to 255"):
        catalog.staging(MODEL, "weights", name, False)


def test_the_kind_that_is_wanted_is_said(catalog: Catalog) -> None:
    with pytest.raises(UserError, match="sampler_weights"):
        catalog.find(save(catalog, "first"), "sampler_weights")
    with pytest.raises(UserError, match="not here"):
        catalog.run("other:train:0")
