"""Writes the console's page as one file: its style, its scripts, and the answers that they request from a server.

    request "rollout", {step: 3, group: 0, rollout: 1, start: 0} --> answer "rollout 3 0 1 0" of the embedded JSON

A report of a long run is bounded: curves are thinned, and of other metrics and rollouts as many are embedded as fit. It
may be sent to others, so it has neither logs nor sessions. Nothing here needs a server's packages.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from service.console.run_reader import RunReader
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in
from trireme.tools.timeline import NEWEST_STEPS

PAGE = Path(__file__).with_name("page")
CURVES_BYTES = 8_000_000
"""Further metrics are embedded while all answers together are shorter than this, in bytes."""
REPORT_BYTES = 18_000_000
"""Further rollouts are embedded while all answers together are shorter than this, in bytes."""
MOST_STEPS = 39
"""About the most steps with embedded rollouts: the newest and the first, and steps evenly spread between them."""
SCRIPT = re.compile(r'<script src="files/([\w.]+)" defer></script>\n')
STYLE = re.compile(r'<link rel="stylesheet" href="files/([\w.]+)">\n')


def page_file(name: str) -> str:
    """Returns the text of a file of the console's page (HTML, style or script)."""
    return path_in(PAGE, name).read_text()


class EmbeddedAnswers:
    """Collects a server's answers to requests of the page, as JSON that is safe inside of an HTML script element."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._bytes = 0

    def add(self, request: str, answer: object, most_bytes: int | None = None) -> bool:
        """Adds an answer. Returns False, and adds nothing, if all answers together would be longer than `most_bytes`
        (None: no limit)."""
        text = f"{_json(request)}:{_json(answer)}"
        if most_bytes is not None and self._bytes + len(text) > most_bytes:
            return False
        self._texts.append(text)
        self._bytes += len(text)
        return True

    def text(self) -> str:
        """Returns all answers as one JSON object."""
        return "{" + ",\n".join(self._texts) + "}"


def report_page(reader: RunReader, now: datetime) -> str:
    """Returns the HTML page of the run that `reader` reads, with the run's data inside. `now`: the time of the report,
    which the page shows."""
    reader.read_all()
    run = reader.overview()
    curves = reader.curves()
    answers = EmbeddedAnswers()
    answers.add("run", {**run, "headline": f"{run['headline']}  (report of {now:%Y-%m-%d %H:%M} UTC)"})
    answers.add("timeline", reader.timeline(NEWEST_STEPS))
    names = [name for name in curves["names"] if answers.add(f"curve {name}", reader.curve(name), CURVES_BYTES)]
    answers.add("curves", {**curves, "names": names})
    recorded = reader.rollouts.steps(limit=None)["steps"]
    steps: set[int] = set()
    some = recorded[:: 1 + len(recorded) // MOST_STEPS]
    for step, request, answer in _rollouts(reader, dict.fromkeys([*recorded[:1], *recorded[-1:], *some])):
        if not answers.add(request, answer, REPORT_BYTES):
            break
        steps.add(step)
    answers.add("rollouts", {"steps": sorted(steps, reverse=True), "older": len(recorded) - len(steps)})
    return _assembled(answers.text())


def _rollouts(reader: RunReader, steps: Iterable[int]) -> Iterator[tuple[int, str, Any]]:
    """Yields (step, request, answer) for each request that the page can make about the rollouts of `steps`."""
    rollouts = reader.rollouts
    for step in steps:
        groups = rollouts.groups(step)
        yield step, f"groups {step}", groups
        for number in range(len(groups["groups"])):
            group = rollouts.group(step, number)
            yield step, f"group {step} {number}", group
            for rollout in range(len(group["rollouts"])):
                start = 0
                while start is not None:
                    page = rollouts.tokens(step, number, rollout, start)
                    yield step, f"rollout {step} {number} {rollout} {start}", page
                    start = page["next"]


def _json(value: object) -> str:
    return to_json(value, separators=(",", ":")).replace("<", "\\u003c")  # no end of the script element


def _assembled(answers: str) -> str:
    """Returns the whole HTML page, with its scripts, its style and `answers` inside. Its content security policy allows
    only these scripts and this style."""
    page = page_file("console.html")
    script = "\n" + "\n".join(map(page_file, SCRIPT.findall(page)))
    style = "\n" + "\n".join(map(page_file, STYLE.findall(page)))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{style}</style>\n'
    data = f'<script type="application/json" id="report">{answers}</script>\n<script>{script}</script>\n'
    page = STYLE.sub("", SCRIPT.sub("", page))
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{data}</body>")


def _hash(text: str) -> str:
    """Returns the source expression ('sha256-...') by which a content security policy allows the script or style
    `text`."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
