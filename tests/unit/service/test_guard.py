"""The rate of a key, and bodies in chunks. (test_app.py tests the guard before real routes.)"""

import asyncio
import json
from typing import Any

import pytest

from service.guard import UNANNOUNCED, Limits, Rates, RequestGuard
from service.keys import ServiceKey, ServiceKeys
from service.requests import RequestRefused

KEY = "tr-client-0123456789abcdef"
PARTS = 16


def test_a_bucket_is_filled_evenly() -> None:
    now = [0.0]
    rates = Rates(6, lambda: now[0])
    for _ in range(6):
        rates.take("a")
    with pytest.raises(RequestRefused) as refused:
        rates.take("a")
    assert refused.value.retry_after_s == pytest.approx(10)
    rates.take("b")
    now[0] = 10.5
    rates.take("a")
    with pytest.raises(RequestRefused):
        rates.take("a")
    now[0] = 1000.0
    for _ in range(6):
        rates.take("a")
    with pytest.raises(RequestRefused):
        rates.take("a")


def sent(size: int, *, says_so: bool) -> tuple[int, str, int]:
    """The status of a request with a body of PARTS parts, what was said of it, and how many parts were read."""
    messages: list[Any] = []
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b" " * (size // PARTS), "more_body": read < PARTS}

    async def send(message: Any) -> None:
        messages.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200 if len(body) == size else 500})

    length = [(b"content-length", str(size).encode())] if says_so else [(b"transfer-encoding", b"chunked")]
    headers = [(b"authorization", f"Bearer {KEY}".encode()), *length]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    guard = RequestGuard(app, ServiceKeys([ServiceKey("client", KEY)]), Limits(4 * UNANNOUNCED, 5.0, None), None)
    asyncio.run(guard(scope, receive, send))
    error = json.loads(messages[1]["body"])["error"]["message"] if len(messages) > 1 else ""
    return messages[0]["status"], error, read


def test_a_body_that_does_not_say_its_length_may_be_small_alone() -> None:
    assert sent(UNANNOUNCED, says_so=False) == (200, "", PARTS)
    assert sent(4 * UNANNOUNCED, says_so=True) == (200, "", PARTS)
    status, error, read = sent(2 * UNANNOUNCED, says_so=False)
    assert (status, read) == (413, PARTS // 2 + 1), "it is refused while it comes"
    assert "1,000,000 bytes in chunks; say its length first (Content-Length)" in error
    assert sent(5 * UNANNOUNCED, says_so=True)[::2] == (413, 0)
