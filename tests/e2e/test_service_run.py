"""A run that answers chats while it trains."""

import queue
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from run_support import TINY, assert_bound_and_conservation, key_in, run_rl

from trireme.core.errors import EXIT_INTERRUPTED
from trireme.launch.service import KEYS

DEADLINE_S = 200
PROMPT = "Sort: 361695\n"


class Chatting:
    """A person who chats with a run as soon as it says where, kills the service, chats with the next one, and ends the
    run."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.killed = 0
        self.error: BaseException | None = None
        self.states: list[dict[str, Any]] = []
        """Of a session: before the service was killed, and what the next one knows of it."""
        self._urls: queue.Queue[str] = queue.Queue()
        self._key = self._admin = ""

    def see(self, line: str, process: subprocess.Popen[str]) -> None:
        self._key, self._admin = self._key or key_in(line), self._admin or key_in(line, "admin")
        if match := re.search(r"the service answers at (http\S+)", line):
            self._urls.put(match[1])
            if not self.killed and self._urls.qsize() == 1:
                threading.Thread(target=self._play, args=[process], daemon=True).start()

    def _play(self, process: subprocess.Popen[str]) -> None:
        try:
            url = self._urls.get()
            self._chat(url, until=2)
            session = self._turn_of_a_session(url)
            for child in psutil.Process(process.pid).children(recursive=True):
                if "ServiceActor" in " ".join(child.cmdline()):
                    self.killed += 1
                    child.kill()
            url = self._urls.get(timeout=DEADLINE_S)
            self.states.append(self._call("GET", f"{url}/sessions/{session['session']}", session["key"]))
            self._chat(url, until=3)
        except BaseException as error:
            self.error = error
        finally:
            process.send_signal(signal.SIGINT)

    def _turn_of_a_session(self, url: str) -> Any:
        session = self._call("POST", f"{url}/sessions", self._admin)
        with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"], max_retries=0) as agent:
            question: Any = [{"role": "user", "content": PROMPT}]
            pieces = list(agent.chat.completions.create(model="policy", messages=question, max_tokens=8, stream=True))
            assert pieces[-1].choices[0].finish_reason, "its end came once the turn was stored"
        self.states.append(self._call("GET", f"{url}/sessions/{session['session']}", session["key"]))
        return session

    @staticmethod
    def _call(method: str, url: str, key: str) -> Any:
        answer = httpx.request(method, url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _chat(self, url: str, until: int) -> None:
        """Asks until so many versions have answered."""
        deadline = time.monotonic() + DEADLINE_S
        with openai.OpenAI(base_url=f"{url}/v1", api_key=self._key, max_retries=0, timeout=60) as client:
            while len(set(self.versions)) < until:
                assert time.monotonic() < deadline, self.versions
                try:
                    raw = client.completions.with_raw_response.create(model="policy", prompt=PROMPT, max_tokens=8)
                except openai.InternalServerError:  # no weights yet, or the replica has not joined again
                    time.sleep(0.2)
                    continue
                self.versions.append(int(raw.headers["x-trireme-version"]))


def test_chats_get_the_weights_of_the_moment_and_survive_the_service(tmp_path: Path) -> None:
    chatting = Chatting()
    flags = ["--trainer.shards", "1", "--max-steps", "2000", "--service.port", "0"]
    outcome = run_rl(tmp_path, *TINY, *flags, on_line=chatting.see)
    assert chatting.error is None, (chatting.error, outcome.out)
    assert outcome.code == EXIT_INTERRUPTED, outcome.out
    assert chatting.killed == 1
    before, after = chatting.states
    assert before == after
    assert (before["turns"], before["answers"], before["open"]) == (1, 1, True)
    assert chatting.versions == sorted(chatting.versions), "the newest weights answer"
    assert max(chatting.versions) <= outcome.rows[-1]["version"]
    assert_bound_and_conservation(outcome, bound=1)
    assert (outcome.root / KEYS).stat().st_mode & 0o777 == 0o600
    assert "the service is started again" in outcome.out
    outcome.assert_nothing_left()
