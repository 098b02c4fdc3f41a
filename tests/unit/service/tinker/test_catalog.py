"""What clients saved, on disk: names, lifetimes, damage, and directories that are not whole."""

import json
from pathlib import Path

import pytest
from manual_clock import ManualClock

from service.requests import RequestRefused
from service.tinker.catalog import MARK, Catalog, path_of, recover
from trireme.checkpoint.files import write_bytes

MODEL = "abc:train:0"


@pytest.fixture
def catalog(tmp_path: Path, clock: ManualClock) -> Catalog:
    opened = Catalog(tmp_path, "base", clock)
    opened.begin(MODEL, {"renderer_name": "qwen3"})
    return opened


def save(
    catalog: Catalog, name: str, contents: bytes = b"1234", ttl_s: int | None = None, overwrite: bool = False
) -> str:
    path = path_of(MODEL, "weights", name)
    record = write_bytes(catalog.staging(path, overwrite), "state.bin", contents)
    return catalog.keep(path, {"state.bin": record.size}, ttl_s, {"own": "x"}).path


def test_another_catalog_of_the_same_directory_finds_it(catalog: Catalog, tmp_path: Path, clock: ManualClock) -> None:
    path = save(catalog, "first")
    assert path == f"tinker://{MODEL}/weights/first"
    directory, saved = Catalog(tmp_path, "base", clock).find(path, "weights")
    assert (directory / "state.bin").read_bytes() == b"1234"
    assert (saved.files, saved.user_metadata) == ({"state.bin": 4}, {"own": "x"})
    assert catalog.run(MODEL).user_metadata == {"renderer_name": "qwen3"}
    assert [run.model_id for run in catalog.runs()] == [MODEL]


def test_a_name_is_used_once_unless_it_is_to_be_replaced(catalog: Catalog) -> None:
    path = save(catalog, "first")
    with pytest.raises(RequestRefused, match="overwrite = True"):
        save(catalog, "first")
    assert save(catalog, "first", b"123456", overwrite=True) == path
    assert catalog.find(path)[1].files == {"state.bin": 6}


def test_what_is_not_whole_does_not_count(catalog: Catalog) -> None:
    """A save that died, one that is tried again, and a file that was cut."""
    staging = catalog.staging(path_of(MODEL, "weights", "first"))
    write_bytes(staging, "state.bin", b"12")
    assert catalog.saved(MODEL) == []
    with pytest.raises(RequestRefused, match="nothing is saved"):
        catalog.find(f"tinker://{MODEL}/weights/first")
    path = save(catalog, "first")
    directory, _ = catalog.find(path)
    (directory / "state.bin").write_bytes(b"12")
    with pytest.raises(RequestRefused, match=r"state\.bin had 4 bytes and has 2"):
        catalog.find(path)


def test_names_do_not_stand_in_each_others_way(catalog: Catalog) -> None:
    """Names that look like those of files that are being written, and the longest one."""
    names = ["best", "best.new", "new-weights", "x" * 255]
    paths = [save(catalog, name, name.encode()) for name in reversed(names)]
    assert {saved.path for saved in catalog.saved(MODEL)} == set(paths)
    for path, name in zip(paths, reversed(names), strict=True):
        assert (catalog.find(path)[0] / "state.bin").read_bytes() == name.encode()


@pytest.mark.parametrize("deleted", [True, False])
def test_a_replacement_that_was_cut_short_is_finished_by_the_next_server(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """The server is killed before or while the old directory is deleted."""
    path = save(catalog, "first", b"old")
    directory, _ = catalog.find(path)

    class Killed(BaseException):
        pass

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path == directory:
            if deleted:
                (directory / "state.bin").unlink()
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("service.tinker.catalog.shutil.rmtree", rmtree)
        with pytest.raises(Killed):
            save(catalog, "first", b"newest", overwrite=True)
    torn = catalog.staging(path_of(MODEL, "sampler_weights", "torn"))
    write_bytes(torn, "state.bin", b"12")
    recover(tmp_path)
    assert (catalog.find(path)[0] / "state.bin").read_bytes() == b"newest"
    assert not torn.exists()
    assert [saved.name for saved in catalog.saved(MODEL)] == ["first"]


def test_a_name_is_free_again_though_its_directory_was_not_deleted_whole(catalog: Catalog) -> None:
    directory, _ = catalog.find(path := save(catalog, "first"))
    (directory / MARK).unlink()
    assert save(catalog, "first", b"new") == path


def test_what_is_damaged_can_be_deleted_and_hinders_no_others(catalog: Catalog, clock: ManualClock) -> None:
    for name in ("first", "second"):
        directory, _ = catalog.find(save(catalog, name, ttl_s=3600))
        (directory / "state.bin").unlink()
    catalog.delete(f"tinker://{MODEL}/weights/first")
    clock.now += 3600
    catalog.expire()
    assert catalog.saved(MODEL) == []


def test_it_is_deleted_when_its_time_is_over(catalog: Catalog, clock: ManualClock) -> None:
    short, long = save(catalog, "short", ttl_s=3600), save(catalog, "long", ttl_s=3600)
    unexpired = save(catalog, "kept")
    catalog.set_ttl(long, None)
    clock.now += 3600
    catalog.expire()
    assert [state.path for state in catalog.saved(MODEL)] == [long, unexpired]
    with pytest.raises(RequestRefused, match="nothing is saved"):
        catalog.find(short)


@pytest.mark.parametrize(
    "path",
    [
        "weights/first",
        "tinker://abc:train:0/first",
        "tinker://abc:train:0/weights/..",
        "tinker://abc:train:0/weights/a/../../b",
        "tinker://../weights/first",
        "tinker://abc:train:0/other_weights/first",
    ],
)
def test_paths_lead_nowhere_else(catalog: Catalog, path: str) -> None:
    with pytest.raises(RequestRefused, match="expected"):
        catalog.find(path)


@pytest.mark.parametrize("file", ["../../../secret", "/etc/passwd", "link"])
def test_a_mark_that_names_files_elsewhere_is_damaged(catalog: Catalog, tmp_path: Path, file: str) -> None:
    path = save(catalog, "first")
    directory, _ = catalog.find(path)
    (tmp_path / "secret").write_text("1234")
    (directory / "link").symlink_to(tmp_path / "secret")
    mark = json.loads((directory / MARK).read_text())
    (directory / MARK).write_text(json.dumps(mark | {"files": {file: 4}}))
    with pytest.raises(RequestRefused, match=r"is damaged: .*; use another one"):
        catalog.find(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 256])
def test_names_that_are_no_files_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(RequestRefused, match="a name of up to 255"):
        catalog.staging(path_of(MODEL, "weights", name))


def test_the_kind_that_is_wanted_is_said(catalog: Catalog) -> None:
    with pytest.raises(RequestRefused, match="sampler_weights"):
        catalog.find(save(catalog, "first"), "sampler_weights")
    with pytest.raises(RequestRefused, match="not here"):
        catalog.run("other:train:0")
