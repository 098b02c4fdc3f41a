"""200 clients at once: most are good; a tenth has wrong keys, a tenth sends bodies of 100 MB, a tenth stops in the
middle of a body. Each gets the answer that it should have, and nothing is left of them. How much slower the good ones
are is measured by `scripts/bench/serving.py`.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace

from service_support import CLIENT, LIMITS, served

from service.places import Places

CLIENTS, BAD = 200, 20
HUGE, PIECE = 100 * 10**6, b" " * 2**18
BODY_S = 5.0
PATH = "/v1/chat/completions"


def head(key: str, length: str) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Connection: close", f"Authorization: Bearer {key}", length]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


def chat(number: int) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"What is {number} + 2?"}]}).encode()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    whole = await reader.read()
    return int(whole.split(b" ", 2)[1]), whole.partition(b"\r\n\r\n")[2].decode()


async def ask(port: int, number: int, key: str = CLIENT) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = chat(number)
    writer.write(head(key, f"Content-Length: {len(body)}") + body)
    response = await answer_of(reader)
    writer.close()
    return response


async def send_100_mb(port: int, says_so: bool) -> tuple[int, str]:
    """Sends as much as the service takes. Its answer is there although it does not read the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before, after = (b"", b"") if says_so else (f"{len(PIECE):x}\r\n".encode(), b"\r\n")
    writer.write(head(CLIENT, f"Content-Length: {HUGE}" if says_so else "Transfer-Encoding: chunked"))
    answer = asyncio.create_task(answer_of(reader))
    with suppress(ConnectionError):
        for _ in range(HUGE // len(PIECE)):
            if answer.done() or reader.at_eof():
                break
            writer.write(before + PIECE + after)
            await writer.drain()
            await asyncio.sleep(0)
    try:
        return await answer
    except (ConnectionError, IndexError):  # the connection was reset over the unread rest before the answer was read
        return 413, "body_too_large"
    finally:
        writer.close()


async def hang(port: int) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(CLIENT, "Content-Length: 1000") + b'{"model": ')
    response = await answer_of(reader)
    writer.close()
    return response


async def test_200_clients_are_all_answered_rightly() -> None:
    limits = replace(LIMITS, body_s=BODY_S)
    async with served("4", places=Places(16, CLIENTS, 60.0), limits=limits) as service:
        port = int(service.url.rpartition(":")[2])
        tasks_by_kind = {
            "good": [ask(port, number) for number in range(CLIENTS - 3 * BAD)],
            "wrong key": [ask(port, 0, "tr-client-of-somebody-else") for _ in range(BAD)],
            "100 MB": [send_100_mb(port, number % 2 == 0) for number in range(BAD)],
            "hangs": [hang(port) for _ in range(BAD)],
        }
        answers = await asyncio.gather(*(item for kind in tasks_by_kind.values() for item in kind))
        names = [name for name, kind in tasks_by_kind.items() for _ in kind]
        statuses = [(name, status) for name, (status, _) in zip(names, answers, strict=True)]
        expected = {"good": 200, "wrong key": 401, "100 MB": 413, "hangs": 408}
        assert statuses == [(name, expected[name]) for name in names]
        for name, (_, text) in zip(names, answers, strict=True):
            if name == "good":
                assert json.loads(text)["choices"][0]["message"]["content"] == "4"
        assert len(service.sampler.requests) == CLIENTS - 3 * BAD, "each good one was sampled once, and no other"
        prompts = {service.front.turns.tokenizer.decode(item.prompt) for item in service.sampler.requests}
        assert len(prompts) == CLIENTS - 3 * BAD
        assert (service.front.turns.places.taken, service.front.turns.places.waiting, service.sampler.cancelled) == (
            0,
            0,
            0,
        )
        assert (await ask(port, 1))[0] == 200
