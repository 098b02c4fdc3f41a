"""What HEAD in object storage says, and which checkpoints stay there alone."""

import json

import pytest

from trireme.checkpoint.manifest import CheckpointRef
from trireme.checkpoint.store import Head
from trireme.checkpoint.stored_run import (
    FORMAT,
    FilePart,
    StoredCheckpoint,
    StoredRun,
    elsewhere,
    part_key,
    part_of,
    writer_of,
)
from trireme.core.errors import CheckpointInvalid

HEAD = Head("11111111", "aaaaaaaa", 1, None)


def stored(*steps: int, retained: int | None = None) -> StoredRun:
    commits = {f"checkpoints/step_{n:06d}": StoredCheckpoint(f"commits/{n}", f"sum {n}", n == retained) for n in steps}
    return StoredRun(2, "token", "pid 1 on node", HEAD, 3, commits, {"metrics.jsonl": (FilePart(1, 5, "ab"),)})


def on_disk(*steps: int) -> dict[str, StoredCheckpoint]:
    return dict(stored(*steps).commits)


def alone(run: StoredRun, local: dict[str, StoredCheckpoint], head: Head = HEAD, **rule: int | None) -> list[str]:
    return sorted(elsewhere(run, head, local, **{"keep_last": 3, "keep_every": None, **rule}))  # type: ignore[arg-type]


def test_its_text() -> None:
    run = stored(1, 2)
    assert StoredRun.from_json(run.to_json()) == run
    forked = StoredRun(1, "t", "h", Head("1", "2", 3, CheckpointRef("b", 4)))
    assert StoredRun.from_json(forked.to_json()) == forked


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"format": 1}', b"null", stored(1).to_json()[:-9]])
def test_another_text_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match="damaged"):
        StoredRun.from_json(text)


@pytest.mark.parametrize("field", ["commits", "key", "files", "lineage"])
def test_paths_that_lead_elsewhere_are_refused(field: str) -> None:
    values = json.loads(stored(1).to_json())
    if field == "lineage":
        values["head"]["lineage"] = "../../other"
    elif field == "key":
        values["commits"]["checkpoints/step_000001"]["key"] = "../other-run/commits/1"
    else:
        values[field] = {"checkpoints/../../other/checkpoints/step_000100": next(iter(values[field].values()))}
    with pytest.raises(CheckpointInvalid, match=r"damaged.*leads out of its directory"):
        StoredRun.from_json(json.dumps(values).encode())


def test_another_format_is_named() -> None:
    text = json.dumps({**json.loads(stored().to_json()), "format": FORMAT + 1}).encode()
    with pytest.raises(CheckpointInvalid, match=f"HEAD has format {FORMAT + 1}; expected {FORMAT}: use"):
        StoredRun.from_json(text)


def test_keys_say_who_put_them() -> None:
    part = part_of(b"abc", 7, None)
    key = part_key("logs/attempt_1/a.log", 2, part)
    assert writer_of(key) == (7, 0)
    assert key in StoredRun(7, "t", "h", HEAD, files={"logs/attempt_1/a.log": (part, part, part)}).parts()
    assert [writer_of(other) for other in ("HEAD", "trial-1", "rows/x/y", "other/000001/y")] == [None] * 4


def test_a_part_of_equal_contents_is_the_known_one() -> None:
    first = part_of(b"abc", 1, None)
    assert part_of(b"abc", 2, first) is first
    assert part_of(b"abd", 2, first).driver == 2


@pytest.mark.parametrize(
    ("steps", "local", "rule", "stay"),
    [
        ((1, 2, 3), (3,), {}, [1, 2]),
        ((1, 2, 3), (3, 4), {}, [2]),
        ((1, 2, 3), (4, 5, 6), {}, []),
        ((2, 4, 5), (6,), {"keep_last": 1, "keep_every": 4}, [4]),
        ((1, 2), (), {"keep_last": 1}, [2]),
    ],
)
def test_what_is_in_the_store_alone_is_kept_by_the_same_rule(
    steps: tuple[int, ...], local: tuple[int, ...], rule: dict[str, int], stay: list[int]
) -> None:
    assert alone(stored(*steps), on_disk(*local), **rule) == [f"checkpoints/step_{n:06d}" for n in stay]


def test_a_checkpoint_that_something_refers_to_stays() -> None:
    assert alone(stored(1, 2, retained=1), on_disk(3), keep_last=1) == ["checkpoints/step_000001"]


def test_what_the_run_went_back_behind_is_on_the_branch() -> None:
    back = Head("11111111", "bbbbbbbb", 2, CheckpointRef("aaaaaaaa", 2))
    anew = {"checkpoints/step_000003": StoredCheckpoint("commits/anew", "another sum")}
    assert alone(stored(1, 2, 3, 4), {**on_disk(2), **anew}, back) == [
        "branches/aaaaaaaa/checkpoints/step_000003",
        "branches/aaaaaaaa/checkpoints/step_000004",
        "checkpoints/step_000001",
    ]
    begun_again = Head("11111111", "bbbbbbbb", 2, None)
    assert alone(stored(1), {}, begun_again) == ["branches/aaaaaaaa/checkpoints/step_000001"]


def test_a_parked_checkpoint_is_there_once() -> None:
    parked = {"branches/aaaaaaaa/checkpoints/step_000002": stored(2).commits["checkpoints/step_000002"]}
    back = Head("11111111", "bbbbbbbb", 2, CheckpointRef("aaaaaaaa", 1))
    assert alone(stored(1, 2), parked, back) == ["checkpoints/step_000001"]
