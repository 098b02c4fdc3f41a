"""The service in a process of its own, in front of a sampler with ready answers.

The app, its guard, its renderer and the store of its sessions come from `service.actor`; there are no replicas and no
Ray. `child` reports its CPU seconds on demand.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from fastapi import FastAPI
from turns import ANSWER, LONG

from service.answering import TurnAnswering
from service.app import make_app
from service.gateway import Gateway
from service.guard import Limits
from service.keys import ServiceKey, ServiceKeys
from service.places import Places
from service.ports import http_server
from service.requests import ServedModels
from service.sessions.records import FORMAT
from service.sessions.registry import SessionRegistry
from service.sessions.session import SessionLimits
from service.store import Store
from trireme.core.sampler import OnProgress
from trireme.core.tokenizer import one_text_at_a_time
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, VersionSpan, WeightIdentity
from trireme.process.collector import spare_collector
from trireme.renderers import make_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CLIENT = "tr-client-0123456789abcdef"
ADMIN = "tr-admin-0123456789abcdef"
LIMITS = Limits(16 * 10**6, 30.0, None)
WORDS = 3000
PLACES = 512
START_S = 60.0
DISTINCT = 16
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def words() -> list[str]:
    """Returns words; most of them are one token, with the space before them."""
    rng = random.Random(0)
    return sorted({"".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 6))) for _ in range(WORDS)})


def text_of(rng: random.Random, tokens: int) -> str:
    """Returns about as many tokens of text."""
    return " ".join(rng.choices(words_there(), k=tokens))


_words: list[str] = []


def words_there() -> list[str]:
    """Returns `words()`, made once."""
    if not _words:
        _words.extend(words())
    return _words


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with merges, and with Qwen's format of chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([" ".join(["", *words_there()])] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class ReadySampler:
    """Has answers of ANSWER tokens ready. A stream gets its first token and then the whole. `seconds`: the time that an
    answer takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._served = 0
        rng = random.Random(1)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._answers = []
        for _ in range(DISTINCT):
            answer = tokenizer.encode(" " + text_of(rng, ANSWER), add_special_tokens=False)
            tokens = [*answer[: ANSWER - 1], end]
            spans = (VersionSpan(WeightIdentity(1, 1, "d"), 0, ANSWER),)
            logprobs = np.full(ANSWER, -1.25, np.float32)
            self._answers.append(SampledSequence(np.asarray(tokens, np.int32), logprobs, "stop", spans))

    async def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampledSequence:
        """Samples one sequence."""
        self._served += 1
        whole = self._answers[self._served % DISTINCT]
        if on_progress:
            span = replace(whole.spans[0], end=1)
            on_progress(SampledSequence(whole.tokens[:1], whole.logprobs[:1], "length", (span,)))
        if self._seconds or on_progress:
            await asyncio.sleep(self._seconds)
        return whole


def make_service(directory: Path, seconds: float) -> FastAPI:
    """Returns the app of the service."""
    tokenizer = make_tokenizer()
    renderer = make_renderer("qwen3", tokenizer)
    sampler = ReadySampler(tokenizer, seconds)
    models = ServedModels(("policy",), 2 * LONG.context, len(tokenizer))
    turns = TurnAnswering(sampler.sample, models, tokenizer, renderer, Places(PLACES, PLACES, 300.0))
    keys = ServiceKeys([ServiceKey("client", CLIENT), ServiceKey("admin", ADMIN)])
    sampling = SamplingParams(max_tokens=ANSWER)
    limits = SessionLimits(1000, 10**6, 7200.0, 900.0, 3600.0)
    registry = SessionRegistry(turns, Store(directory, FORMAT), limits, sampling, time.time)

    async def floor() -> WeightIdentity:
        return WeightIdentity(1, 1, "d")

    registry.restore()
    return make_app(Gateway(turns, registry, keys, floor, 10**6), keys, LIMITS)


async def _serve(app: FastAPI, port: Callable[[int], None]) -> None:
    server = http_server(app, "127.0.0.1", 0, 3600)
    await server.open()
    port(server.port)
    await server.serving


def _child(pipe: Connection, core: int | None, seconds: float) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})

    def tell() -> None:
        while pipe.poll(None):
            try:
                pipe.recv()
            except EOFError:
                os._exit(0)
            pipe.send(time.process_time())

    def ready(port: int) -> None:
        pipe.send(port)
        threading.Thread(target=tell, daemon=True).start()

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        app = make_service(Path(directory), seconds)
        spare_collector()  # as in the actor
        one_text_at_a_time()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that Ray gives its actors
            runner.run(_serve(app, ready))


@dataclass(frozen=True)
class Child:
    """A server that runs."""

    port: int
    pid: int
    _pipe: Connection

    def cpu_s(self) -> float:
        """Returns the CPU seconds that it has used."""
        self._pipe.send(None)
        used: float = self._pipe.recv()
        return used


@contextmanager
def child(*, core: int | None = None, seconds: float = 0.0) -> Iterator[Child]:
    """Runs a server in a process of its own. `seconds`: the time that each answer takes."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=_child, args=(theirs, core, seconds), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the server did not start within {START_S:g} s")
        assert process.pid is not None
        yield Child(ours.recv(), process.pid, ours)
    finally:
        process.terminate()
        process.join(START_S)
