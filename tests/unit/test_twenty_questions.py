"""Twenty questions: the game, and answerers that answer, are down, refuse, or are the model itself."""

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from twenty_questions import StartAnswerer, TwentyQuestions, TwentyQuestionsEnv, UrlAnswerer, yes_or_no

from orchestrator import workers
from orchestrator.env import EnvContext, load_dataset
from orchestrator.envs.http import EnvServer, EnvServerDown, EnvServerRefused
from orchestrator.message_env import MessageStep
from trireme.config.schema import EnvConfig
from trireme.core.errors import BadInput
from trireme.renderers import Message

ASSET = Path(__file__).parents[2] / "assets" / "sort-base"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(ASSET)


def dataset(tokenizer: Any, split: Any = "train", seed: int = 0, **args: Any) -> TwentyQuestions:
    context = EnvContext(tokenizer, seed, 2, split, model=str(ASSET))
    return load_dataset(EnvConfig(id="twenty_questions:TwentyQuestions", args=args), context)  # type: ignore[return-value]


def secrets(of: TwentyQuestions, batches: int) -> list[str]:
    return [builder.make().secret for i in range(batches) for builder in of.get_batch(i)]  # type: ignore[attr-defined]


class Knowing:
    """Answers from a list, and notes what it was told."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.conversations = list(answers), list[list[Message]]()

    async def answer(self, messages: list[Message]) -> str:
        self.conversations.append(messages)
        return self.answers.pop(0)


def play(env: TwentyQuestionsEnv, *questions: str) -> list[MessageStep]:
    async def main() -> list[MessageStep]:
        return [await env.step({"role": "assistant", "content": question}) for question in questions]

    return asyncio.run(main())


def test_a_game() -> None:
    answerer = Knowing("Yes.", "no, it does not", "Maybe")
    env = TwentyQuestionsEnv("dog", 20, answerer)
    *earlier, last = play(env, "Is it alive?", "Does it fly?", "Is it big?", "x" * 200, "Is it a DOG?")
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


def test_a_game_ends_after_the_last_question() -> None:
    answerer = Knowing("no")
    first, last = play(TwentyQuestionsEnv("dog", 2, answerer), "Is it a cat?", "Is it a cow?")
    assert (first.episode_done, last.episode_done, last.reward) == (False, True, 0.0)
    assert len(answerer.conversations) == 1, "the last question needs no answer"


@pytest.mark.parametrize(
    ("question", "right"), [("Is it a dog?", True), ("dogs?", True), ("Is it a dogma?", False), ("hotdog", False)]
)
def test_a_secret_is_named_as_a_word(question: str, right: bool) -> None:
    (step,) = play(TwentyQuestionsEnv("dog", 1, Knowing("no")), question)
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


@contextmanager
def server(replies: Sequence[tuple[int, str]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that gives these statuses and texts, one after the other; its URL, and what it was
    asked."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **json.loads(body)})
            status, text = replies[len(requests) - 1]
            answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1", requests
    finally:
        running.shutdown()
        running.server_close()
        thread.join(10)


def at(url: str, key: str = "none") -> UrlAnswerer:
    return UrlAnswerer(EnvServer(url, 1.0, 1.0, key), "big")


def ask(answerer: UrlAnswerer | StartAnswerer, times: int = 1) -> list[str]:
    async def main() -> list[str]:
        return [await answerer.answer([{"role": "user", "content": "Is it alive?"}]) for _ in range(times)]

    return asyncio.run(main())


def test_a_server_is_asked_greedily() -> None:
    with server([(200, "Yes"), (200, "No")]) as (url, requests):
        answerer = pickle.loads(pickle.dumps(at(url, "secret-key")))
        assert ask(answerer, times=2) == ["Yes", "No"]
    assert requests[0]["path"] == "/v1/chat/completions"
    assert (requests[0]["model"], requests[0]["temperature"], requests[0]["key"]) == ("big", 0.0, "Bearer secret-key")
    assert requests[0]["messages"] == [{"role": "user", "content": "Is it alive?"}]


def test_a_used_answerer_can_be_pickled() -> None:
    with server([(200, "Yes")]) as (url, _):
        answerer = at(url)
        ask(answerer)
        assert pickle.loads(pickle.dumps(answerer)) == answerer


def test_a_server_that_is_busy_is_asked_again() -> None:
    with server([(429, ""), (200, "yes")]) as (url, requests):
        assert ask(at(url)) == ["yes"]
    assert len(requests) == 2


def test_a_server_that_stays_down_is_named_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twenty_questions.REPLY_S", 0.2)
    with server([]) as (url, _):
        pass
    with pytest.raises(EnvServerDown, match=rf"POST {url}/chat/completions was not answered within 0.2 s"):
        ask(at(url))


def test_a_server_that_refuses_is_not_asked_again() -> None:
    with server([(404, "no such model")]) as (url, requests):
        with pytest.raises(EnvServerRefused, match="refused with status 404"):
            ask(at(url))
        assert len(requests) == 1


def test_the_model_that_the_run_starts_from_answers_the_same_whenever_it_is_asked() -> None:
    async def main() -> list[str]:
        async with workers.workers(1):
            answerer = StartAnswerer(str(ASSET.parent / "guess-base"))  # which says something to this
            return [await answerer.answer([{"role": "user", "content": "312"}]) for _ in range(2)]

    first, second = asyncio.run(main())
    assert first == second != ""
