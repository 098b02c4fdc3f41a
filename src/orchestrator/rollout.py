"""One rollout: the token loop between an environment and the policy. Tokens in, tokens out.

    observation --> checks --> sample(prompt, seed, stop) --> action --> env.step --+--> end of the episode
         ^                                                                          |
         +---------------------- next observation ----------------------------------+

Whatever goes wrong is an exception that names the environment; the pipeline decides whether to try again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.env import Env, StepResult, StopCondition, Trajectory, Transition
from trireme.config.schema import Config, SamplingConfig
from trireme.core.errors import BadInput
from trireme.core.stop_strings import cut
from trireme.core.tokenizer import Decode
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan
from trireme.process import trace
from trireme.process.faults import fault_point

Sample = Callable[[SampleRequest], Awaitable[SampledSequence]]
NUMBERS = (float, int, Real, np.bool_)
"""What rewards and metrics may be: Python's numbers and numpy's. The first two are Real as well, and found sooner."""
MAPPINGS = (dict, Mapping)
"""As above."""


class RolloutError(Exception):
    """A rollout cannot be used; the message names the environment."""


class PromptTooLong(RolloutError):
    """The first prompt exceeds `max_prompt_len` or leaves no room below `max_seq_len`: refused before sampling."""


class BadReward(RolloutError):
    """The environment gave something for a reward that is no number."""


class NonFiniteReward(RolloutError):
    """The environment gave a reward of NaN or infinity."""


class BadStep(RolloutError):
    """What the environment's step returned is no StepResult, or its metrics are no numbers."""


class BadPrompt(RolloutError):
    """The environment gave an observation without tokens, or one that is no sequence of token ids."""


class OutOfVocabulary(RolloutError):
    """The environment gave a token that the model does not have."""


class EnvExited(RolloutError):
    """The environment asked the whole process to end (`sys.exit`)."""


class EnvCancelled(RolloutError):
    """The environment raised CancelledError although nobody had cancelled its rollout."""


class BadSample(RolloutError):
    """The sampler returned an empty sequence, columns of different lengths, a non-finite log-probability, or a token
    that the model does not have."""


@dataclass(frozen=True)
class RolloutLimits:
    """`max_seq_len` bounds prompt and answer together; an answer gets the room that its prompt leaves. `stop`: what
    ends every answer, whatever its environment says. `decode` is needed where strings do."""

    vocab_size: int
    max_seq_len: int
    max_prompt_len: int | None = None
    stop: StopCondition = ()
    decode: Decode | None = None


def rollout_limits(config: Config, decode: Decode) -> RolloutLimits:
    """Limits of a rollout, from the configuration and the model's `config.json`. Raises BadInput if neither says how
    long a sequence may be."""
    from transformers.utils import cached_file

    described = json.loads(Path(str(cached_file(config.model.name, "config.json"))).read_text())
    described = described.get("text_config", described)
    longest = config.model.max_seq_len or described.get("max_position_embeddings")
    if longest is None:
        raise BadInput(f"the config.json of {config.model.name} has no max_position_embeddings: set model.max_seq_len")
    return RolloutLimits(
        vocab_size=described["vocab_size"],
        max_seq_len=min(longest, config.inference.max_model_len or longest),
        max_prompt_len=config.orchestrator.max_prompt_len,
        stop=tuple(config.inference.sampling.stop),
        decode=decode,
    )


@dataclass(frozen=True)
class RolloutKey:
    """Which rollout: sample `sample` of problem `problem`, try `attempt` (counted over retries and requeues), of
    environment `env`. Rollouts with the same `route_key` go to the same replica."""

    env: str
    problem: str
    sample: int
    attempt: int
    route_key: str

    def seed(self, run_seed: int, turn: int) -> int:
        """Seed of one request, 0 <= seed < 2^63: the same in every process and run, different for every request."""
        place = f"{run_seed}/{self.problem}/{self.sample}/{turn}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1


async def run_rollout(
    env: Env, sample: Sample, key: RolloutKey, limits: RolloutLimits, sampling: SamplingConfig, run_seed: int
) -> Trajectory:
    """Plays one episode to its end. Raises RolloutError, and whatever the environment or the sampler raises."""
    fault_point("orchestrator.rollout")
    with trace.overlapping("initial_observation", "environment", problem=key.problem):
        observation, stop = await env.initial_observation()
    transitions: list[Transition] = []
    while True:
        prompt = _checked_prompt(observation, stop, key, limits)
        too_long = _too_long(prompt, limits)
        if too_long and not transitions:
            raise PromptTooLong(f"environment {key.env}, problem {key.problem}: {too_long}")
        if too_long:
            return Trajectory(tuple(transitions), "max_seq_len")
        request = _request(key, len(transitions), prompt, stop, limits, sampling, run_seed)
        sampled = await sample(request)
        _check_sample(sampled, key, limits)
        sampled = _stopped(sampled, request, limits)
        with trace.overlapping("step", "environment", problem=key.problem):
            result = await env.step(sampled.tokens.tolist())
        transitions.append(_transition(prompt, sampled, result, key))
        if result.episode_done:
            return Trajectory(tuple(transitions), sampled.stop_reason)
        observation, stop = result.next_observation, result.next_stop_condition


def _checked_prompt(
    observation: Sequence[int], stop: StopCondition, key: RolloutKey, limits: RolloutLimits
) -> npt.NDArray[np.int32]:
    prompt = np.asarray(observation)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not len(prompt):
        raise BadPrompt(
            f"environment {key.env}, problem {key.problem}: gave the observation {str(observation)[:100]!r}; expected "
            f"at least one token, each a whole number of 0 .. {limits.vocab_size - 1}"
        )
    prompt = prompt.astype(np.int64, copy=False)
    unsigned = prompt.view(np.uint64)  # in which a negative one is very large
    strange = [end for end in stop if end not in range(limits.vocab_size) and not (isinstance(end, str) and end)]
    if strange or np.maximum.reduce(unsigned) >= limits.vocab_size:
        unknown = prompt[unsigned >= limits.vocab_size]
        given = f"token {unknown[0]}" if len(unknown) else f"{strange[0]!r} as what ends an answer"
        raise OutOfVocabulary(
            f"environment {key.env}, problem {key.problem}: gave {given}; expected tokens of 0 .. "
            f"{limits.vocab_size - 1}"
        )
    return prompt.astype(np.int32)


def _too_long(prompt: npt.NDArray[np.int32], limits: RolloutLimits) -> str | None:
    """Why a prompt is refused, or none."""
    if limits.max_prompt_len is not None and len(prompt) > limits.max_prompt_len:
        return f"a prompt of {len(prompt)} tokens exceeds orchestrator.max_prompt_len = {limits.max_prompt_len}"
    if len(prompt) >= limits.max_seq_len:
        return f"a prompt of {len(prompt)} tokens leaves no room for an answer below max_seq_len = {limits.max_seq_len}"
    return None


def _request(
    key: RolloutKey,
    turn: int,
    prompt: npt.NDArray[np.int32],
    stop: StopCondition,
    limits: RolloutLimits,
    sampling: SamplingConfig,
    run_seed: int,
) -> SampleRequest:
    room = limits.max_seq_len - len(prompt)
    return SampleRequest(
        request_id=f"{key.problem}/{key.sample}/{key.attempt}/{turn}",
        prompt=tuple(prompt.tolist()),
        params=sampling.params(key.seed(run_seed, turn), (*stop, *limits.stop), room),
        route_key=key.route_key,
    )


def _check_sample(sampled: SampledSequence, key: RolloutKey, limits: RolloutLimits) -> None:
    """Whatever a replica gave: in the trainer, what is no token or no number would end the run."""
    # Ufuncs, without the Python around them. A sum is finite if all are, and a negative token, without its sign, is a
    # large one: each is looked at once.
    if not 0 < len(sampled.tokens) == len(sampled.logprobs) or not math.isfinite(np.add.reduce(sampled.logprobs)):
        raise BadSample(
            f"environment {key.env}, problem {key.problem}: the sampler returned {len(sampled.tokens)} tokens and "
            f"{len(sampled.logprobs)} logprobs; expected as many of both, at least one, and finite logprobs"
        )
    if np.maximum.reduce(sampled.tokens.view(np.uint32)) >= limits.vocab_size:
        raise BadSample(
            f"environment {key.env}, problem {key.problem}: the sampler returned tokens of {sampled.tokens.min()} .. "
            f"{sampled.tokens.max()}; expected tokens of 0 .. {limits.vocab_size - 1}"
        )


def _stopped(sampled: SampledSequence, request: SampleRequest, limits: RolloutLimits) -> SampledSequence:
    """The answer up to the first string that ends it, whether its sampler stopped there or not."""
    strings = request.params.stop_strings if request.params.stop else ()
    if not strings:
        return sampled
    assert limits.decode is not None, "strings that end answers, and no way to find them"
    return cut(sampled, strings, limits.decode)


def _transition(
    prompt: npt.NDArray[np.int32], sampled: SampledSequence, result: StepResult, key: RolloutKey
) -> Transition:
    if not isinstance(result, StepResult) or not isinstance(result.logs, MAPPINGS):
        raise BadStep(
            f"environment {key.env}, problem {key.problem}: step() returned {str(result)[:200]}; expected a "
            "StepResult, its logs a mapping"
        )
    check_reward(result.reward, key.env, key.problem)
    check_metrics(result.metrics, key.env, key.problem)
    return Transition(
        observation=prompt,
        action=sampled.tokens.astype(np.int32),
        logprobs=sampled.logprobs.astype(np.float32),
        versions=token_versions(sampled.spans, len(sampled.tokens)),
        mixed=token_mixed(sampled.spans, len(sampled.tokens)),
        identities=tuple([span.identity for span in sampled.spans]),
        stop_reason=sampled.stop_reason,
        reward=float(result.reward),
        metrics=result.metrics,
        logs=result.logs,
    )


def check_reward(reward: float, env: str, problem: str) -> None:
    """Raises NonFiniteReward for NaN and infinity, BadReward for what is no number."""
    if not isinstance(reward, NUMBERS):
        raise BadReward(
            f"environment {env}, problem {problem}: gave the reward {str(reward)[:100]!r} of type "
            f"{type(reward).__name__}; expected a number"
        )
    if not math.isfinite(reward):
        raise NonFiniteReward(
            f"environment {env}, problem {problem}: gave the reward {reward}; expected a finite number"
        )


def check_metrics(metrics: Mapping[str, float], env: str, problem: str) -> None:
    """Raises BadStep unless all are numbers: a row of metrics could not be made of anything else."""
    strange = (
        [(name, value) for name, value in metrics.items() if not isinstance(value, NUMBERS)]
        if isinstance(metrics, MAPPINGS)
        else [("all of them", metrics)]
    )
    if strange:
        name, value = strange[0]
        raise BadStep(
            f"environment {env}, problem {problem}: gave the metric {name} = {str(value)[:100]!r}; expected a number"
        )


def token_versions(spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.int32]:
    """The version that sampled each of `length` tokens, int32 [T]. Raises BadSample unless the spans cover all of them
    in order, without gap or overlap."""
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != length:
        raise BadSample(f"version spans {spans} do not cover the {length} tokens that were sampled")
    versions = np.empty(length, np.int32)  # `full` takes three times as long
    for span in spans:
        versions[span.start : span.end] = span.identity.version
    return versions


def token_mixed(spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.bool_]:
    """Whether each of `length` tokens comes from a mixed span, bool [T]."""
    mixed = np.zeros(length, np.bool_)
    for span in spans:
        if span.mixed:
            mixed[span.start : span.end] = True
    return mixed
