"""`trireme env try ENV`: one episode of an environment in the terminal, without a model's weights, rooms, or a GPU.

    trireme env try sort                                                  you type the answers
    trireme env try reward:my_rewards.py:score --env.args.path data.jsonl --known
    trireme env try agent:calculator:play --answers answers.txt           a line for each answer

First the environment's first problem is built, and refused, as a dry run of `rl` does. An answer that begins with a
quote is a JSON string: that is how one has several lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from orchestrator.agents import agent_sessions, play_session
from orchestrator.env import Env, Trajectory, first_env, in_short, load_datasets
from orchestrator.rollout import RolloutKey, RolloutLimits, run_rollout
from orchestrator.workers import workers
from trireme.cli.common import Parser
from trireme.config import Config
from trireme.config.load import load
from trireme.config.model_facts import ModelFacts
from trireme.core.errors import EXIT_INTERRUPTED, EXIT_OK, BadInput, TriremeError
from trireme.core.tokenizer import Tokenizer, encode_text, load_tokenizer
from trireme.core.types import SampledSequence, SampleRequest, StopReason, VersionSpan, WeightIdentity
from trireme.launch.environments import try_first_problem
from trireme.launch.service import sessions_factory

UNREAD = Path(__file__).with_name("env.toml")
WITHOUT_MODEL = ("--model.name", "./assets/sort-base", "--model.max-seq-len", "100000")
"""Arguments for a command that names no model: they give a tokenizer with characters as tokens."""
TYPED = WeightIdentity(0, 0, "typed")


class Answers:
    """Takes the place of the policy: each answer is a line of text from `read`. `read` returns "" or None if no line is
    left."""

    def __init__(self, tokenizer: Tokenizer, read: Callable[[], str | None]) -> None:
        self._tokenizer = tokenizer
        self._read = read
        self.times_s: list[float] = []
        """Times on the clock `time.perf_counter`: for each answer when it was requested, then when it was returned."""

    async def sample(self, request: SampleRequest, *_on_progress: object) -> SampledSequence:
        """Prints the prompt of `request`, and returns the next answer in the form of a sampled sequence, cut to
        `max_tokens`. Raises BadInput if no answer is left."""
        self.times_s.append(time.perf_counter())
        print(f"\n{self._tokenizer.decode(request.prompt)}\nanswer> ", end="", flush=True)
        line = self._read()
        if not line:
            raise BadInput("no answer is left, but the episode needs another one: give more answers, or type them")
        if line.startswith('"'):
            text = json.loads(line)
        else:
            text = line.removesuffix("\n")
        stop = request.params.stop_token_ids or (self._tokenizer.eos_token_id,)
        whole = [*encode_text(self._tokenizer, text), stop[0]]
        tokens = np.asarray(whole[: request.params.max_tokens], np.int32)
        self.times_s.append(time.perf_counter())
        spans = (VersionSpan(TYPED, 0, len(tokens)),)
        stop_reason: StopReason = "stop" if len(tokens) == len(whole) else "length"
        return SampledSequence(tokens, np.zeros(len(tokens), np.float32), stop_reason, spans)


def main(words: Sequence[str]) -> int:
    """Runs the command with the arguments `words`. Returns its exit code. Raises TriremeError."""
    options, config = parse(words)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(EXIT_INTERRUPTED))  # asyncio's own would wait for a typed line
    try:
        asyncio.run(_try(config, options))
    except TriremeError:
        raise
    except Exception as error:
        raise BadInput(f"env.id = {options.env}: the episode failed: {in_short(error)}") from error
    return EXIT_OK


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Parses the arguments `words`. Returns the options of the command, and the configuration. Raises BadInput."""
    parser = Parser(prog="trireme env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["try"], metavar="try")
    parser.add_argument("env", metavar="ENV", help="as env.id; all keys of `rl` may follow")
    parser.add_argument("--answers", type=argparse.FileType(), default=sys.stdin, help="a file with one in each line")
    parser.add_argument("--known", action="store_true", help="play the answers that the environment knows")
    options, flags = parser.parse_known_args(words)
    model = () if any(word.startswith(("@", "--model.name")) for word in flags) else WITHOUT_MODEL
    return options, load(["@", str(UNREAD), *flags, *model, "--env.0.id", options.env]).config


async def _try(config: Config, options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(config.tokenizer_name)
    key = RolloutKey(config.env[0].label, "0.0.0", 0, 0, "0")
    limits = RolloutLimits.of(config, tokenizer.decode)
    async with AsyncExitStack() as ending:
        await ending.enter_async_context(workers(config.orchestrator.workers, config.env_variables))
        sessions = sessions_factory(config, ModelFacts.of(config, required=True))
        if sessions:
            await ending.enter_async_context(agent_sessions(sessions))
        dataset = load_datasets(config, tokenizer)[0][0]
        await try_first_problem(config.env[0], dataset, limits, 1)
        problem = dataset.get_batch(0)[0]
        env = await ending.enter_async_context(first_env(problem))
        if isinstance(env, Env) and options.known:
            read = env.known_answer
        else:
            read = options.answers.readline
        answers = Answers(tokenizer, read)
        call = (answers.sample, key, limits, config.inference.sampling, config.seed)
        trajectory = await (run_rollout(env, *call) if isinstance(env, Env) else play_session(env, *call))
        answers.times_s.append(time.perf_counter())
        ((reward, metrics),) = await problem.compute_group_rewards([trajectory])
    print(*report(trajectory, answers.times_s, tokenizer), sep="\n")
    print(f"reward {trajectory.reward + reward:g}{_listed(metrics)}")


def report(trajectory: Trajectory, times_s: Sequence[float], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields lines of text on each turn of `trajectory`: tokens, whether they count in the loss (mask), reward,
    metrics, and how long the environment took.

    `times_s`: seconds on one clock. Two values for each turn: when its answer was requested, and when it was returned.
    The last value is the end of the episode.
    """
    end = 0
    for number, turn in enumerate(trajectory.turns):
        yield f"\nturn {number + 1}, in the training sequence that begins at token {turn.start}"
        for mask, first, last in (
            (0, max(turn.start, end), turn.prompt_end),
            (turn.in_loss, turn.prompt_end, turn.end),
        ):
            tokens = trajectory.tokens[first:last].tolist()
            yield f"  mask {int(mask)}  {len(tokens)} tokens  {tokenizer.decode(tokens)!r}  {tokens}"
        end = turn.end
        took_s = times_s[2 * number + 2] - times_s[2 * number + 1]
        yield f"  {turn.stop_reason}  reward {turn.reward:g}{_listed(turn.metrics)}  environment {1000 * took_s:.1f} ms"


def _listed(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:g}" for name, value in metrics.items())
