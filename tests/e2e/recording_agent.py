"""An agent that is a program and keeps its own record: of each answer that it got the token ids and the prompt's, in a
file of its session below TALK_RECORDS. It asks a sub-agent, takes two answers at once, and shortens its history. Needs
nothing but Python."""

import json
import os
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TRIES, PAUSE_S = 40, 0.25
BASE, KEY, MODEL = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "TRIREME_MODEL"))
NUMBER = random.SystemRandom().randrange(2**48)
"""Stands in the metrics of its rollout."""
RECORD = Path(os.environ["TALK_RECORDS"]) / f"{NUMBER}.jsonl"


def note(**event: object) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **event}) + "\n")


def ask(messages: list[dict[str, str]], n: int = 1) -> list[str]:
    """Returns the answers. Asks again, as OpenAI's client does, when the connection breaks or a replica is lost."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "n": n, "return_token_ids": True}
    for tried in range(TRIES):
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        headers["x-stainless-retry-count"] = str(tried)
        request = urllib.request.Request(f"{BASE}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                response = json.load(answer)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500:
                note(event="refused", status=error.code)
                raise
        except OSError:
            pass
        time.sleep(PAUSE_S)
    else:
        sys.exit("no answer")
    prompt = response.get("prompt_token_ids") or response["choices"][0]["prompt_token_ids"]
    for choice in response["choices"]:
        note(event="answer", prompt=prompt, tokens=choice["token_ids"])
    return [choice["message"]["content"] or "" for choice in response["choices"]]


def main() -> None:
    """Plays one rollout."""
    problem, texts = json.load(sys.stdin), ""
    note(event="begin")
    messages = [{"role": "user", "content": f"{problem}"}]
    for turn in range(3):
        if turn == 1:
            texts += "".join(ask([{"role": "user", "content": "7"}]))  # a sub-agent
        answers = ask(messages, n=2 if turn == 0 else 1)
        texts += "".join(answers)
        messages += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": f"{turn}"}]
        time.sleep(0.5)
    texts += "".join(ask([{"role": "user", "content": "9"}]))  # its history is shortened
    note(event="end")
    reward = sum(letter.isdigit() for letter in texts) / max(len(texts), 1)
    print(json.dumps({"reward": reward, "metrics": {"number": NUMBER}}))


if __name__ == "__main__":
    main()
