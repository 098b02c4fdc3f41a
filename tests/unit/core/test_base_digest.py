"""Headers of safetensors files that are not true are refused with the file's name, before anything is read by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_support import small
from safetensors.numpy import save_file

from orchestrator.state import ARRAYS, LAYOUT, STATE, OrchestratorState
from trireme.config.model_facts import ModelFacts
from trireme.core.base_digest import base_digest, read_header, stored_shapes
from trireme.core.errors import BadInput, CheckpointInvalid

GIB = 1 << 30
ROOT = Path(__file__).parents[3]


def entry(start: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape or [(end - start) // 4], "data_offsets": [start, end]}


def write(file: Path, header: Any, claims: int | None = None, size: int = 0) -> None:
    """Writes a file with 12 bytes of tensors. `claims`: the header's length as the file says it; `size`: that of the
    file, mostly a hole."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as out:
        out.write((len(text) if claims is None else claims).to_bytes(8, "little") + text + bytes(12))
        if size:
            out.truncate(size)


BOMBS: dict[str, Callable[[Path], None]] = {
    "a header of four exabytes": lambda file: write(file, {"a": entry(0, 12)}, claims=1 << 62),
    "a header of eight gigabytes, which are there": lambda file: write(file, {}, claims=8 * GIB, size=9 * GIB),
    "a tensor beyond the end": lambda file: write(file, {"a": entry(0, 4 * GIB)}),
    "tensors that overlap": lambda file: write(file, {"a": entry(0, 8), "b": entry(4, 12)}),
    "a hole between tensors": lambda file: write(file, {"a": entry(0, 4), "b": entry(8, 12)}),
    "bytes behind the tensors": lambda file: write(file, {"a": entry(0, 4)}),
    "a tensor before the beginning": lambda file: write(file, {"a": entry(-12, 0)}),
    "a shape of 2^80 numbers": lambda file: write(file, {"a": entry(0, 12, 1 << 40, 1 << 40)}),
    "lists within lists": lambda file: write(file, b"[" * 1_000_000),
    "no JSON": lambda file: write(file, b"garbage!"),
    "nothing": lambda file: file.write_bytes(b""),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_true_header_is_read(file: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32), "b": np.zeros(0, np.int32)}, file, metadata={"format": "pt"})
    begin, header = read_header(file)
    assert header == {
        "a": entry(0, 24, 2, 3) | {"shape": [2, 3]},
        "b": {**entry(24, 24, 0), "dtype": "I32", "shape": [0]},
    }
    assert begin == file.stat().st_size - 24
    assert stored_shapes(str(file.parent)) == {"a": (2, 3), "b": (0,)}


def test_digests_of_bases_never_change(file: Path) -> None:
    """Adapters and their checkpoints name the base by it: these are the digests that the first version computed."""
    save_file({"b": np.arange(5, dtype=np.int16), "a": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}, file)
    assert base_digest(str(file.parent)) == "039f178994c85e20ad7e9c6e04527b69"
    assert base_digest(str(ROOT / "assets" / "sort-base")) == "7251061bcf24dafe1675c8343d29f58a"


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_one_that_is_not_true_is_refused_by_the_name_of_its_file(file: Path, bomb: Callable[[Path], None]) -> None:
    bomb(file)
    (file.parent / "config.json").write_text("{}")
    config = small(model={"name": str(file.parent)})
    reads: list[Callable[[], object]] = [
        lambda: read_header(file),
        lambda: stored_shapes(str(file.parent)),
        lambda: base_digest(str(file.parent)),
        lambda: ModelFacts.of(config, required=True),  # what each command reads first
    ]
    for read in reads:
        with pytest.raises(BadInput, match=r"model\.safetensors, whose header does not describe it(.|\n)*a stranger"):
            read()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_the_orchestrators_part_of_a_checkpoint_is_refused_too(tmp_path: Path, bomb: Callable[[Path], None]) -> None:
    (tmp_path / STATE).write_text(json.dumps({"layout": LAYOUT}))
    bomb(tmp_path / ARRAYS)
    with pytest.raises(CheckpointInvalid, match=rf"{ARRAYS} is no safetensors file"):
        OrchestratorState.read(tmp_path)
