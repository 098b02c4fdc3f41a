"""Takes the pictures of the console in docs/: of a real run with two sessions, by Chromium, on the port of its service.

    python scripts/make_console_pictures.py

The run uses `configs/quickstart.toml`, in a temporary directory, and takes about two minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "support"))
from browser_support import CHROMIUM, browser  # noqa: E402

DOCS = ROOT / "docs"
STEPS = 8
DEADLINE_S = 300.0
WIDTH = 1280
OPEN = {
    "rooms": (660, "document.querySelectorAll('#parts td').length"),
    "timeline": (740, "document.querySelectorAll('#timeline canvas').length"),
    "rollouts": (580, "document.querySelectorAll('#rollout-tokens b').length"),
    "sessions": (680, "document.querySelectorAll('#session-tree button').length"),
}
"""The photographed tabs: the height of each picture, and a condition that holds once the tab is drawn."""


def talk(url: str, admin: str) -> None:
    """Opens two sessions. In each an agent asks, and then asks again in two ways, which is a fork."""
    for number, problem in enumerate(("ticket 31", "ticket 32")):
        headers = {"Authorization": f"Bearer {admin}"}
        answer = httpx.post(f"{url}/sessions", json={"problem": problem}, headers=headers, timeout=DEADLINE_S)
        session = answer.raise_for_status().json()
        with openai.OpenAI(base_url=session["openai_base_url"], api_key=session["key"]) as agent:
            messages: list[Any] = [{"role": "user", "content": f"Sort: 5{number}361\n"}]
            for question in ("Sort: 90213\n", "Sort: 77415\n"):
                if len(messages) == 1:
                    reply = agent.chat.completions.create(model="policy", messages=messages, max_tokens=8)
                    messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                conversation: Any = [*messages, {"role": "user", "content": question}]
                agent.chat.completions.create(model="policy", messages=conversation, max_tokens=8)


def photograph(address: str, profile: Path) -> None:
    """Opens each tab, and writes its picture."""
    with browser(profile) as tab:
        tab.open(address)
        for name, (height, drawn) in OPEN.items():
            tab.click(f"#tab-{name}")
            if name == "sessions":
                tab.click("#session-names li:first-child button")
            tab.until(drawn)
            if name == "sessions":
                tab.click("#session-tree li:last-child button")
                tab.until("document.querySelectorAll('#node-tokens b, #node-tokens .observed').length")
            tab.picture(DOCS / f"console-{name}.png", WIDTH, height)
            print(f"docs/console-{name}.png")


def main() -> None:
    if CHROMIUM is None:
        sys.exit("no chromium: install it (package chromium), which takes the pictures")
    with tempfile.TemporaryDirectory(prefix="pictures-") as directory:
        place = [
            *("--run.output-dir", directory, "--run.name", "sort"),
            *("--service.port", "0", "--model.max-seq-len", "256"),
            # Steps take less time than the sessions' turns, which are refused beyond this age.
            *("--orchestrator.max-steps-off-policy", "50"),
        ]
        command = [sys.executable, "-m", "trireme.cli.rl", "@", "configs/quickstart.toml", *place]
        log = Path(directory) / "output.txt"
        with log.open("w") as output:
            running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            ends = time.monotonic() + DEADLINE_S
            rows = Path(directory) / "sort" / "metrics.jsonl"
            while not (rows.exists() and len(rows.read_text().splitlines()) >= STEPS):
                if running.poll() is not None or time.monotonic() > ends:
                    sys.exit(f"the run has not come to step {STEPS} within {DEADLINE_S:g} s: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            text = log.read_text()
            url = re.search(r"the service answers at (http\S+)", text)
            if not url:
                sys.exit(f"the run has not said where its service is: {text[-2000:]}")
            key = re.findall(r"^admin (\S+)", (rows.parent / "service.keys").read_text(), re.MULTILINE)[0]
            talk(url[1], key)
            photograph(f"{url[1]}/console/#key={key}", Path(directory) / "profile")
        finally:
            running.terminate()
            running.wait(DEADLINE_S)


if __name__ == "__main__":
    main()
