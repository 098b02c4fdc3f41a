"""A service in front of a sampler that says what it is told, on a port of its own in the test's event loop."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from renderer_support import CALCULATOR, QWEN3, bpe
from session_support import LIMITS as SESSION_LIMITS

from service.answering import TurnAnswering
from service.app import make_app
from service.console.run_reader import RunReader
from service.gateway import Gateway
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.places import Places
from service.ports import http_server
from service.requests import ServedModels
from service.sessions.records import FORMAT
from service.sessions.registry import SessionRegistry
from service.store import Store
from trireme.core.sampler import OnProgress
from trireme.core.stop_strings import cut
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.renderers import make_renderer

CLIENT, ADMIN = "tr-client-0123456789abcdef", "tr-admin-0123456789abcdef"
KEYS = ServiceKeys([ServiceKey("client", CLIENT), ServiceKey("admin", ADMIN)])
VERSION = 20
LIMITS = Limits(body_bytes=2**20, body_s=5.0, per_minute=None)
MAX_LEN = 2000
TOOL: Any = {"type": "function", "function": dict(CALCULATOR)}
CALLS = 'I look.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
"""An answer that calls it."""


class ScriptedSampler:
    """Says its texts, one after the other, a few tokens at a time. A text that is an exception is raised after half of
    the one before it; one that ends with `...` is cut off."""

    def __init__(self, *texts: str | Exception, tokenizer: Any) -> None:
        self.texts, self.tokenizer = list(texts), tokenizer
        self.requests: list[SampleRequest] = []
        self.cancelled = 0
        self.version = VERSION
        self.hold: asyncio.Event | None = None
        """Nothing is answered before it is set."""
        self.hold_within: asyncio.Event | None = None
        """An answer stops after its first tokens until it is set."""

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        try:
            return await self._say(request, text, on_progress)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _say(self, request: SampleRequest, text: str | Exception, on_progress: Any) -> SampledSequence:
        if self.hold:
            await self.hold.wait()
        if isinstance(text, Exception):
            raise text
        tokens = self.tokenizer.encode(text.removesuffix("..."), add_special_tokens=False)
        if not text.endswith("..."):
            tokens.append(next(iter(request.params.stop_token_ids), self.tokenizer.eos_token_id))
        limit = request.params.max_tokens or len(tokens)
        reason: Any = "length" if text.endswith("...") or limit < len(tokens) else "stop"
        whole = cut(
            sequence_of(tokens[:limit], reason, self.version), request.params.stop_strings, self.tokenizer.decode
        )
        for end in range(3, len(whole.tokens), 3):
            if on_progress:
                on_progress(beginning(whole, end))
            await asyncio.sleep(0)
            if self.hold_within:
                await self.hold_within.wait()
        return whole


def sequence_of(tokens: Sequence[int], reason: Any, version: int) -> SampledSequence:
    """The second half of a sequence, if it has one, comes from the next version."""
    half = max(len(tokens) // 2, 1)
    spans = [VersionSpan(WeightIdentity(1, version, "d0"), 0, half)]
    if len(tokens) > half:
        spans.append(VersionSpan(WeightIdentity(1, version + 1, "d1"), half, len(tokens)))
    logprobs = -np.arange(len(tokens), dtype=np.float32) / 8
    return SampledSequence(np.array(tokens, np.int32), logprobs, reason, tuple(spans))


def beginning(whole: SampledSequence, end: int) -> SampledSequence:
    """The first tokens of a sequence, as a replica has them before it is whole."""
    spans = tuple(replace(span, end=min(span.end, end)) for span in whole.spans if span.start < end)
    return SampledSequence(whole.tokens[:end], whole.logprobs[:end], "length", spans)


@dataclass
class Served:
    url: str
    sampler: ScriptedSampler
    gateway: Gateway
    client: httpx.AsyncClient
    renderer: Any
    app: Any = field(repr=False)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)


def front_of(turns: TurnAnswering, directory: Path, max_steps_off_policy: int | None = None, limit: int = 8) -> Gateway:
    sampling, store = SamplingParams(max_tokens=500), Store(directory, FORMAT)
    registry = SessionRegistry(turns, store, SESSION_LIMITS, sampling, time.time, max_steps_off_policy)
    registry.restore()

    async def floor() -> WeightIdentity:
        return WeightIdentity(1, VERSION, "d0")

    return Gateway(turns, registry, KEYS, floor, limit)


@asynccontextmanager
async def served(
    *texts: str | Exception,
    places: Places | None = None,
    limits: Limits = LIMITS,
    sessions: Path | None = None,
    run: RunReader | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serves a Qwen3-like model that says `texts`. `sessions`: the directory of the store of sessions; None: another
    one each time. `options`: those of `front_of`."""
    tokenizer = bpe(QWEN3)
    sampler = ScriptedSampler(*texts, tokenizer=tokenizer)
    renderer = make_renderer("auto", tokenizer)
    models = ServedModels(("policy", "step-000020"), MAX_LEN, len(tokenizer))
    turns = TurnAnswering(sampler.sample, models, tokenizer, renderer, places or Places(64, 64, 30.0))
    with tempfile.TemporaryDirectory() as directory:
        gateway = front_of(turns, sessions or Path(directory), **options)
        async with _running(make_app(gateway, KEYS, limits, run), sampler, gateway) as running:
            yield running


@asynccontextmanager
async def _running(app: Any, sampler: ScriptedSampler, gateway: Gateway) -> AsyncIterator[Served]:
    server = http_server(app, "127.0.0.1", 0)
    await server.open()
    url = server.address_at("127.0.0.1")
    headers = {"Authorization": f"Bearer {CLIENT}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        yield Served(url, sampler, gateway, client, gateway.turns.renderer, app)
    await server.close()
    await gateway.close("the test has ended")
