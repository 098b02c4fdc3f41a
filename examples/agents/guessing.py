"""The guessing game of `env.id = "guess"`, played by an agent with OpenAI's client. Only `run` in it knows of training.

PYTHONPATH=examples/agents uv run rl @ configs/guess.toml --env.id agent:guessing:play --renderer.name guessing:Bare

The model of that configuration has seen games and no chats, so `Bare` writes a conversation as the tokens of a game.
"""

import random
from functools import cache

from openai import AsyncOpenAI

from orchestrator.envs.guess import COST_OF_A_TURN, DIGITS, PROMPT, hint
from trireme.renderers.text_renderer import TextRenderer

MAX_TURNS = 4


def problems(split: str, seed: int, count: int = 8000) -> list[str]:
    """Returns secrets."""
    rng = random.Random(f"{split}:{seed}")
    return [rng.choice(DIGITS) for _ in range(count)]


@cache
def shared() -> AsyncOpenAI:
    """Returns a client whose connections all games share: to make one costs more than to play a game."""
    return AsyncOpenAI(api_key="each game has its own")


async def play(run):
    """Plays one game. Returns the reward, and whether the digit was found."""
    client = shared().with_options(base_url=run.base_url, api_key=run.api_key)
    messages = [{"role": "user", "content": PROMPT}]
    for guesses in range(MAX_TURNS):
        answer = await client.chat.completions.create(model=run.model, messages=messages)
        said, finished = answer.choices[0].message.content or "", answer.choices[0].finish_reason == "stop"
        if finished and said == run.problem:
            return 1 - COST_OF_A_TURN * guesses, {"success": 1.0}
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": hint(run.problem, said if finished else "")})
    return 0.0, {"success": 0.0}


class Bare(TextRenderer):
    """Writes the contents of messages and nothing else; an answer ends with the end of sequence, if it has one."""

    def __init__(self, tokenizer, rule, enable_thinking=None):
        super().__init__(tokenizer, [tokenizer.eos_token_id], rule)
        self._end = str(tokenizer.eos_token)

    def text(self, messages, tools, generate):
        return "".join(m["content"] + self._end * (m["role"] == "assistant") for m in messages)

    def stop_condition(self):
        return ()  # the model's end of sequence always stops

    def parse_text(self, text):
        return {"role": "assistant", "content": text}, True

    def _followed_by(self, own, after):
        return own + self.encode(after.removeprefix(self._end))
