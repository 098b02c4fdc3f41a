"""Advantages, filters, and turns merged into datums: against exact numbers, and for any trajectory."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from orchestrator_fakes import trajectory_to_data
from whole_turns import trajectory_of, turn_of

from orchestrator.advantages import ScoredGroup, build_minibatch, compute_advantages, is_constant, keep_whole
from orchestrator.ledger import Group
from trireme.config.orchestrator import AdvantageKind, OrchestratorConfig
from trireme.core.batch import Batch, LayOut
from trireme.core.normalization import LossNormalization, Normalization
from trireme.core.prefixes import Forest, Numbers
from trireme.core.types import Minibatch

VECTORS = json.loads((Path(__file__).parents[2] / "oracles" / "vectors.json").read_text())


def test_trajectory_to_data_vector() -> None:
    vector = VECTORS["trajectory_to_data"]
    turns = [turn_of(t["ob"], t["ac"], logprobs=np.asarray(t["logprobs"], np.float32)) for t in vector["transitions"]]
    data_D = trajectory_to_data(trajectory_of(turns), vector["advantage"], temperature=0.7)
    assert len(data_D) == len(vector["datums"])
    for datum, expected in zip(data_D, vector["datums"], strict=True):
        assert datum.temperature == 0.7
        assert datum.model_input.to_ints() == expected["input"]
        assert datum.loss_fn_inputs["target_tokens"].tolist() == expected["target"]
        for column in ("logprobs", "advantages", "mask"):
            np.testing.assert_array_equal(datum.loss_fn_inputs[column], np.asarray(expected[column], np.float32))


def test_dropping_the_stop_token_breaks_extension() -> None:
    vector = VECTORS["dropping_the_sampled_stop_token_breaks_extension"]
    turns = [turn_of(t["ob"], t["ac"]) for t in vector["transitions"]]
    assert len(trajectory_to_data(trajectory_of(turns), 1.0, 1.0)) == vector["num_datums"]


@pytest.mark.parametrize("vector", VECTORS["compute_advantages"])
def test_compute_advantages_vectors(vector: dict[str, list[float]]) -> None:
    advantages_G = compute_advantages(vector["rewards"], "mean")
    assert advantages_G.dtype == np.float32
    np.testing.assert_array_equal(advantages_G, np.asarray(vector["advantages"], np.float32))


def test_other_advantages() -> None:
    np.testing.assert_allclose(compute_advantages([0, 0, 1, 1], "std"), [-1, -1, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(compute_advantages([0, 0, 3], "leave_one_out"), [-1.5, -1.5, 3], rtol=1e-6)
    assert np.abs(compute_advantages([0.1, 0.1, 0.3 - 0.2], "std")).max() < 0.1, "rounding is no signal"
    np.testing.assert_allclose(compute_advantages([1e8, 1e8 + 1], "std"), [-1, 1], rtol=1e-5)


REWARDS = st.floats(-1e9, 1e9, allow_subnormal=False)
KINDS = st.sampled_from(get_args(AdvantageKind))


@given(REWARDS, st.integers(2, 20), KINDS)
@example(0.7, 7, "std")
@example(10.1, 7, "std")
@example(1000.1, 3, "std")
def test_equal_rewards_have_no_advantage(reward: float, size: int, kind: AdvantageKind) -> None:
    assert not compute_advantages([reward] * size, kind).any()


@given(st.lists(st.floats(-1, 1, width=16), min_size=2, max_size=20), REWARDS, KINDS)
@example([0.0, 1.0], 1e8, "std")
@example([0.0] * 6 + [2**-24], 0.7, "leave_one_out")
def test_rewards_that_differ_are_better_and_worse(noise_G: list[float], offset: float, kind: AdvantageKind) -> None:
    """However little they differ beside their size: the filter keeps such a group."""
    rewards_G = [offset + noise for noise in noise_G]
    assume(not is_constant(rewards_G))
    advantages_G = compute_advantages(rewards_G, kind)
    assert advantages_G.min() < 0 < advantages_G.max()
    assert advantages_G[np.argmax(rewards_G)] == advantages_G.max()
    assert advantages_G[np.argmin(rewards_G)] == advantages_G.min()


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=20), KINDS)
@example([0.0, 5e-324], "mean")
@example([1e-46, -1e-45, 0.0, 0.0], "leave_one_out")
@example([0.0, 1e-40, 0.0], "std")
@example([1e30, 1.0, 0.0], "mean")
@example([1e8, 1e8 + 1], "mean")
@example([1e30, 1e30 - 2**47], "std")
def test_advantages_are_never_of_one_sign(rewards_G: list[float], kind: AdvantageKind) -> None:
    advantages_G = compute_advantages(rewards_G, kind)
    assert np.isfinite(advantages_G).all()
    if is_constant(rewards_G):
        assert not advantages_G.any()
    else:
        assert advantages_G.min() < 0 < advantages_G.max()


@pytest.mark.parametrize("vector", VECTORS["remove_constant_reward_groups"])
def test_groups_of_constant_rewards_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    varied = [rewards_G for rewards_G in vector["groups"] if not is_constant(rewards_G)] or vector["groups"][:1]
    assert len(varied) == vector.get("kept_count", len(vector.get("kept", [])))
    assert varied == vector.get("kept", vector["groups"][:1])


def test_an_empty_observation_is_refused() -> None:
    with pytest.raises(ValueError, match="empty observation"):
        trajectory_to_data(trajectory_of([turn_of([], [1, 2])]), 1.0, 1.0)


def minibatch_of(
    scored_P: list[ScoredGroup], kind: LossNormalization = "token_mean", overlong_filter: bool = False
) -> Minibatch:
    options = OrchestratorConfig(batch_size=4, overlong_filter=overlong_filter)
    return build_minibatch(5, scored_P, options, Normalization(kind, 8), last=True)


def test_overlong_answers_have_no_mask() -> None:
    group = Group(0, "0.0.0", floor=3)
    cut, whole = trajectory_of([turn_of([1], [2, 3])], "length"), trajectory_of([turn_of([1], [4])])
    scored = ScoredGroup(group, (cut, whole), (0.0, 1.0), ({}, {}), ("sort",), 1.0)
    columns = minibatch_of([scored]).batch.columns
    masked = minibatch_of([scored], overlong_filter=True).batch.columns
    assert columns["mask"].tolist() == [1, 1, 1]
    assert masked["mask"].tolist() == [0, 0, 1]
    assert columns["advantages"].tolist() == [-0.5, -0.5, 0.5]
    assert masked["advantages"].tolist() == [0, 0, 0.5], "the trainer refuses advantages where the mask is 0"


def test_a_minibatch_says_where_it_comes_from() -> None:
    two_datums = trajectory_of([turn_of([1], [2], versions=3), turn_of([9], [8], versions=4)])
    one_datum = trajectory_of([turn_of([1], [2, 3], versions=5)])
    scored_P = [
        ScoredGroup(Group(0, "a", floor=3), (two_datums, one_datum), (0.0, 1.0), ({}, {}), (), 1.0),
        ScoredGroup(Group(1, "b", floor=4), (one_datum, one_datum), (0.0, 1.0), ({}, {}), (), 1.0),
    ]
    minibatch = minibatch_of(scored_P)
    assert minibatch.provenance.step == 5
    assert minibatch.batch.sequences.tolist() == [0, 0, 1, 2, 3]
    assert minibatch.provenance.floors.tolist() == [3, 3, 3, 4, 4]
    assert [i.version for i in minibatch.provenance.identities] == [3, 4, 5]
    assert (minibatch.num_groups, minibatch.divisor, len(minibatch.batch)) == (2, 8, 5)


def test_prefixes_are_shared_within_a_group() -> None:
    """By both answers to a prompt, and by the turn after the first; not by another group with the same prompt."""
    prompt = list(range(20))
    turns = [turn_of(prompt, [30, 31]), turn_of([*prompt, 9], [32])]
    answers = (trajectory_of(turns), trajectory_of(turns[:1]))
    scored_P = [ScoredGroup(Group(number, "a", floor=3), answers, (0.0, 1.0), ({}, {}), (), 1.0) for number in (0, 1)]
    forests = []

    def keep(forest: Forest, sequences: Numbers, lay_out: LayOut) -> Batch:
        forests.append(forest)
        return keep_whole(forest, sequences, lay_out)

    options = OrchestratorConfig(batch_size=4)
    build_minibatch(5, scored_P, options, Normalization("token_mean", 8), last=True, keep=keep)
    [forest] = forests
    assert forest.lengths.tolist() == [21] * 6
    assert forest.order.tolist() == [1, 0, 2, 4, 3, 5]
    assert forest.shared.tolist() == [0, 20, 21] * 2


def test_a_rollout_weighs_as_one_in_however_many_datums_it_is() -> None:
    """GRPO's mean over sequences of the mean over their tokens; one that was cut by length is not among them."""
    broken = trajectory_of([turn_of([1], [2, 3, 4]), turn_of([9], [8])])
    whole, cut = trajectory_of([turn_of([1], [2, 3])]), trajectory_of([turn_of([1], [4])], "length")
    scored = ScoredGroup(Group(0, "a", floor=3), (broken, whole, cut), (0.0, 1.0, 0.0), ({},) * 3, (), 1.0)
    minibatch = minibatch_of([scored], "sequence_mean_token_mean", overlong_filter=True)
    assert minibatch.batch.columns["mask"].tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0]
    assert minibatch.divisor == 2
    assert minibatch_of([scored], "sequence_mean_token_sum_norm", overlong_filter=True).divisor == 2 * 8


# ---- inputs and expected numbers of other projects' tests (tests/conformance/numbers.toml)


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("leave_one_out", [6.0, 3.0], [3.0, -3.0]),
        ("leave_one_out", [9.0, 12.0], [-3.0, 3.0]),
        ("mean", [6.0, 3.0], [1.5, -1.5]),
        ("mean", [9.0, 12.0], [-1.5, 1.5]),
        ("mean", [0.7], [0.0]),
        ("mean", [1.0, 1.0], [0.0, 0.0]),
        ("mean", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_advantages(kind: AdvantageKind, rewards: list[float], expected: list[float]) -> None:
    assert compute_advantages(rewards, kind).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_mean_of_advantages_is_zero() -> None:
    assert sum(compute_advantages([1.0, 0.5, 0.8], "mean")) == pytest.approx(0.0, abs=1e-6)
