"""The whole system: `rl` with real Ray, FSDP2 over gloo and vLLM on CPU, as a user runs it."""

import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from chaos_support import parts_of, wait_for
from other_user import as_another_user, reached
from resume_support import rows_of
from run_support import (
    DEADLINE_S,
    KILLED_GONE_S,
    TINY,
    Ended,
    Running,
    assert_rows_keep_the_bound,
    in_directory,
    key_in,
    marked_processes,
    run_rl,
    wait_until_disconnected,
)
from test_quickstart import assert_learned

from trireme.checkpoint.rows import ROLLOUTS, recorded_steps
from trireme.launch.service import KEYS
from trireme.run.rollout_records import TABLE_COLUMNS, read_records
from trireme.tools.timeline import Span, timeline

STEPS = 40
SOON_S = 20.0
"""After SIGKILL to a driver its rooms have ended."""
PROMPT = "Sort: 361695\n"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_rl(
        tmp_path_factory.mktemp("r"),
        *("--max-steps", str(STEPS), "--inference.replicas", "2"),
        *("--wandb.project", "test", "--wandb.mode", "offline"),
        *("--eval.every", "20", "--eval.problems", "24", "--eval.samples", "2"),
    )


@dataclass
class Chats:
    """What a person sees who chats with a run that trains, and kills its service."""

    run: Running
    out: Path
    """What the run prints."""
    versions: list[int] = field(default_factory=list)
    """The version of the weights that gave each answer."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """The state of a session: before the service is killed, and as the next service has it."""

    def play(self) -> None:
        """Chats until answers have come from three versions. The service is killed after the second."""
        url = self._wait_for_url(1)
        self._chat(url, versions=2)
        session = self._call("POST", f"{url}/sessions", key_in(self.out.read_text(), "admin"))
        with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as agent:
            question: Any = [{"role": "user", "content": PROMPT}]
            pieces = list(agent.chat.completions.create(model="policy", messages=question, max_tokens=8, stream=True))
            assert pieces[-1].choices[0].finish_reason, "its end came once the turn was stored"
        self.sessions.append(self._call("GET", f"{url}/sessions/{session['session']}", session["key"]))
        (service,) = [pid for pid, command in marked_processes(self.run.mark).items() if "ServiceActor" in command]
        os.kill(service, signal.SIGKILL)
        url = self._wait_for_url(2)
        self.sessions.append(self._call("GET", f"{url}/sessions/{session['session']}", session["key"]))
        self._chat(url, versions=3)

    def _wait_for_url(self, number: int) -> str:
        """Returns the address of the service that is the `number`th of the run, once it is printed."""

        def urls() -> list[str]:
            return re.findall(r"the service answers at (http\S+)", self.out.read_text())

        wait_for(f"the address of service {number}", lambda: len(urls()) >= number, self.run, DEADLINE_S)
        return urls()[number - 1]

    def _chat(self, url: str, versions: int) -> None:
        """Asks until `versions` different versions have answered, those of former calls included."""
        deadline, key = time.monotonic() + DEADLINE_S, key_in(self.out.read_text())
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S) as client:
            while len(set(self.versions)) < versions:
                assert time.monotonic() < deadline, self.versions
                try:
                    raw = client.completions.with_raw_response.create(model="policy", prompt=PROMPT, max_tokens=8)
                except openai.InternalServerError:  # no weights yet, or the replica has not joined again
                    time.sleep(0.2)
                    continue
                self.versions.append(int(raw.headers["x-trireme-version"]))

    @staticmethod
    def _call(method: str, url: str, key: str) -> Any:
        answer = httpx.request(method, url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


@dataclass(frozen=True)
class Killed:
    """A run whose driver was killed, and what it had begun until then."""

    run: Running
    chats: Chats
    listened: dict[str, set[str]]
    """Addresses at which its processes listened, with what they are."""
    opened: str
    """Its sockets and temporary files that another user could reach."""
    root: Path
    secrets: tuple[str, ...]
    """All that it was given."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """An asynchronous run that answers chats, whose driver is killed while it trains. Other tests run until all
    processes of it have gone."""
    place = tmp_path_factory.mktemp("killed")
    planted = {"WANDB_API_KEY": "0123456789" * 4, "ANSWERER_PASSWORD": "correct horse", "HF_TOKEN": "hf_" + "aB3" * 12}
    argument = "hf_" + "cD4" * 12
    flags = [*TINY, "--max-steps", "2000", "--service.port", "0", "--inference.engine-args.hf-token", argument]
    environ = {"CUDA_VISIBLE_DEVICES": "", **planted}
    with (place / "out").open("w") as out:
        run = Running.start(*in_directory(place), *flags, out=out, environ=environ)
    chats = Chats(run, place / "out")
    try:
        chats.play()
        listened = listening(marked_processes(run.mark))
        run.temporary.chmod(0o1777)  # as the machine's own is
        (private,) = run.temporary.glob("trireme-*")
        paths = [private, *private.rglob("*")]
        assert any(path.name == "plasma_store" for path in paths)
        # Only root can play another user.
        opened = as_another_user(lambda: reached(paths)) if os.geteuid() == 0 else ""
        rows, newest = place / "run" / "metrics.jsonl", max(chats.versions)

        def has_row() -> bool:
            return any(row["version"] >= newest for row in rows_of(rows))

        wait_for(f"the row of version {newest}", has_row, run, DEADLINE_S)
        run.process.kill()
        yield Killed(run, chats, listened, opened, place / "run", (*planted.values(), argument))
    finally:
        run.kill_tree()
        run.files_left()


def listening(pids: Mapping[int, str]) -> dict[str, set[str]]:
    commands_by_address: dict[str, set[str]] = {}
    for pid, command in pids.items():
        try:
            sockets = psutil.Process(pid).net_connections("inet")
        except psutil.Error:  # it ended while we looked
            continue
        for connection in sockets:
            if connection.status == psutil.CONN_LISTEN or (
                connection.type.name == "SOCK_DGRAM" and not connection.raddr
            ):
                commands_by_address.setdefault(connection.laddr.ip, set()).add(
                    command.split(" ")[0] + " " + command[-60:]
                )
    return commands_by_address


def test_a_run_on_one_machine_listens_on_loopback_alone(killed: Killed) -> None:
    """Ray's services and metrics, the trainer's store, gloo, and engines. Another user reaches none of its sockets and
    temporary files."""
    assert len(killed.listened) > 0, "Ray listens somewhere"
    assert set(killed.listened) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, killed.listened
    assert killed.opened == ""


def test_chats_get_the_weights_of_the_moment_and_survive_the_service(killed: Killed) -> None:
    before, after = killed.chats.sessions
    assert before == after
    assert (before["turns"], before["answers"], before["open"]) == (1, 1, True)
    assert killed.chats.versions == sorted(killed.chats.versions), "the newest weights answer"
    rows = rows_of(killed.root / "metrics.jsonl")
    assert set(killed.chats.versions) <= {0, *(row["version"] for row in rows)}
    assert_rows_keep_the_bound(rows, bound=1)
    assert (killed.root / KEYS).stat().st_mode & 0o777 == 0o600
    assert "the service is started again" in killed.chats.out.read_text()


def test_the_rooms_of_a_killed_driver_end_soon(killed: Killed) -> None:
    deadline = time.monotonic() + SOON_S
    while parts := parts_of(killed.run.mark):
        assert time.monotonic() < deadline, parts
        time.sleep(0.1)


def test_a_run_writes_no_secret_that_it_is_given(killed: Killed) -> None:
    """Into logs, trace, records and checkpoints."""
    written = {file: file.read_bytes() for file in killed.root.rglob("*") if file.is_file()}
    assert any(file.suffix == ".log" for file in written)
    secrets = [secret.encode() for secret in killed.secrets]
    assert [str(file) for file, contents in written.items() if any(secret in contents for secret in secrets)] == []


class TestQuickstart:
    """The quickstart with two replicas and evaluations, looked at from all sides."""

    def test_it_learns_from_each_problem_once_and_leaves_nothing(self, outcome: Ended) -> None:
        """After all of its 150 steps the reward is above 0.85 (test_quickstart.py)."""
        assert_learned(outcome, STEPS)
        assert [row["version"] for row in outcome.rows] == list(range(1, STEPS + 1))
        assert sum(row["off_policy/mean"] for row in outcome.rows) > 0, "the bound is put to the test"

    def test_every_update_agrees_with_the_trainer(self, outcome: Ended) -> None:
        assert max(row["weights/canary_max_diff"] for row in outcome.rows) < 1e-4
        assert len({row["weights/digest"] for row in outcome.rows}) == STEPS

    def test_evaluations_are_of_one_version_each_and_lose_nothing(self, outcome: Ended) -> None:
        """A token of another version would have stopped the run."""
        evaluated = {row["step"]: row["eval/sort/version"] for row in outcome.rows if "eval/sort/version" in row}
        assert evaluated == {0: 0, 20: 20, STEPS - 1: STEPS}
        for step in evaluated:
            row = outcome.rows[step]
            assert (row["eval/sort/n"], row["eval/sort/failed"], row["eval/sort/problems"]) == (48, 0, 24)
            assert 0 < row["eval/sort/reward/total"] < 1
            assert row["eval/sort/pass@1"] <= row["eval/sort/pass@2"]
            assert row["eval/sort/avg@2/ci95"] > 0
            assert row["eval/sort/success"] == pytest.approx(row["eval/sort/pass@1"])
        assert outcome.out.count("evaluation of version") == 3

    def test_prints_plan_steps_and_what_next(self, outcome: Ended) -> None:
        rooms, last = ("trainer", "orchestrator", "inference"), f"{STEPS}/{STEPS}"
        for expected in (*rooms, "written to", last, "What next", "tokens"):
            assert expected in outcome.out

    def test_each_room_has_a_log(self, outcome: Ended) -> None:
        logs = sorted((outcome.root / "logs" / "attempt_1").glob("*.log"))
        assert len(logs) == 6
        assert not any("Failed to load weights" in log.read_text() for log in logs), "a false alarm at every update"

    def test_each_step_left_rollouts_to_read(self, outcome: Ended) -> None:
        files = recorded_steps(outcome.root / ROLLOUTS)
        assert list(files) == list(range(STEPS))
        groups = read_records(files[STEPS - 1])
        assert [group["why"] for group in groups[:2]] == ["best", "worst"]
        turn = groups[0]["rollouts"][0]["turns"][0]
        assert turn["observation_text"].startswith("Sort: ")
        assert len(turn["logprobs"]) == len(turn["action"]) == sum(tokens for _, tokens in turn["versions"])

    def test_each_room_traced_what_it_did(self, outcome: Ended) -> None:
        shown = timeline(outcome.root)
        assert shown is not None
        spans: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for process in shown.processes:
            for span in (span for track in process.tracks for row in track.rows for span in row):
                spans[process.name][span.name].append(span)
        assert list(shown.steps) == list(range(1, STEPS + 1))
        shards, replicas = ("trainer_0", "trainer_1"), ("inference_0", "inference_1")
        assert set(spans) == {"driver_0", "orchestrator_0", *shards, *replicas}
        assert set(spans["driver_0"]) >= {"wait_for_batch", "forward_backward", "optim", "publish", "commit"}
        assert set(spans["orchestrator_0"]) >= {"wait", "group", "evaluation"}
        for shard in shards:
            assert [len(spans[shard][name]) for name in ("optim", "publish")] == [STEPS, STEPS + 1]
            assert len(spans[shard]["forward_backward"]) >= STEPS, "a batch may come in several parts"
            self.assert_within(spans[shard]["forward_backward"], spans["driver_0"]["forward_backward"])
        for replica in replicas:
            assert [span.args["version"] for span in spans[replica]["update"]] == list(range(STEPS + 1))
            assert spans[replica]["sampling"]
        groups = spans["orchestrator_0"]["group"]
        assert len(groups) == outcome.rows[-1]["ledger/dispatched"]
        played = [span for span in groups if "versions" in span.args]  # the others were under way at the end
        assert len(played) >= STEPS * 16
        assert all(span.args["floor"] <= span.args["versions"][0] for span in played)

    def assert_within(self, inner: list[Span], outer: list[Span]) -> None:
        """All processes have one clock: a shard's work for a call lies within the driver's wait for it."""
        for one, other in zip(inner, outer, strict=True):
            assert one.end is not None
            assert other.end is not None
            assert other.start <= one.start < one.end <= other.end

    def test_wandb_has_the_run_offline_with_its_rollouts(self, outcome: Ended) -> None:
        (run,) = (outcome.root / "wandb").glob("offline-run-*")
        assert list(run.glob("*.wandb"))
        tables = [json.loads(file.read_text()) for file in run.glob("files/media/table/rollouts_*.table.json")]
        assert sorted({row[0] for table in tables for row in table["data"]}) == list(range(1, STEPS + 1)), (
            "of each step"
        )
        assert all(table["columns"] == TABLE_COLUMNS for table in tables)


def test_a_killed_driver_takes_everything_along(killed: Killed) -> None:
    """Ray's two agents of a node may first try for 60 s (fixed in `ray._private.utils.publish_error_to_driver`) to
    report the death of one to another: this test comes last."""
    assert wait_until_disconnected(killed.run.mark, KILLED_GONE_S) == []
    assert killed.run.process.wait(1) == -signal.SIGKILL
    assert killed.run.shm_left() == set()
