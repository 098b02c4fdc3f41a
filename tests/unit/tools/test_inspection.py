"""`trireme inspect`: what it says about runs that went on, went back, were damaged, or are under way."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoint_support import flip, truncate
from supervision_support import roster_of
from tools_support import checkpoint, make_run

from trireme.checkpoint.store import CheckpointStore
from trireme.cli.trireme import main
from trireme.core.errors import EXIT_BAD_INPUT, EXIT_OK
from trireme.supervision.roster import PartHealth
from trireme.supervision.status import StatusWriter
from trireme.tools.inspection import age


def inspected(root: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["inspect", str(root), "--json", *flags]) == EXIT_OK
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def shown(root: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["inspect", str(root), *flags]) == EXIT_OK
    return capsys.readouterr().out


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return make_run(tmp_path / "run", 2, 4, 6)


def test_what_a_run_with_checkpoints_says(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    head = store.head()
    report = inspected(store.root, capsys)
    assert [c["step"] for c in report["commits"]] == [2, 4, 6]
    last = report["commits"][-1]
    assert last["verifies"]
    assert last["branch"] is None
    assert (last["lineage"], last["attempt"], last["shards"], last["replicas"]) == (head.lineage, 1, 2, 1)
    assert last["parent"] == {"lineage": head.lineage, "step": 4}
    files = [file for file in store.checkpoint(6).rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert last["bytes"] == sum(file.stat().st_size for file in files)
    assert report["newest"] == 6
    text = shown(store.root, capsys)
    assert head.run_id in text
    assert head.lineage in text
    place = f"--run.output-dir {store.root.parent} --run.name run --resume"
    command = f"uv run rl @ {store.root}/config.json {place}"
    assert report["resume"] == command
    assert f"continue from step 6\n  {command}\n" in text
    roster = roster_of()
    with StatusWriter(store.root, roster):
        roster.step = 6
    assert inspected(store.root, capsys)["resume"].endswith("--resume --max-steps 12"), "else it would do nothing"
    assert "finished at step 6; for longer\n  uv run rl @" in shown(store.root, capsys)


def test_damaged_and_unfinished_checkpoints_say_why(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store.checkpoint(6) / "orchestrator" / "groups.safetensors")
    torn = store.checkpoint(4) / "manifest.json"
    torn.write_bytes(torn.read_bytes()[:200])
    (store.draft(8, 3) / "part").write_bytes(b"12345")
    report = inspected(store.root, capsys)
    reasons = {c["step"]: c["reason"] for c in report["commits"]}
    assert reasons[2] is None
    assert "manifest.json is torn" in reasons[4]
    assert "the contents of orchestrator/groups.safetensors were altered" in reasons[6]
    assert [c["lineage"] for c in report["commits"]].count(None) == 1  # of the torn manifest nothing is known
    assert report["newest"] == 2
    assert report["leftovers"] == ["checkpoints/step_000008.partial-3"]
    text = shown(store.root, capsys)
    assert "checkpoints/step_000008.partial-3 is no checkpoint" in text
    assert "checkpoints/step_000006 does not verify: the contents of orchestrator/groups.safetensors" in text
    assert "continue from step 2\n" in text


def test_a_quick_look_sees_missing_and_short_files(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store.checkpoint(6) / "orchestrator" / "groups.safetensors")
    truncate(store.checkpoint(4) / "orchestrator" / "groups.safetensors")
    report = inspected(store.root, capsys, "--quick")
    assert report["quick"]
    assert {c["step"]: c["verifies"] for c in report["commits"]} == {2: True, 4: False, 6: True}
    assert "sizes fit" in shown(store.root, capsys, "--quick")
    assert {c["step"]: c["verifies"] for c in inspected(store.root, capsys)["commits"]}[6] is False
    assert "sizes fit" not in shown(store.root, capsys)


def test_lineages_that_were_left_and_what_they_left(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    first = store.head().lineage
    store.checkout(4)
    second = store.head().lineage
    checkpoint(store, 8)
    store.checkout(2)
    third = store.head().lineage
    report = inspected(store.root, capsys)
    assert report["head"]["lineage"] == third
    assert report["lineages"][-1]["lineage"] == third
    bases = {lineage["lineage"]: lineage["base"] for lineage in report["lineages"]}
    assert bases == {first: None, second: {"lineage": first, "step": 4}, third: {"lineage": first, "step": 2}}
    commits = {(c["step"], c["branch"], c["lineage"]) for c in report["commits"]}
    assert commits == {(2, None, first), (6, first, first), (4, second, first), (8, second, second)}
    assert all((store.root / c["path"]).is_dir() and c["verifies"] for c in report["commits"])
    text = shown(store.root, capsys)
    lines = [line for line in text.splitlines() if line.startswith("lineage ")]
    assert set(lines) == {
        f"lineage {first} from the beginning (left in attempt 1, see branches/{first})",
        f"lineage {second} from step 4 of lineage {first} (left in attempt 1, see branches/{second})",
        f"lineage {third} from step 2 of lineage {first} (current)",
    }
    assert f"superseded checkpoints, in branches/{second}" in text


def test_without_a_checkpoint_or_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: CheckpointStore
) -> None:
    make_run(tmp_path / "empty")
    report = inspected(tmp_path / "empty", capsys)
    assert (report["commits"], report["newest"], report["attempts"]) == ([], None, [1])
    assert "no checkpoints" in (text := shown(tmp_path / "empty", capsys))
    assert "continue from the beginning" in text
    (store.root / "HEAD").write_text("{")
    report = inspected(store.root, capsys)
    assert report["head"] is None
    assert "HEAD is damaged" in report["damage"]
    assert report["newest"] == 6
    assert "damaged: " in shown(store.root, capsys)


def test_incidents_are_told_the_newest_ten(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(store.root, capsys)["incidents"] == []
    assert "incidents.jsonl" not in shown(store.root, capsys)
    with StatusWriter(store.root, roster := roster_of(PartHealth.HEALTHY)):
        roster.at_step(4)
        for n in range(12):
            roster.note("inference_0", f"died [{n}]")
    incidents = inspected(store.root, capsys)["incidents"]
    assert [incident["what"] for incident in incidents] == [f"died [{n}]" for n in range(12)]
    text = shown(store.root, capsys)
    assert "12 incidents, all in incidents.jsonl; the newest:" in text
    assert "2027-01-15 08:00:00 UTC, attempt 1, step 4: inference_0: died [11]" in text
    assert "died [2]" in text
    assert "died [1]\n" not in text


@pytest.mark.parametrize(
    ("arguments", "value", "expected"),
    [
        (["inspect", "no/such/run"], "no/such/run, which is no directory", "the directory of a run"),
        (["inspect", "."], "., which holds none of config.json, HEAD, checkpoints", "the directory of a run"),
        (["inspect"], "the following arguments are required: RUN", "trireme inspect [-h] [--json] [--quick] RUN"),
        (["inspect", ".", "--jsn"], "unrecognized arguments: --jsn", "trireme"),
        (["export", ".", "--dtype", "int8"], "'int8'", "--dtype {bfloat16,float16,float32}"),
        (["expotr", "."], "'expotr'", "COMMAND"),
        ([], "required: COMMAND", "COMMAND"),
    ],
)
def test_wrong_inputs_are_refused(
    arguments: list[str],
    value: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == EXIT_BAD_INPUT
    error, expectation, do = capsys.readouterr().err.splitlines()
    assert value in error.removeprefix("error: given: ")
    assert expected in expectation.removeprefix("  expected: ")
    assert do.startswith("  to do: ")


def test_age_in_the_largest_unit_that_fits() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    past = {timedelta(seconds=59): "59 s ago", timedelta(minutes=61): "1 h ago", timedelta(days=3, hours=5): "3 d ago"}
    assert [age((now - by).isoformat(), now) for by in past] == list(past.values())
    assert age("2026-03-01T00:00:01+00:00", now) == "2026-03-01T00:00:01+00:00"  # the clock was set back
