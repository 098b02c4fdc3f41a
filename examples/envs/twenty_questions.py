"""Twenty questions: the policy finds a secret word by questions, which another model answers with yes or no.

PYTHONPATH=examples/envs uv run rl --env.id twenty_questions:TwentyQuestions --model.name Qwen/Qwen3-0.6B ...

user       I am thinking of something. ..
assistant  Is it alive?
user       yes                             the answer of the other model, which knows the secret
assistant  Is it a dog?                    names the secret: reward 1

The answerer does not learn: it is a model behind a URL, or the one that the run started from. It answers greedily, so
the same question gets the same answer, if the server is deterministic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from orchestrator.env import EnvGroupBuilder
from orchestrator.envs.http import EnvServer
from orchestrator.envs.text import GeneratedDataset, is_held_out
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from orchestrator.workers import run_in_worker
from trireme.renderers import Message

START = "start"
REPLY_S = 60.0
"""Limit in seconds for an answer of a server, with all tries."""
START_S = 600.0
"""Limit in seconds for an answer of the model that the run starts from. The first answer includes loading the
model."""
MAX_TOKENS = 16
LONGEST = 120
"""The most characters of a question; a longer question could name all words."""
RULES = (
    "I am thinking of something. Find out what it is by questions that I can answer with yes or no, one at a time. "
    "You have {} questions. When you know it, ask: Is it a ..?"
)
TOO_LONG = "That is too long. Ask one short question."
TO_ANSWERER = (
    "You are playing twenty questions and thinking of: {}. You are asked about it. Answer with one word, yes or no."
)
WORDS = """
dog cat horse cow elephant lion whale shark eagle penguin snake frog bee spider butterfly ant tree rose grass
apple banana potato bread cheese egg salt sugar coffee tea water milk ice snow rain cloud moon sun star mountain
river island desert beach stone gold diamond house door window bed chair table lamp clock book pencil paper
phone radio camera computer car bicycle train boat airplane bridge road hammer knife spoon cup bottle key coin
ring hat shoe glove shirt umbrella guitar piano drum ball doll kite balloon candle mirror soap brush ladder rope
needle
"""


def yes_or_no(text: str) -> str:
    """Returns "yes" or "no" if this is the first word of the answer `text`, in upper or lower case. Otherwise returns
    "I can not say." as the reply to the policy."""
    first = re.search(r"[a-z]+", text.casefold())
    if first and first[0] in ("yes", "no"):
        return first[0]
    return "I can not say."


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


@dataclass
class TwentyQuestionsEnv(MessageEnv):
    """One game, in which the policy has `max_questions` questions to name the word `secret`. `answerer` answers the
    questions."""

    secret: str
    max_questions: int
    answerer: Answerer
    _questions: int = field(default=0, init=False)

    async def initial_messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": RULES.format(self.max_questions)}]

    async def step(self, message: Message) -> MessageStep:
        question = message["content"]
        self._questions += 1
        named = re.search(rf"\b{re.escape(self.secret)}(s|es)?\b", question.casefold())
        correct = len(question) <= LONGEST and named is not None
        if correct or self._questions == self.max_questions:
            logs = {"secret": self.secret, "question": question}
            return MessageStep(float(correct), True, metrics={"success": float(correct)}, logs=logs)
        if len(question) > LONGEST:
            reply = TOO_LONG
        else:
            reply = await self._ask(question)
        return MessageStep(
            0.0, False, [{"role": "user", "content": reply}], logs={"question": question, "answer": reply}
        )

    def known_answer(self) -> str:
        return f"Is it a {self.secret}?"

    def state_dict(self) -> Mapping[str, object]:
        return {"asked": self._questions}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._questions = state["asked"]

    async def _ask(self, question: str) -> str:
        messages: list[Message] = [
            {"role": "system", "content": TO_ANSWERER.format(self.secret)},
            {"role": "user", "content": question},
        ]
        return yes_or_no(await self.answerer.answer(messages))


@dataclass(kw_only=True)
class TwentyQuestions(GeneratedDataset):
    """`num_batches` batches of `batch_size` games. An eighth of the words is for evaluations only.

    `answerer` is `start`, for the model that the run starts from (it must be small, because it runs on CPUs), or the
    URL of a server with OpenAI's chat completions. For a server, `answerer_model` is the name of its model, and
    `answerer_key_variable` the name of the environment variable with its key, if it needs one. Raises ValueError for
    other answerers, and for sizes below 1.
    """

    name = "twenty"

    answerer: str = START
    answerer_model: str | None = None
    answerer_key_variable: str | None = None
    max_questions: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answerer: Answerer
        if self.answerer == START and self.context.model is not None:
            self._answerer = StartAnswerer(self.context.model)
        elif self.answerer.startswith(("http://", "https://")) and self.answerer_model:
            key = os.environ.get(self.answerer_key_variable or "", "none")
            server = EnvServer(self.answerer.rstrip("/"), REPLY_S, REPLY_S, key)
            self._answerer = UrlAnswerer(server, self.answerer_model)
        else:
            raise ValueError(
                f"answerer = {self.answerer!r}, answerer_model = {self.answerer_model!r}; expected answerer = 'start', "
                "or a server's URL (http://host:8000/v1) as answerer and the name of its model as answerer_model"
            )
        self._words = [word for word in WORDS.split() if is_held_out(word) == (self.context.split == "eval")]

    def builders(self, numbers: Sequence[int]) -> list[EnvGroupBuilder]:
        secrets = [self.rng(number).choice(self._words) for number in numbers]
        games = [partial(TwentyQuestionsEnv, secret, self.max_questions, self._answerer) for secret in secrets]
        return [MessageEnvGroup(game, self.context.renderer, self.context.group_size) for game in games]
