"""Twenty questions: the game, and answerers that answer, are down, refuse, or are the model itself."""

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from web_support import serving

from orchestrator import workers
from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.answerers import StartAnswerer, UrlAnswerer
from orchestrator.envs.http import EnvServer, EnvServerDown, EnvServerRefused
from orchestrator.envs.twenty_questions import TwentyQuestionsDataset, TwentyQuestionsEnv, yes_or_no
from orchestrator.message_env import MessageStep
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput
from trireme.renderers import Message

ASSET = Path(__file__).parents[4] / "assets" / "sort-base"


def dataset(tokenizer: Any, split: Any = "train", seed: int = 0, **args: Any) -> TwentyQuestionsDataset:
    context = EnvContext(tokenizer, seed, 2, split, model=str(ASSET))
    return load_dataset(EnvConfig(id="twenty_questions", args=args), context)  # type: ignore[return-value]


def secrets(of: TwentyQuestionsDataset, batches: int) -> list[str]:
    return [builder.make().secret for i in range(batches) for builder in of.get_batch(i)]  # type: ignore[attr-defined]


class Knowing:
    """Answers from a list, and notes what it was told."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.conversations = list(answers), list[list[Message]]()

    async def answer(self, messages: list[Message]) -> str:
        self.conversations.append(messages)
        return self.answers.pop(0)


async def play(env: TwentyQuestionsEnv, *questions: str) -> list[MessageStep]:
    return [await env.step({"role": "assistant", "content": question}) for question in questions]


async def test_a_game() -> None:
    answerer = Knowing("Yes.", "no, it does not", "Maybe")
    env = TwentyQuestionsEnv("dog", 20, answerer)
    *earlier, last = await play(env, "Is it alive?", "Does it fly?", "Is it big?", "x" * 200, "Is it a DOG?")
    assert [message["content"] for step in earlier for message in step.next_messages] == [
        "yes",
        "no",
        "I can not say.",
        "That is too long. Ask one short question.",
    ]
    assert [step.episode_done for step in earlier] == [False] * 4
    assert (last.reward, last.episode_done, last.metrics) == (1.0, True, {"success": 1.0})
    assert "dog" in answerer.conversations[0][0]["content"]
    assert answerer.conversations[0][1]["content"] == "Is it alive?"


async def test_a_game_ends_after_the_last_question() -> None:
    answerer = Knowing("no")
    first, last = await play(TwentyQuestionsEnv("dog", 2, answerer), "Is it a cat?", "Is it a cow?")
    assert (first.episode_done, last.episode_done, last.reward) == (False, True, 0.0)
    assert len(answerer.conversations) == 1, "the last question needs no answer"


@pytest.mark.parametrize(
    ("question", "right"), [("Is it a dog?", True), ("dogs?", True), ("Is it a dogma?", False), ("hotdog", False)]
)
async def test_a_secret_is_named_as_a_word(question: str, right: bool) -> None:
    (step,) = await play(TwentyQuestionsEnv("dog", 1, Knowing("no")), question)
    assert (step.episode_done, step.reward) == (True, float(right))


@pytest.mark.parametrize(
    ("text", "heard"), [("Yes!", "yes"), ("  no", "no"), ("Nothing", "I can not say."), ("", "I can not say.")]
)
def test_what_an_answerer_says_is_yes_or_no(text: str, heard: str) -> None:
    assert yes_or_no(text) == heard


def test_secrets_follow_from_seed_split_and_place(tokenizer: Any) -> None:
    train = secrets(dataset(tokenizer), 4)
    assert train == secrets(dataset(tokenizer, batch_size=32), 2)
    assert train != secrets(dataset(tokenizer, seed=1), 4)
    assert not set(train) & set(secrets(dataset(tokenizer, "eval"), 4))


@pytest.mark.parametrize(
    "args", [{"answerer": "someone"}, {"answerer": "http://host:1/v1"}, {"max_questions": 0}, {"num_batches": 0}]
)
def test_bad_arguments_are_bad_input(tokenizer: Any, args: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"env\.args.*expected"):
        dataset(tokenizer, **args)


# ---- answerers


@asynccontextmanager
async def server(*replies: tuple[int, str]) -> AsyncIterator[tuple[str, list[Any]]]:
    """An OpenAI-compatible server that gives these statuses and texts, one after the other; its URL, and what it was
    asked."""
    requests: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append({"key": request.headers["Authorization"], **await request.json()})
        status, text = replies[len(requests) - 1]
        return web.json_response({"choices": [{"message": {"content": text}}]}, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app) as url:
        yield f"{url}/v1", requests


def at(url: str, key: str = "none") -> UrlAnswerer:
    return UrlAnswerer(EnvServer(url, 1.0, 1.0, key), "big")


QUESTION: Any = [{"role": "user", "content": "Is it alive?"}]


async def test_a_server_is_asked_greedily() -> None:
    async with server((200, "Yes"), (200, "No")) as (url, requests):
        answerer = pickle.loads(pickle.dumps(at(url, "secret-key")))
        assert [await answerer.answer(QUESTION) for _ in range(2)] == ["Yes", "No"]
        assert pickle.loads(pickle.dumps(answerer)) == answerer, "a used one can be pickled too"
    assert (requests[0]["model"], requests[0]["temperature"], requests[0]["key"]) == ("big", 0.0, "Bearer secret-key")
    assert requests[0]["messages"] == QUESTION


async def test_a_server_that_is_busy_is_asked_again() -> None:
    async with server((429, ""), (200, "yes")) as (url, requests):
        assert await at(url).answer(QUESTION) == "yes"
    assert len(requests) == 2


async def test_a_server_that_stays_down_is_named_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.envs.answerers.REPLY_S", 0.2)
    async with server() as (url, _):
        pass
    with pytest.raises(EnvServerDown, match=rf"POST {url}/chat/completions was not answered within 0.2 s"):
        await at(url).answer(QUESTION)


async def test_a_server_that_refuses_is_not_asked_again() -> None:
    async with server((404, "no such model")) as (url, requests):
        with pytest.raises(EnvServerRefused, match="refused with status 404"):
            await at(url).answer(QUESTION)
        assert len(requests) == 1


async def test_the_model_that_the_run_starts_from_answers_the_same_whenever_it_is_asked() -> None:
    async with workers.workers(1):
        answerer = StartAnswerer(str(ASSET.parent / "guess-base"))  # which says something to this
        first, second = [await answerer.answer([{"role": "user", "content": "312"}]) for _ in range(2)]
    assert first == second != ""
