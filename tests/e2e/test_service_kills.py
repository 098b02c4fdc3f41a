"""Sessions of outside clients on a run that loses a replica, its service, a shard and the orchestrator. Each continues
from its own tokens, or its later requests get 410 and the reason; none begins anew. How many survive is printed."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos_support import end_of, parts_of, started, wait_for
from cluster_support import free_port, listens
from resume_support import rows_of

from trireme.core.errors import EXIT_INTERRUPTED
from trireme.launch.service import KEYS

VICTIMS = {"replica": "inference_0", "service": "service_0", "shard": "trainer_0", "orchestrator": "orchestrator_0"}
REBUILT = ("shard", "orchestrator")
"""After these the run goes back to its newest checkpoint, under a new attempt."""
PATH = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
IDLE, BUSY, DEADLINE_S, PAUSE_S = 4, 4, 240.0, 0.25
FLAGS = [
    *("--max-steps", "100000", "--checkpoint.every", "2", "--inference.replicas", "2", "--trainer.shards", "1"),
    *("--orchestrator.batch-size", "2", "--orchestrator.group-size", "4", "--inference.memory-gb", "0.03"),
    *("--orchestrator.max-steps-off-policy", "100", "--model.max-seq-len", "256", "--timeouts.heartbeat-s", "20"),
    *("--trainer.loss-fn", "slow_loss:loss"),
]
"""Sessions become too old after 100 steps, of a second and more; that is not looked at here."""


class Agent:
    """A client with a session, which looks at the token ids of its prompts."""

    def __init__(self, url: str, admin: str) -> None:
        self._url, self._admin = url, admin
        self._messages: list[dict[str, str]] = [{"role": "user", "content": "361695"}]
        self._tokens: list[int] = []
        self.newest = 0
        self.closed = ""
        """Why its session was closed; "": it was not."""
        opened = self._call("POST", "/sessions", {}, admin).json()
        self.name, self._key = opened["session"], opened["key"]

    def turn(self) -> None:
        """Plays a turn, unless its session is closed. Asks again while no replica answers, or no service."""
        if self.closed:
            return
        body = {"model": "policy", "messages": self._messages, "max_tokens": 4, "return_token_ids": True}
        answer = self._call("POST", f"/sessions/{self.name}/v1/chat/completions", body, self._key)
        reply = answer.json()
        if answer.status_code == 410:
            assert reply["error"]["code"] == "session_closed"
            self.closed = reply["error"]["message"]
            return
        assert answer.status_code == 200, reply
        prompt, sampled = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        assert prompt[: len(self._tokens)] == self._tokens, "it continues from the tokens that its client was given"
        self._tokens, self.newest = prompt + sampled, reply["usage"]["version"]
        self._messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        self._messages.append({"role": "user", "content": "7"})

    def state(self) -> Any:
        """Returns what the service has of the session."""
        return self._call("GET", f"/sessions/{self.name}", None, self._admin).json()

    def _call(self, method: str, path: str, body: Any, key: str) -> httpx.Response:
        deadline = time.monotonic() + DEADLINE_S
        for tried in range(10_000):
            headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(tried)}
            try:
                answer = httpx.request(method, self._url + path, json=body, headers=headers, timeout=DEADLINE_S)
                if answer.status_code < 500:
                    return answer
                failure = answer.text
            except httpx.TransportError as error:
                failure = repr(error)
            assert time.monotonic() < deadline, failure
            time.sleep(PAUSE_S)
        raise AssertionError(failure)


def admin_key(root: Path) -> str:
    lines = [line.split() for line in (root / KEYS).read_text().splitlines()]
    return next(line[1] for line in lines if line[:1] == ["admin"])


def saved(root: Path) -> int:
    """The newest checkpoint."""
    return max((row["step"] for row in rows_of(root / "checkpoints.jsonl")), default=-1)


def attempt(root: Path) -> int:
    return max((row["attempt"] for row in rows_of(root / "metrics.jsonl")), default=0)


@pytest.mark.long
def test_a_session_continues_or_is_closed_whoever_is_lost(tmp_path: Path) -> None:
    port, root = free_port(), tmp_path / "run"
    survived: dict[str, tuple[int, int]] = {}
    with started(tmp_path, [*FLAGS, "--service.port", str(port)], PATH) as running, ThreadPoolExecutor(BUSY) as threads:
        wait_for("a checkpoint", lambda: saved(root) > 0, running, DEADLINE_S)
        wait_for("the service", lambda: listens(port), running, DEADLINE_S)
        for victim, part in VICTIMS.items():
            agents = [Agent(f"http://127.0.0.1:{port}", admin_key(root)) for _ in range(IDLE + BUSY)]
            idle, busy = agents[:IDLE], agents[IDLE:]
            for agent in (*idle, *idle):
                agent.turn()
            newest = max(agent.newest for agent in idle)
            wait_for(f"a checkpoint from {newest} on", lambda: saved(root) >= newest, running, DEADLINE_S)  # noqa: B023
            for agent in (*busy, *busy):
                agent.turn()
            turns, before = [threads.submit(agent.turn) for agent in busy], attempt(root)
            os.kill(parts_of(running.mark)[part][0], signal.SIGKILL)
            for turn in turns:
                turn.result(DEADLINE_S)
            if victim in REBUILT:
                wait_for("another attempt", lambda: attempt(root) > before, running, DEADLINE_S)  # noqa: B023
            for agent in agents:
                agent.turn()
                state = agent.state()
                assert (state["roots"], state["retokenised"], state["open"]) == (1, 0, not agent.closed)
            open_agents = [agent for agent in agents if not agent.closed]
            survived[victim] = len(open_agents), len(agents)
            print(f"survived the loss of {victim}: {len(open_agents)} of {len(agents)} sessions")
            for agent in agents:
                assert not agent.closed or (victim in REBUILT and "before version" in agent.closed), agent.closed
            assert not any(agent.closed for agent in idle), "all that they have is of weights that the run still has"
        running.process.send_signal(signal.SIGINT)
        outcome = end_of(running, tmp_path)
    assert outcome.code == EXIT_INTERRUPTED, outcome.out
    assert list(survived) == list(VICTIMS)
    assert outcome.remaining == []
