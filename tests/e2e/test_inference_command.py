"""The command `inference`, as a person would use it: the shipped model behind OpenAI's own client.

A long test: its engine runs in test_inference.py, its service in test_run.py, and OpenAI's client reads all
kinds of answers in the unit tests of the service.
"""

import re
import signal
from collections.abc import Iterator

import httpx
import openai
import pytest
from run_support import Running, key_in, wait_until_disconnected

from trireme.core.errors import EXIT_INTERRUPTED

MODULE = "trireme.cli.inference"
PROMPT = "Sort: 361695\n"


@pytest.fixture(scope="module")
def command() -> Iterator[tuple[str, str]]:
    """The address of the service and a client's key."""
    running = Running.start(
        "assets/sort-base",
        "--service.port",
        "0",
        "--cluster.device",
        "cpu",
        "--renderer.name",
        "role_colon",
        module=MODULE,
    )
    output = ""
    for line in running.lines():
        output += line
        if "all replicas serve" in line:
            break
    url = re.search(r"the service answers at (http\S+)", output)
    key = key_in(output)
    assert url, output
    assert key, output
    yield url[1], key
    running.process.send_signal(signal.SIGINT)
    rest = "".join(running.lines())
    assert running.process.wait(60) == EXIT_INTERRUPTED, rest
    assert "nothing is left running" in rest
    assert wait_until_disconnected(running.mark, 20.0) == []
    assert running.files_left() == set()
    assert running.shm_left() == set()


@pytest.mark.long
def test_the_shipped_model_answers(command: tuple[str, str]) -> None:
    url, key = command
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        raw = client.completions.with_raw_response.create(
            model="policy",
            prompt=PROMPT,
            temperature=0,
            max_tokens=10,
            stop="\n",
            extra_body={"return_token_ids": True},
        )
        (choice,) = raw.parse().choices
        assert sorted(choice.text) == list(choice.text), "it sorts, though not always the right digits"
        assert (len(choice.text), choice.finish_reason) == (6, "stop")
        assert raw.headers["x-trireme-version"] == "0"
        ids = choice.prompt_token_ids  # type: ignore[attr-defined]
        pieces = client.completions.create(model="policy", prompt=ids, temperature=0, max_tokens=10, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces).startswith(choice.text)
        several = client.completions.create(model="policy", prompt=[PROMPT, PROMPT], n=3, seed=1, max_tokens=10)
        assert len(several.choices) == 6
        assert [c.text for c in several.choices[:3]] == [c.text for c in several.choices[3:]], "the same seeds"
        completion = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Sort: 31"}], max_tokens=8, logprobs=True
        )
        assert completion.usage is not None
        assert completion.choices[0].logprobs is not None
        assert len(completion.choices[0].logprobs.content or []) == completion.usage.completion_tokens
        with pytest.raises(openai.NotFoundError, match="there is policy"):
            client.models.retrieve("step-000020")
    assert "trireme_service_places 256.0" in httpx.get(f"{url}/metrics").text
