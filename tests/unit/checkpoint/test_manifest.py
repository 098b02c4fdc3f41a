"""The manifest is the checkpoint: any difference between what it names and what is there is seen, and so is one in
it."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoint_support import PARTS, checkpoint, flip, manifest, truncate
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.checkpoint.files import FileRecord
from trireme.checkpoint.manifest import FORMAT, MANIFEST, CheckpointRef, Manifest, step_name, step_of
from trireme.checkpoint.store import CheckpointStore
from trireme.core.errors import CheckpointInvalid
from trireme.core.types import WeightIdentity

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint(CheckpointStore(tmp_path), 20)


def invalid(directory: Path, contents: bool = True) -> str:
    with pytest.raises(CheckpointInvalid) as error:
        Manifest.verified(directory, contents)
    return str(error.value)


texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    step=st.integers(0, 10**7),
    parent=st.none() | st.builds(CheckpointRef, texts, st.integers(0)),
    fixed=st.dictionaries(texts, json_values, max_size=3),
    files=st.lists(st.builds(FileRecord, texts, st.integers(0), texts), max_size=3).map(tuple),
)
def test_round_trip(
    step: int, parent: CheckpointRef | None, fixed: dict[str, object], files: tuple[FileRecord]
) -> None:
    written = replace(manifest(step), parent=parent, fixed=fixed, files=files)
    assert Manifest.from_json(written.to_json()) == written


def test_what_it_says(saved: Path) -> None:
    read = Manifest.verified(saved)
    assert (read.step, read.identity) == (20, WeightIdentity(1, 20, f"{20:032x}"))
    assert [record.path for record in read.files] == list(PARTS)
    assert read.size == sum((saved / part).stat().st_size for part in PARTS)
    assert json.loads((saved / MANIFEST).read_text())["format"] == FORMAT == 5


def test_a_value_that_json_does_not_have_is_no_manifest() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(manifest(1), fixed={"x": float("nan")}).to_json()


@pytest.mark.parametrize("part", PARTS)
class TestFiles:
    def test_missing(self, saved: Path, part: str) -> None:
        (saved / part).unlink()
        assert invalid(saved, contents=False) == f"{part} is missing"

    def test_truncated(self, saved: Path, part: str) -> None:
        size = (saved / part).stat().st_size
        truncate(saved / part)
        assert invalid(saved, contents=False) == f"{part} has {size - 1} bytes, it was written with {size}"

    def test_a_flipped_bit(self, saved: Path, part: str) -> None:
        flip(saved / part)
        Manifest.verified(saved, contents=False)
        assert invalid(saved).startswith(f"the contents of {part} were altered")

    def test_unreadable(self, saved: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trireme.checkpoint.manifest.checksum_of", Mock(side_effect=OSError(5, os.strerror(5))))
        assert "cannot be read (Input/output error)" in invalid(saved)

    def test_a_file_in_place_of_its_room(self, saved: Path, part: str) -> None:
        shutil.rmtree((saved / part).parent)
        (saved / part).parent.write_text("")
        assert invalid(saved) == f"{part} cannot be read (Not a directory)"


def rename(saved: Path, part: str, to: str) -> None:
    """Changes the name of a file in the manifest, as somebody who knows the format can."""
    read = Manifest.read(saved)
    files = tuple(replace(record, path=to) if record.path == part else record for record in read.files)
    (saved / MANIFEST).write_text(replace(read, files=files).to_json())


class TestPlaces:
    """A checkpoint may come from anybody: what it names lies in it."""

    @pytest.mark.parametrize("place", ["{}", "../secret", "trainer/../../secret", "..", "trainer/.."])
    def test_a_path_that_leads_out_is_refused(self, saved: Path, place: str) -> None:
        secret = saved.parent / "secret"
        shutil.copy(saved / PARTS[0], secret)
        rename(saved, PARTS[0], place.format(secret))
        assert "leads out of its directory" in invalid(saved)
        assert "leads out of its directory" in invalid(saved, contents=False)

    @pytest.mark.parametrize("place", [PARTS[0], str(Path(PARTS[0]).parent)])
    def test_a_linked_file_or_directory_is_refused(self, saved: Path, place: str) -> None:
        (saved / place).symlink_to((saved / place).rename(saved.parent / "elsewhere"))
        assert "symbolic link" in invalid(saved)

    def test_a_run_behind_a_link_verifies_and_a_checkpoint_of_another_name(self, saved: Path, tmp_path: Path) -> None:
        (tmp_path / "linked").symlink_to(saved.parent)
        Manifest.verified(tmp_path / "linked" / saved.name)
        assert Manifest.verified(saved.rename(saved.with_name("best"))).step == 20


class TestTheManifestItself:
    def test_missing_is_an_orphan(self, saved: Path) -> None:
        (saved / MANIFEST).unlink()
        assert invalid(saved) == f"{MANIFEST} is missing: the checkpoint was never completed"

    def test_unreadable(self, saved: Path) -> None:
        (saved / MANIFEST).unlink()
        (saved / MANIFEST).mkdir()
        assert f"{MANIFEST} cannot be read" in invalid(saved)

    def test_every_truncation_is_seen(self, saved: Path) -> None:
        text = (saved / MANIFEST).read_text()
        for length in range(len(text)):
            with pytest.raises(CheckpointInvalid):
                Manifest.from_json(text[:length])

    def test_every_flipped_bit_is_seen(self) -> None:
        contents = manifest(20).to_json().encode()
        for position in range(8 * len(contents)):
            flipped = bytearray(contents)
            flipped[position // 8] ^= 1 << position % 8
            with pytest.raises((CheckpointInvalid, UnicodeDecodeError)):
                Manifest.from_json(flipped.decode())

    @pytest.mark.parametrize("bit", [0, 7])  # 7: no longer text
    def test_a_flipped_bit_in_the_file(self, saved: Path, bit: int) -> None:
        flip(saved / MANIFEST, bit=bit)
        assert invalid(saved, contents=False).startswith(MANIFEST)

    @pytest.mark.parametrize(
        "text", ["null", "[]", "3", "{}", '{"format": 5}', '{"format": 5, "checksum": ""}', "", "[" * 10**6], ids=len
    )
    def test_other_json_is_no_manifest(self, text: str) -> None:
        with pytest.raises(CheckpointInvalid, match="torn or was altered"):
            Manifest.from_json(text)

    def test_another_format_version(self, saved: Path) -> None:
        values = json.loads((saved / MANIFEST).read_text())
        (saved / MANIFEST).write_text(json.dumps({"format": 1, "other": values["step"]}))
        assert invalid(saved).startswith(f"{MANIFEST} has format 1; expected 5: resume with the version of Trireme")

    def test_in_the_directory_of_another_step(self, saved: Path) -> None:
        assert "step 20, in a directory named step_000040" in invalid(saved.rename(saved.with_name(step_name(40))))


def test_names_of_checkpoints() -> None:
    for step in (0, 20, 10**6 - 1, 10**6, 10**8):
        assert step_of(step_name(step)) == step
    for name in ("step_20", "step_000020.partial-1", "step_000020.removed", "xstep_000020", "step_"):
        assert step_of(name) is None
