"""The page of the console, clicked through in a browser as a person does."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser_support import Tab, count_of, in_chromium
from console_support import ATTACK, STEPS, make_live_run, reader_of
from supervision_support import driven

from service.console.standalone import address_of, make_console_app, serve
from service.keys import ServiceKey, new_key
from service.ports import http_server

DEADLINE_S = 30.0


@contextmanager
def served(root: Path, *keys: ServiceKey) -> Iterator[str]:
    server = http_server(make_console_app(reader_of(root), list(keys)), "127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(serve(server)), daemon=True)
    thread.start()
    try:
        yield address_of(server, "127.0.0.1", list(keys))
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_live_run(tmp_path_factory.mktemp("console") / "run")


@in_chromium
def test_a_run_is_clicked_through(root: Path, tab: Tab) -> None:
    """All tabs show what the files say, texts of the model stay texts, and nothing else is asked of any machine."""
    with served(root) as address:
        tab.open(address)
        tab.until(count_of("#parts td"))
        assert "inference_1\tdead" in tab.text("#parts")
        assert f"its engine was killed {ATTACK}" in tab.text("#incidents")

        tab.click("#tab-curves")
        tab.until(f"{count_of('#panels path')} >= 4")
        assert "Reward" in tab.text("#panels")
        assert "5 (62.5 %)" in tab.text("#ages")

        tab.click("#tab-timeline")
        tab.until(count_of("#timeline canvas"))
        assert f"steps 1 to {STEPS}" in tab.text("#timeline-note")

        _look_at_rollouts(tab)
        _look_at_sessions(tab)

        tab.click("#tab-logs")
        tab.until("document.querySelector('#log-text').textContent.includes('line 19999')")
        tab.click("#older")
        tab.until("!document.querySelector('#log-text').textContent.includes('line 19999')")
        tab.run("(e => { e.value = '1/trainer_0'; e.dispatchEvent(new Event('change')); })(element('log-name'))")
        tab.until("document.querySelector('#log-text').textContent.startsWith('the trainer says')")
        assert ATTACK in tab.text("#log-text")

        assert tab.run("document.title") == f"run: {STEPS}/8", "no script of a model has run"
        assert tab.run(count_of("main script, main img")) == 0
        assert tab.complaints == []
        assert {url.partition("/console")[0] for url in tab.requested if url.startswith("http")} == {
            address.partition("/console")[0]
        }


def _look_at_rollouts(tab: Tab) -> None:
    tab.click("#tab-rollouts")
    tab.until(f"{count_of('#rollout-tokens b')} === 2")
    tab.click("#groups li:nth-child(2) button")
    tab.until("document.querySelector('#groups li:nth-child(2) button').getAttribute('aria-current')")
    tab.until(f"{count_of('#group-rollouts tr[tabindex]')} === 2")
    tab.click("#group-rollouts tr:nth-child(3)")
    tab.until(f"{count_of('#rollout-tokens b')} > 20")
    assert ATTACK in tab.text("#rollout-tokens .tokens")
    for mode, css in (("version", "b.v1"), ("age", "b.v0"), ("one token a line", ".token-table tr")):
        tab.run(
            f"(e => {{ e.value = '{mode}'; e.dispatchEvent(new Event('change')); }})(document.querySelector('.mode'))"
        )
        assert tab.run(count_of(f"#rollout-tokens {css}")) > 0, mode
    assert "version 4" in tab.text("#rollout-tokens .token-table tr:last-child")


def _look_at_sessions(tab: Tab) -> None:
    tab.click("#tab-sessions")
    tab.click("#session-names li:nth-child(2) button")
    tab.until(f"{count_of('#session-tree button')} === 5")
    assert tab.run(count_of("#session-tree .undelivered")) == 2
    tab.click("#session-tree li:last-child button")
    tab.until(count_of("#node-tokens .token-table tr"))
    assert "answer 2: stop; not delivered" in tab.text("#node-tokens")


@in_chromium
def test_a_run_is_followed(tmp_path: Path, tab: Tab) -> None:
    root = make_live_run(tmp_path / "live")
    with served(root) as address, driven(root):
        tab.open(address)
        tab.until("document.querySelector('#headline').textContent.includes('running, process')")
        with (root / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps({"step": STEPS, "attempt": 1, "reward/total": 0.9}) + "\n")
        tab.until(f"document.title === 'live: {STEPS + 1}/8'")
        assert "inference_1 dead" in tab.text("#trouble") or "no word from the driver" in tab.text("#trouble")
    tab.until("!document.querySelector('#unreached').hidden")
    assert "does not answer" in tab.text("#unreached")
    tab.complaints.clear()  # connections that were refused after the console had ended


@in_chromium
def test_a_key_opens_the_page_and_leaves_its_address(root: Path, tab: Tab) -> None:
    key = new_key("admin")
    with served(root, key) as address:
        tab.open(address.partition("#")[0])
        tab.until("!document.querySelector('#ask-key').hidden")
        assert tab.text("#parts") == ""
        tab.run(f"element('key').value = '{key.value}'")
        tab.click("#ask-key button")
        tab.until(count_of("#parts td"))
        assert tab.run("element('ask-key').hidden")
        tab.run("sessionStorage.clear()")
        tab.open("about:blank")
        tab.open(address)
        tab.until(count_of("#parts td"))
        assert key.value not in str(tab.run("location.href"))
        assert not any(key.value in url.partition("#")[0] for url in tab.requested)
    tab.complaints.clear()  # the 401 before the key was given


@in_chromium
def test_the_policy_stops_scripts_that_the_page_does_not_bring(root: Path, tab: Tab) -> None:
    """That the policy is there, should the page ever put a text in as HTML."""
    with served(root) as address:
        tab.open(address)
        tab.until(count_of("#parts td"))
        for attempt in (
            "document.body.innerHTML = '<i>x</i>'",
            "document.body.setAttribute('onclick', 'document.title = 1')",
            "document.head.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))",
        ):
            assert tab.run(f"(() => {{ try {{ {attempt}; return ''; }} catch (e) {{ return e.name; }} }})()"), attempt
        assert tab.run("fetch('http://localhost:1/').then(() => '', error => error.name)") == "TypeError"
        assert tab.run("document.title") == f"run: {STEPS}/8"
        assert any("connect-src" in complaint for complaint in tab.complaints)
    tab.complaints.clear()
