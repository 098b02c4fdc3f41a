"""Agents that are programs, in any language: `env.id = "agent:command"`.

    a problem, as JSON --stdin--> the program --HTTP, OPENAI_BASE_URL--> the session of this rollout
    reward <--last line of its output--'

The last line is a number, or an object: `{"reward": 1.0, "metrics": {"tests": 3}}`. Each rollout
starts the program anew. When the program has ended, takes too long, or its rollout is given up, its starter
(`start_program`) kills it and all processes that it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeGuard

from orchestrator.env import EnvContext
from orchestrator.envs.agent import AgentProblem, AgentRun
from orchestrator.envs.rows import ListedDataset, read_rows
from orchestrator.lifetimes import uninterrupted
from orchestrator.untrusted import end_starter
from orchestrator.workers import passed_on
from trireme.core.finite_json import to_json
from trireme.core.refusals import Refusal

STARTER = Path(__file__).with_name("start_program.py")
KEPT_BYTES = 2**16
"""The number of bytes at the end of a program's output that are read as its result."""
SHOWN = 500
"""The most characters of a program's output that an error shows."""


class ProgramTimeout(Exception):
    """A program took longer than `env.args.limit_s`."""


class ProgramFailed(Exception):
    """A program ended with another exit code than 0."""


class BadProgramOutput(Exception):
    """The last line of a program's output is no reward."""


@dataclass(frozen=True)
class AgentProgram:
    """An agent that starts a program for each rollout."""

    command: tuple[str, ...]
    limit_s: float
    """Seconds from the program's start until its end."""
    memory_bytes: int
    """The most memory that each process of the program may allocate."""
    variables: tuple[str, ...]
    """Names of environment variables that the program gets in addition to `orchestrator.workers.PASSED_ON`."""

    async def __call__(self, run: AgentRun) -> tuple[float, Mapping[str, float]]:
        """Runs the program to its end for the rollout `run`. Returns reward and metrics from the last line of the
        program's output. Raises ProgramTimeout, ProgramFailed (for an exit code that is not 0) and
        BadProgramOutput."""
        with tempfile.TemporaryDirectory(prefix="agent-") as directory:
            output, errors, code = await self._run(run.problem, self._environment(run, directory))
        if code:
            raise ProgramFailed(f"{self._name} ended with exit code {code}; its last words: {errors or output}")
        return _reward(output, self._name)

    @property
    def _name(self) -> str:
        return f"the program {' '.join(self.command)[:SHOWN]} of env.args.command"

    def _environment(self, run: AgentRun, directory: str) -> dict[str, str]:
        return passed_on(self.variables) | {
            "OPENAI_BASE_URL": run.base_url,
            "OPENAI_API_KEY": run.api_key,
            "ANTHROPIC_BASE_URL": run.anthropic_base_url,
            "ANTHROPIC_API_KEY": run.api_key,
            "TRIREME_MODEL": run.model,
            "TRIREME_SAMPLE": str(run.sample),
            "TMPDIR": directory,
        }

    async def _run(self, problem: object, environment: Mapping[str, str]) -> tuple[str, str, int]:
        """Runs the program on `problem` with the environment variables `environment`. Returns the end of its standard
        output, the end of its standard error, and its exit code."""
        start = [sys.executable, "-I", "-S", str(STARTER), str(self.memory_bytes), str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *start,
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                _, output, errors, code = await asyncio.gather(
                    _give(process.stdin, to_json(problem)),
                    _end_of(process.stdout),
                    _end_of(process.stderr),
                    process.wait(),
                )
                return output, errors[-SHOWN:], code
        except TimeoutError:
            if not limit.expired():
                raise
            raise ProgramTimeout(f"{self._name} took longer than env.args.limit_s = {self.limit_s:g} s") from None
        finally:
            await uninterrupted(end_starter(process, self._name))


async def _give(stdin: asyncio.StreamWriter, line: str) -> None:
    """Writes `line`, the problem, to a program's standard input and closes it. It is no error if the program does not
    read the line."""
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(line.encode() + b"\n")
        await stdin.drain()
    stdin.close()


async def _end_of(stream: asyncio.StreamReader) -> str:
    """Reads a stream to its end. Returns its last KEPT_BYTES bytes as text."""
    tail = b""
    while chunk := await stream.read(KEPT_BYTES):
        tail = (tail + chunk)[-KEPT_BYTES:]
    return tail.decode(errors="replace")


def _reward(output: str, name: str) -> tuple[float, Mapping[str, float]]:
    """Returns reward and metrics from the last line of a program's output. `name` names the program in messages. Raises
    BadProgramOutput."""
    lines = output.strip().splitlines()
    with suppress(ValueError):
        report = json.loads(lines[-1]) if lines else None
        reward, metrics = (
            (report.get("reward"), report.get("metrics", {})) if isinstance(report, dict) else (report, {})
        )
        if _is_number(reward) and isinstance(metrics, dict) and all(map(_is_number, metrics.values())):
            return float(reward), {key: float(value) for key, value in metrics.items()}
    raise BadProgramOutput(
        f"{name} printed {lines[-1][:SHOWN] if lines else 'nothing'!r} last; expected its reward: a number, or an "
        'object such as {"reward": 1.0, "metrics": {"tests": 3}}'
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ProgramDataset(ListedDataset[object]):
    """The problems that a program plays as an agent, in an order that follows from the seed."""

    def __init__(
        self,
        context: EnvContext,
        command: Sequence[str],
        problems: str,
        eval_problems: str | None = None,
        limit_s: float = 600.0,
        memory_gb: float = 4.0,
        batch_size: int = 16,
    ) -> None:
        """`command`: the program and its arguments. `problems`: a file with a JSON value in each line. `eval_problems`:
        such a file for evaluations (None: `problems`). `limit_s`: the time limit of one run, in seconds. `memory_gb`:
        the memory limit of each process, in GiB. Raises ValueError for limits that are not above 0, for a `command`
        that is not a list of words, and for malformed files; BadInput if the program cannot be found."""
        if min(limit_s, memory_gb) <= 0:
            raise ValueError(f"limit_s = {limit_s}, memory_gb = {memory_gb}; expected above 0")
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError(f'command = {command!r}; expected a list of words, such as ["node", "agent.mjs"]')
        if shutil.which(command[0]) is None:
            raise Refusal(
                f"env.args.command = {list(command)}, whose program {command[0]} is not there",
                "a program that can be started: a name that is on PATH, or a path",
                "install it on the node where the orchestrator runs, or correct the name",
            )
        program = AgentProgram(tuple(command), limit_s, int(memory_gb * 2**30), context.variables)
        if context.split == "train":
            path = problems
        else:
            path = eval_problems or problems
        values = [value for _, value in read_rows(path)]
        super().__init__(partial(AgentProblem, program), values, f"agent:{context.seed}", batch_size)
