"""Turns with a whole prompt each, as trajectories were kept once: what their columns are compared with."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.trajectory import RolloutEnd, Trajectory, TrajectoryBuilder, Transition
from trireme.core.types import Datum, ModelInput, TensorData, VersionSpan, WeightIdentity


def turn_of(
    observation: Sequence[int], action: Sequence[int], versions: int | Sequence[int] = 0, **fields: Any
) -> Transition:
    """Returns a turn whose tokens were sampled by these versions, or all by one."""
    versions_T = np.broadcast_to(np.asarray(versions, np.int32), len(action))
    defaults = {"logprobs": np.full(len(action), -0.5, np.float32), "stop_reason": "stop", "reward": 0.0}
    return Transition(
        observation=np.asarray(observation, np.int32),
        action=np.asarray(action, np.int32),
        versions=versions_T,
        mixed=np.zeros(len(action), np.bool_),
        identities=tuple(WeightIdentity(0, version, "d") for version in sorted(set(versions_T.tolist()))),
        **{**defaults, **fields},
    )


def trajectory_of(
    transitions: Sequence[Transition], stop_reason: RolloutEnd = "stop", follows: bool = False
) -> Trajectory:
    """`follows`: prompts that continue the turn before are asked by what is new in them."""
    builder = TrajectoryBuilder()
    for before, turn in zip([None, *transitions], transitions, strict=False):
        if follows and before and continues(turn, before):
            builder.ask(turn.observation[len(before.observation) + len(before.action) :], follows=True)
        else:
            builder.ask(turn.observation)
        np.testing.assert_array_equal(builder.prompt, turn.observation)
        fields = (turn.stop_reason, turn.reward, turn.metrics, turn.logs, turn.in_loss)
        builder.answer(turn.action, turn.logprobs, spans_of(turn), *fields)
    return builder.finish(stop_reason)


def spans_of(turn: Transition) -> tuple[VersionSpan, ...]:
    named = {identity.version: identity for identity in turn.identities}
    changes = (np.diff(turn.versions) != 0) | (np.diff(turn.mixed) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(turn.action)]
    return tuple(
        VersionSpan(named[int(turn.versions[start])], start, end, bool(turn.mixed[start]))
        for start, end in pairwise(bounds)
    )


def continues(turn: Transition, before: Transition) -> bool:
    """True if the prompt begins with exactly the prompt and the answer of the turn before."""
    prefix = np.concatenate([before.observation, before.action])
    return np.array_equal(turn.observation[: len(prefix)], prefix)


def datums(transitions: Sequence[Transition], advantage: float, temperature: float, counts: bool = True) -> list[Datum]:
    """Returns a datum for each run of turns that continue each other, token by token."""
    runs: list[list[Transition]] = []
    for turn in transitions:
        if runs and continues(turn, runs[-1][-1]):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [_datum(turns, advantage, temperature, counts) for turns in runs]


def _datum(turns: Sequence[Transition], advantage: float, temperature: float, counts: bool) -> Datum:
    tokens = [*turns[-1].observation.tolist(), *turns[-1].action.tolist()]
    columns: dict[str, npt.NDArray[Any]] = {
        "advantages": np.zeros(len(tokens), np.float32),
        "logprobs": np.zeros(len(tokens), np.float32),
        "mask": np.zeros(len(tokens), np.float32),
        "target_tokens": np.asarray(tokens, np.int32),
        "versions": np.full(len(tokens), -1, np.int32),
    }
    for turn in turns:
        counted = counts and turn.in_loss
        for n in range(len(turn.action)):
            place = len(turn.observation) + n
            columns["advantages"][place] = advantage if counted else 0
            columns["logprobs"][place] = turn.logprobs[n]
            columns["mask"][place] = counted
            columns["versions"][place] = turn.versions[n]
    inputs = {name: TensorData(column[1:]) for name, column in columns.items()}
    return Datum(ModelInput(np.asarray(tokens[:-1], np.int32)), inputs, temperature)


def assert_same_datum(datum: Datum, expected: Datum) -> None:
    assert datum.temperature == expected.temperature
    np.testing.assert_array_equal(datum.model_input.tokens, expected.model_input.tokens)
    assert datum.loss_fn_inputs.keys() == expected.loss_fn_inputs.keys()
    for name, column in expected.loss_fn_inputs.items():
        np.testing.assert_array_equal(datum.loss_fn_inputs[name].data, column.data)
        assert datum.loss_fn_inputs[name].data.dtype == column.data.dtype
