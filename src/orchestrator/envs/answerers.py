"""Models that answer questions in an environment: one behind a URL, or the one that the run started from.

Neither learns. They answer greedily, so that the same question has the same answer, if the server is deterministic.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.workers import run_in_worker
from trireme.core.extras import require
from trireme.renderers import Message

if TYPE_CHECKING:
    import httpx

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each further try of an answerer that is down."""
REPLY_S = 60.0
START_S = 600.0
"""Limit for an answer of the start model; the first one loads it."""
MAX_TOKENS = 16
BUSY = 429


class AnswererDown(Exception):
    """The answerer could not be reached after all tries, or it refuses the question."""


@dataclass(frozen=True)
class UrlAnswerer:
    """A server that speaks OpenAI's chat completions."""

    url: str
    """Its base, such as http://host:8000/v1."""
    model: str
    key: str = "none"
    pauses_s: tuple[float, ...] = PAUSES_S

    def __post_init__(self) -> None:
        require("httpx", extra="answerers", what_for=f"an answerer at {self.url}")

    async def answer(self, messages: list[Message]) -> str:
        """Returns the server's next message after `messages`, at most a few words. Asks again while the server is busy
        or cannot be reached. Raises AnswererDown after the last try, or if the server refuses."""
        body = {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS, "seed": 0}
        import httpx

        for pause_s in (*self.pauses_s, None):
            try:
                reply = await self._client.post("/chat/completions", json=body)
                if not reply.is_error:
                    return str(reply.json()["choices"][0]["message"]["content"] or "")
                failure = f"status {reply.status_code}"
                if reply.status_code != BUSY and reply.status_code < 500:
                    raise AnswererDown(f"the answerer at {self.url} refuses with {failure}: {reply.text[:300]}")
            except httpx.TransportError as error:
                failure = str(error)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        raise AnswererDown(f"the answerer at {self.url}: {failure} ({len(self.pauses_s) + 1} tries); is it up?")

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=REPLY_S)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_client"}  # it belongs to this process


@dataclass(frozen=True)
class StartAnswerer:
    """The frozen weights that the run starts from, in a worker process on CPUs: for small models. For larger ones start
    a server (`vllm serve MODEL`) and give its URL."""

    model: str

    async def answer(self, messages: list[Message]) -> str:
        """Returns the model's next message after `messages`, at most a few words."""
        return await run_in_worker(complete, self.model, messages, timeout_s=START_S)


def complete(model: str, messages: list[Message]) -> str:
    """Returns the model's greedy next message; runs in a worker process, which keeps the model."""
    import torch

    renderer, network = _loaded(model)
    prompt = torch.tensor([renderer.generation_prompt(messages)])
    with torch.no_grad():
        tokens = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=list(renderer.stop_tokens()),
            pad_token_id=renderer.stop_tokens()[0],
        )
    message, _ = renderer.parse_response(tokens[0, prompt.shape[1] :].tolist())
    return message["content"]


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trireme.core.tokenizer import load_tokenizer
    from trireme.renderers import make_renderer

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    options = {"attn_implementation": "sdpa"}  # else, and without `config`, its JSON could name code to fetch
    loaded = AutoModelForCausalLM.from_pretrained(model, config=config, **options, trust_remote_code=False)
    return make_renderer("auto", load_tokenizer(model)), loaded.eval()


Answerer = UrlAnswerer | StartAnswerer
