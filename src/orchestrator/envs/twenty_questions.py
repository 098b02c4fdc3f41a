"""Twenty questions: the policy finds out what another model thinks of, by questions that are answered yes or no.

user       I am thinking of something. ..
assistant  Is it alive?
user       yes                             the answerer, which knows the secret, was asked
assistant  Is it a dog?                    names the secret: reward 1
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from orchestrator.env import EnvContext, EnvGroupBuilder, RLDataset
from orchestrator.envs.answerers import Answerer, StartAnswerer, UrlAnswerer
from orchestrator.envs.text import is_held_out
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from trireme.renderers import Message

START = "start"
LONGEST = 120
"""Characters of a question; a longer one could name all there is."""
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


def names(question: str, secret: str) -> bool:
    """Whether a question names the secret, in one of its forms."""
    return re.search(rf"\b{re.escape(secret)}(s|es)?\b", question.casefold()) is not None


def yes_or_no(text: str) -> str:
    """What an answerer said, as far as it can be understood."""
    first = re.search(r"[a-z]+", text.casefold())
    return first[0] if first and first[0] in ("yes", "no") else "I can not say."


@dataclass
class TwentyQuestionsEnv(MessageEnv):
    """One game."""

    secret: str
    max_questions: int
    answerer: Answerer
    _asked: int = field(default=0, init=False)

    async def initial_messages(self) -> Sequence[Message]:
        return [{"role": "user", "content": RULES.format(self.max_questions)}]

    async def step(self, message: Message) -> MessageStep:
        question = message["content"]
        self._asked += 1
        found = len(question) <= LONGEST and names(question, self.secret)
        if found or self._asked == self.max_questions:
            logs = {"secret": self.secret, "question": question}
            return MessageStep(float(found), True, metrics={"success": float(found)}, logs=logs)
        said = TOO_LONG if len(question) > LONGEST else await self._ask(question)
        return MessageStep(0.0, False, [{"role": "user", "content": said}], logs={"question": question, "answer": said})

    async def _ask(self, question: str) -> str:
        told: list[Message] = [
            {"role": "system", "content": TO_ANSWERER.format(self.secret)},
            {"role": "user", "content": question},
        ]
        return yes_or_no(await self.answerer.answer(told))


class TwentyQuestionsDataset(RLDataset):
    """`num_batches` batches of `batch_size` games. An eighth of the words is for evaluations only.

    `answerer`: `start`, the model that the run starts from (small ones: it computes on CPUs), or the URL of a server
    that speaks OpenAI's chat completions, which is asked for `answerer_model`, with the key in the environment variable
    `answerer_key_variable` if that is given. Raises ValueError for anything else, and for sizes below 1.
    """

    def __init__(
        self,
        context: EnvContext,
        *,
        answerer: str = START,
        answerer_model: str | None = None,
        answerer_key_variable: str | None = None,
        max_questions: int = 20,
        batch_size: int = 16,
        num_batches: int = 1000,
    ) -> None:
        if min(max_questions, batch_size, num_batches) < 1:
            raise ValueError(
                f"max_questions = {max_questions}, batch_size = {batch_size}, num_batches = {num_batches}; expected at "
                "least 1 of each"
            )
        self._context, self._batch_size, self._num_batches = context, batch_size, num_batches
        key = os.environ.get(answerer_key_variable, "none") if answerer_key_variable else "none"
        self._make = partial(
            TwentyQuestionsEnv,
            max_questions=max_questions,
            answerer=make_answerer(answerer, answerer_model, key, context.model),
        )
        self._words = [word for word in WORDS.split() if is_held_out(word) == (context.split == "eval")]

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        context, first = self._context, index * self._batch_size
        rngs = (random.Random(f"twenty:{context.seed}:{context.split}:{first + i}") for i in range(self._batch_size))
        return [
            MessageEnvGroup(partial(self._make, rng.choice(self._words)), context.renderer, context.group_size)
            for rng in rngs
        ]

    def __len__(self) -> int:
        return self._num_batches


def make_answerer(answerer: str, model: str | None, key: str, start: str | None) -> Answerer:
    """Raises ValueError for an answerer that is neither `start` nor a URL, and for a URL without a model."""
    if answerer == START and start is not None:
        return StartAnswerer(start)
    if answerer.startswith(("http://", "https://")) and model:
        return UrlAnswerer(answerer.rstrip("/"), model, key)
    raise ValueError(
        f"answerer = {answerer!r}, answerer_model = {model!r}; expected 'start', or the URL of a server "
        "(http://host:8000/v1) and the name of the model that it is asked for"
    )
