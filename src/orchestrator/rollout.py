"""One rollout: the token loop between an environment and the policy. Tokens in, tokens out.

    observation --> checks --> sample(prompt, seed, stop) --> action --> env.step --+--> end of the episode
         ^             |                                                            |
         |             +-- a limit of the run is reached --> env.truncated --> end  |
         +---------------------- next observation ----------------------------------+

A failure is an exception that names the environment; the group runner decides whether to try again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.env import Continuation, Env, StepResult, StopCondition, TokenIds, Truncation, result_of
from orchestrator.trajectory import Trajectory, TrajectoryBuilder, Turn
from orchestrator.unfinished import RolloutProgress, UnfinishedRollout
from trireme.config.schema import Config, SamplingConfig
from trireme.core.errors import BadInput
from trireme.core.sampler import Sample
from trireme.core.stop_strings import cut
from trireme.core.tokenizer import Decode
from trireme.core.types import SampledSequence, SampleRequest, VersionSpan
from trireme.process import trace
from trireme.process.faults import fault_point

NUMBERS = (float, int, Real, np.bool_)
"""Types of rewards and metrics. The first two are Real as well; their own entries make the check of a type faster."""
MAPPINGS = (dict, Mapping)
LARGEST_REWARD = 2.0**53
"""Beyond this size float64 does not distinguish r from r + 1, and a gradient in float32 almost overflows."""


class RolloutError(Exception):
    """A rollout cannot be used; the message names the environment."""


class PromptTooLong(RolloutError):
    """The first prompt exceeds `max_prompt_len`, or is so long that an answer would exceed `max_seq_len`; refused
    before sampling."""


class BadReward(RolloutError):
    """The environment gave a reward that is no number, or a number beyond LARGEST_REWARD."""


class NonFiniteReward(RolloutError):
    """The environment gave a reward of NaN or infinity."""


class BadStep(RolloutError):
    """The environment's step returned no StepResult, or metrics that are no numbers."""


class BadPrompt(RolloutError):
    """The environment gave an observation without tokens, or an observation that is no sequence of token ids."""


class OutOfVocabulary(RolloutError):
    """The environment gave a token that the model does not have."""


class EnvExited(RolloutError):
    """The environment raised an exception that would end the whole process (`sys.exit`, KeyboardInterrupt)."""


class EnvCancelled(RolloutError):
    """The environment raised CancelledError although its rollout was not cancelled."""


class EnvNotClosed(RolloutError):
    """The environment's `close` or `cleanup` did not end within `env.close_s`."""


class AnswerTimeout(RolloutError):
    """The replicas took longer than `inference.answer_s` for one answer."""


class BadSample(RolloutError):
    """The sampler returned an empty sequence, columns of different lengths, a non-finite log-probability, or a token
    that the model does not have."""


@dataclass(frozen=True)
class RolloutLimits:
    """Limits that all rollouts of a run share: the vocabulary, lengths in tokens, and the run's own stop condition."""

    vocab_size: int
    max_seq_len: int
    """Bounds prompt and answer together."""
    max_prompt_len: int | None = None
    stop: StopCondition = ()
    """Ends every answer, in addition to its environment's stop condition."""
    decode: Decode | None = None
    """Turns token ids into text. Needed where strings end answers."""

    @classmethod
    def of(cls, config: Config, decode: Decode) -> RolloutLimits:
        """Reads the limits from the configuration and the model's `config.json`. Raises BadInput if neither says how
        long a sequence may be."""
        from transformers.utils import cached_file

        facts = json.loads(Path(str(cached_file(config.model.name, "config.json"))).read_text())
        facts = facts.get("text_config", facts)
        longest = config.model.max_seq_len or facts.get("max_position_embeddings")
        if longest is None:
            raise BadInput(
                f"the config.json of {config.model.name} has no max_position_embeddings: set model.max_seq_len"
            )
        return cls(
            vocab_size=facts["vocab_size"],
            max_seq_len=longest,
            max_prompt_len=config.orchestrator.max_prompt_len,
            stop=tuple(config.inference.sampling.stop),
            decode=decode,
        )


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Names one try of one rollout."""

    env: str
    problem: str
    sample: int
    """Number of the rollout in its group."""
    attempt: int
    """The number of earlier tries of the rollout."""
    route_key: str
    """Rollouts with the same key go to the same replica."""

    def __str__(self) -> str:
        return f"environment {self.env}, problem {self.problem}"

    def seed(self, run_seed: int | None, turn: int) -> int | None:
        """Returns the seed of the rollout's request number `turn`, 0 <= seed < 2^63. Different requests have different
        seeds; every process computes the same seed for a request. If `run_seed` is None, returns None: the request then
        has no seed, and the engine draws from its own random stream."""
        if run_seed is None:
            return None
        place = f"{run_seed}/{self.problem}/{self.sample}/{turn}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1


async def run_rollout(
    env: Env,
    sample: Sample,
    key: RolloutKey,
    limits: RolloutLimits,
    sampling: SamplingConfig,
    run_seed: int | None,
    progress: RolloutProgress | None = None,
) -> Trajectory:
    """Plays one episode to its end, with answers from `sample`, and returns the trajectory. Continues the rollout
    `progress.begun` of a checkpoint, if there is one. Raises RolloutError, and errors of the environment or the
    sampler."""
    fault_point("orchestrator.rollout")
    progress = progress or RolloutProgress()
    builder, observation, stop = await _beginning(env, key, progress.begun)
    while True:
        tokens, follows = checked_prompt(observation, stop, key, limits, bool(builder.turns))
        builder.ask(tokens, follows=follows)
        progress.asks(env, builder, tokens, follows, stop)
        turn = len(builder.turns)
        prompt = builder.prompt
        limit = _limit_reached(prompt, limits)
        if limit and not turn:
            raise PromptTooLong(f"{key}: {_too_long(limit, prompt, limits)}")
        if limit:
            progress.steps()
            with trace.overlapping("truncated", "environment", problem=key.problem):
                last_word = await result_of(env.truncated, limit)
            builder.turns[-1] = _with_last_word(builder.turns[-1], last_word, key)
            return builder.finish("max_seq_len")
        request = SampleRequest(
            request_id=f"{key.problem}/{key.sample}/{key.attempt}/{turn}",
            prompt=prompt,
            params=sampling.params(key.seed(run_seed, turn), (*stop, *limits.stop), limits.max_seq_len - len(prompt)),
            route_key=key.route_key,
            began=builder.first_weights,
        )
        sampled = await sample(request)
        sampled = checked(sampled, request, key, limits)
        progress.steps()
        with trace.overlapping("step", "environment", problem=key.problem):
            result = await result_of(env.step, sampled.tokens.tolist())
        _add_turn(builder, sampled, result, key)
        if result.episode_done:
            return builder.finish(sampled.stop_reason)
        observation = result.next_observation
        stop = result.next_stop_condition


async def _beginning(
    env: Env, key: RolloutKey, begun: UnfinishedRollout | None
) -> tuple[TrajectoryBuilder, TokenIds | Continuation, StopCondition]:
    """Begins an episode, or continues the rollout `begun` of a checkpoint. Returns a builder with the turns so far, the
    next observation, and the stop condition of its answer."""
    if begun is None:
        with trace.overlapping("initial_observation", "environment", problem=key.problem):
            return TrajectoryBuilder(), *await result_of(env.initial_observation)
    with trace.overlapping("load_state_dict", "environment", problem=key.problem):
        await result_of(env.load_state_dict, begun.env_state)
    if begun.follows:
        observation: TokenIds | Continuation = Continuation(begun.prompt)
    else:
        observation = begun.prompt
    return TrajectoryBuilder(begun.trajectory), observation, begun.stop


def checked_prompt(
    observation: TokenIds | Continuation, stop: StopCondition, key: RolloutKey, limits: RolloutLimits, begun: bool
) -> tuple[npt.NDArray[np.int32], bool]:
    """Returns the tokens of an observation, int32 [T], and True if the observation is a Continuation, whose tokens are
    only those after the last turn. `begun`: True if the rollout has at least one turn; otherwise a Continuation is
    refused. Raises BadPrompt if the observation is not a sequence of token ids, and OutOfVocabulary for a token in the
    observation or in `stop`."""
    follows = begun and isinstance(observation, Continuation)
    tokens = np.asarray(observation.tokens if isinstance(observation, Continuation) and begun else observation)
    if follows and tokens.shape == (0,):
        tokens = tokens.astype(np.int32)  # numpy takes an empty list for floats
    elif tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise BadPrompt(
            f"{key}: gave the observation {str(observation)[:100]!r}; expected "
            f"at least one token, each a whole number of 0 .. {limits.vocab_size - 1}"
        )
    if tokens.dtype != np.int32:
        tokens = tokens.astype(np.int64)
    strange = [end for end in stop if end not in range(limits.vocab_size) and not (isinstance(end, str) and end)]
    if strange or not _in_vocabulary(tokens, limits.vocab_size):
        unknown = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
        if len(unknown):
            problem = f"token {unknown[0]}"
        else:
            problem = f"{strange[0]!r} as what ends an answer"
        raise OutOfVocabulary(f"{key}: gave {problem}; expected tokens of 0 .. {limits.vocab_size - 1}")
    return tokens.astype(np.int32, copy=False), follows


def _in_vocabulary(tokens: npt.NDArray[np.integer], vocab_size: int) -> bool:
    """Returns True if all tokens are in 0 .. vocab_size - 1."""
    unsigned = tokens.view(f"u{tokens.itemsize}")  # a negative token becomes a very large one
    return bool(np.maximum.reduce(unsigned, initial=0) < vocab_size)


def _limit_reached(prompt: npt.NDArray[np.int32], limits: RolloutLimits) -> Truncation | None:
    """Returns the name of the limit that a prompt reaches: no answer to such a prompt may be sampled. Returns None if
    the prompt reaches no limit."""
    if limits.max_prompt_len is not None and len(prompt) > limits.max_prompt_len:
        return "max_prompt_len"
    if len(prompt) >= limits.max_seq_len:
        return "max_seq_len"
    return None


def _too_long(limit: Truncation, prompt: npt.NDArray[np.int32], limits: RolloutLimits) -> str:
    if limit == "max_prompt_len":
        problem = f"exceeds orchestrator.max_prompt_len = {limits.max_prompt_len}: raise --orchestrator.max-prompt-len"
    else:
        problem = (
            f"leaves no room for an answer below model.max_seq_len = {limits.max_seq_len}: raise --model.max-seq-len"
        )
    return f"a prompt of {len(prompt)} tokens {problem}, or shorten the prompts"


def checked(
    sampled: SampledSequence, request: SampleRequest, key: RolloutKey, limits: RolloutLimits
) -> SampledSequence:
    """Checks the answer `sampled` and returns it. If the sampler did not stop at the first stop string of the request,
    cuts the answer there. Raises BadSample."""
    _check_sample(sampled, key, limits)
    if request.params.stop and (strings := request.params.stop_strings):  # its sampler may not have stopped there
        assert limits.decode is not None, "strings end answers, but there is no decoder to find them"
        sampled = cut(sampled, strings, limits.decode)
    return sampled


def _check_sample(sampled: SampledSequence, key: RolloutKey, limits: RolloutLimits) -> None:
    """Raises BadSample for an answer that the trainer could not train on; in the trainer, such an answer would end the
    run."""
    # Only ufuncs, for speed: a sum is finite if all terms are, and a negative token becomes a large one without sign.
    if not 0 < len(sampled.tokens) == len(sampled.logprobs) or not math.isfinite(np.add.reduce(sampled.logprobs)):
        raise BadSample(
            f"{key}: the sampler returned {len(sampled.tokens)} tokens and "
            f"{len(sampled.logprobs)} logprobs; expected as many of both, at least one, and finite logprobs"
        )
    if not _in_vocabulary(sampled.tokens, limits.vocab_size):
        raise BadSample(
            f"{key}: the sampler returned tokens of {sampled.tokens.min()} .. "
            f"{sampled.tokens.max()}; expected tokens of 0 .. {limits.vocab_size - 1}"
        )


def _add_turn(builder: TrajectoryBuilder, sampled: SampledSequence, result: StepResult, key: RolloutKey) -> None:
    _check_result(result, "step", key)
    check_spans(sampled.spans, len(sampled.tokens))
    builder.answer(
        sampled.tokens,
        sampled.logprobs,
        sampled.spans,
        sampled.stop_reason,
        float(result.reward),
        result.metrics,
        result.logs,
        bool(result.in_loss),
    )


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raises BadSample unless the spans cover all `length` tokens in order, without gap or overlap."""
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != length:
        raise BadSample(f"version spans {spans} do not cover the {length} tokens that were sampled")


def _with_last_word(turn: Turn, result: StepResult | None, key: RolloutKey) -> Turn:
    if result is None:
        return turn
    _check_result(result, "truncated", key)
    return replace(
        turn,
        reward=turn.reward + float(result.reward),
        metrics={**turn.metrics, **result.metrics},
        logs={**turn.logs, **result.logs},
        in_loss=turn.in_loss and bool(result.in_loss),
    )


def _check_result(result: StepResult, method: str, key: RolloutKey) -> None:
    if not isinstance(result, StepResult) or not isinstance(result.logs, MAPPINGS):
        raise BadStep(f"{key}: {method}() returned {str(result)[:200]}; expected a StepResult, its logs a mapping")
    check_report(result.reward, result.metrics, key)


def check_report(reward: float, metrics: Mapping[str, float], place: object) -> None:
    """Checks what an environment reported. Raises NonFiniteReward for a reward of NaN or infinity, BadReward for a
    reward that is no number or too large, and BadStep for metrics that are no numbers. `place` names the rollout in
    messages."""
    if not isinstance(reward, NUMBERS):
        raise BadReward(
            f"{place}: gave the reward {str(reward)[:100]!r} of type {type(reward).__name__}; expected a number"
        )
    size = abs(reward)
    if not size < math.inf:
        raise NonFiniteReward(f"{place}: gave the reward {reward}; expected a finite number")
    if size > LARGEST_REWARD:
        raise BadReward(f"{place}: gave the reward {str(reward)[:30]}; expected one within -2^53 and 2^53")
    if isinstance(metrics, MAPPINGS):
        reported = metrics
    else:
        reported = {"all of them": metrics}
    for name, value in reported.items():
        if not isinstance(value, NUMBERS):
            raise BadStep(f"{place}: gave the metric {name} = {str(value)[:100]!r}; expected a number")
