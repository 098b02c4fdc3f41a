"""Models that answer questions in an environment: one behind a URL, or the one that the run started from.

Neither of them learns. Both answer greedily, so the same question gets the same answer, if the server is
deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from orchestrator.envs.http import EnvServer
from orchestrator.workers import run_in_worker
from trireme.renderers import Message

REPLY_S = 60.0
"""Limit in seconds for an answer of a server, with all tries."""
START_S = 600.0
"""Limit in seconds for an answer of the model that the run starts from. The first answer includes loading the
model."""
MAX_TOKENS = 16


@dataclass(frozen=True)
class UrlAnswerer:
    """Lets a model answer the policy's questions in an environment. The model is behind a server that has OpenAI's chat
    completions API. `server.url`: the base URL of the API, such as http://host:8000/v1."""

    server: EnvServer
    model: str

    async def answer(self, messages: list[Message]) -> str:
        """Returns the server's next message after `messages`, at most a few words. Asks again while the server is busy
        or cannot be reached. Raises the errors of `EnvServer.ask`."""
        body = {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": MAX_TOKENS, "seed": 0}
        async with self.server.connect() as client:
            reply = await self.server.ask(client, "POST", "chat/completions", body, REPLY_S)
        return str(reply["choices"][0]["message"]["content"] or "")


@dataclass(frozen=True)
class StartAnswerer:
    """Lets the model that the run starts from answer the policy's questions in an environment. Its weights stay frozen.
    The model runs in a worker process on CPUs, so it must be small. For a larger model, start a server
    (`vllm serve MODEL`) and give its URL."""

    model: str

    async def answer(self, messages: list[Message]) -> str:
        """Returns the model's next message after `messages`, at most a few words."""
        return await run_in_worker(complete, self.model, messages, timeout_s=START_S)


def complete(model: str, messages: list[Message]) -> str:
    """Returns the text of the model's next message after `messages`, decoded greedily. Runs in a worker process, which
    holds the model for later calls."""
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
