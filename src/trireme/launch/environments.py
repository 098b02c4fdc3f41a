"""Makes the environments of a run once before the run starts, in the same way as the run's orchestrator does later. A
separate process does this, because the code of environments may do anything. Imports no Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from orchestrator.env import Env, RLDataset, first_env, in_short, load_datasets
from orchestrator.rollout import RolloutError, RolloutKey, RolloutLimits, checked_prompt
from orchestrator.workers import workers
from trireme.config import Config
from trireme.config.schema import EnvConfig
from trireme.core.errors import EXIT_BAD_INPUT, BadInput, TriremeError
from trireme.core.own_packages import ENTRY
from trireme.core.tokenizer import load_tokenizer

LAST_WORDS = 300
"""Number of characters, from the end of the process's output, that the error shows if the process ended
unexpectedly."""
MARK = "\x00"
"""Separates what environments print from the error message, in the output of the process."""
WARNING = "warning: "
"""Begins the lines of the output that environments log; the driver shows them."""


@contextmanager
def checked_environments(config: Config) -> Iterator[Callable[[float], bool]]:
    """Context manager: starts a process that makes the environments of `config`, and kills the process at the end of
    the `with` block. Yields `wait(timeout_s)`, which waits up to `timeout_s` seconds for the process. `wait` returns
    True if all environments could be made, and False if the process has not ended yet. It raises BadInput if an
    environment cannot be made or its first problem cannot be built."""
    with tempfile.TemporaryFile("w+") as config_file, tempfile.TemporaryFile("w+") as output:
        config_file.write(config.model_dump_json())
        config_file.seek(0)
        command = [sys.executable, "-m", ENTRY, __name__]  # which searches the working directory, as Ray's workers do
        process = subprocess.Popen(
            command, stdin=config_file, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

        def wait(timeout_s: float) -> bool:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            output.seek(0)
            text = output.read()
            if process.returncode == EXIT_BAD_INPUT:
                raise BadInput(text.rpartition(MARK)[2].strip())
            if process.returncode:
                raise BadInput(
                    f"the environments cannot be made: the process that tried ended with code {process.returncode}: "
                    f"...{text[-LAST_WORDS:].strip()}"
                )
            if process.returncode is None:
                return False
            for line in text.splitlines():
                if line.startswith(WARNING):
                    print(line, file=sys.stderr, flush=True)
            return True

        try:
            yield wait
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Does the work of the process that `checked_environments` starts: makes the environments of the configuration,
    which it reads as JSON from stdin. If an environment cannot be made, prints MARK and the reason, and exits with
    EXIT_BAD_INPUT."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{WARNING}%(message)s"))
    logging.getLogger("orchestrator").addHandler(handler)
    try:
        config = Config.model_validate_json(sys.stdin.read())
        tokenizer = load_tokenizer(config.tokenizer_name)
        trained, _ = load_datasets(config, tokenizer)
        asyncio.run(_try_first_problems(config, trained, RolloutLimits.of(config, tokenizer.decode)))
        code = 0
    except BadInput as error:
        print(MARK, error, sep="")
        code = EXIT_BAD_INPUT
    sys.stdout.flush()
    os._exit(code)  # threads that an environment has started do not hold it up


async def _try_first_problems(config: Config, datasets: Sequence[RLDataset], limits: RolloutLimits) -> None:
    async with workers(config.orchestrator.workers, config.env_variables):
        for env, dataset in zip(config.env, datasets, strict=True):
            await try_first_problem(env, dataset, limits, config.orchestrator.retries + 1)


async def try_first_problem(env: EnvConfig, dataset: RLDataset, limits: RolloutLimits, tries: int) -> None:
    """Builds the first problem of `dataset` and the problem's first prompt, which must be within `limits`, and closes
    the problem again. Does not run an agent's program. Raises BadInput if all `tries` fail."""
    for remaining in reversed(range(tries)):
        try:
            await _build_first(env.id, dataset, limits)
            return
        except TriremeError:
            raise
        except Exception as error:
            if not remaining:
                if isinstance(error, RolloutError):
                    reason = str(error)
                else:
                    reason = in_short(error)
                raise BadInput(
                    f"env.id = {env.id!r}: its first problem cannot be built: {reason}. Expected: get_batch(0), "
                    "make_env(0) and initial_observation() succeed, and initial_observation() returns a prompt and a "
                    "stop condition. Correct the environment"
                ) from error


async def _build_first(env_id: str, dataset: RLDataset, limits: RolloutLimits) -> None:
    problem = dataset.get_batch(0)[0]
    async with first_env(problem) as env:
        if isinstance(env, Env):
            observation, stop = await env.initial_observation()
            checked_prompt(observation, stop, RolloutKey(env_id, "0.0.0", 0, 0, ""), limits, begun=False)
        await problem.try_rewards()


if __name__ == "__main__":
    main()
