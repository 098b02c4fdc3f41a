"""The orchestrator's part of a step's row of metrics.

Rewards are taken before filtering: the row of step s covers the groups that were trained on in it and those that were
filtered since the row before. Evicted and failed groups are counted, but their rewards are in no row.

  env/all/*, env/<tag>/*  reward/total, turns_per_episode, {ac,ob}_tokens_per_turn, length_cut (share of turns whose
                          answer was cut by length), by_group/frac_{mixed,all_good,all_bad}, and the means of what the
                          environments reported (parse_error: share of turns with a malformed answer)
  stop/<reason>           share of rollouts that ended so
  off_policy/mean, max    age (step - floor) over the groups trained on
  off_policy/token_mean   step - version over their sampled tokens
  off_policy/versions_spanned  largest number of versions within one of their rollouts
  off_policy/mixed_frac   share of their sampled tokens that came from newer weights on KV of older ones (`keep_kv`)
  off_policy/*            in_flight and in_queue: groups sampling, and waiting to be taken, now; the others: groups that
                          ended so since the last row
  ledger/*                the terms of the conservation equation, since the start of the run
  rollout_errors/<type>   failed tries since the last row
  weights/canary_max_diff, reprefill_tokens, time/update  of the update to the version that the step was trained with:
                          largest difference, tokens whose KV was computed again, seconds from its start to the last
                          replica's acknowledgement; time/update_pause: of those the longest that a replica stood still
  perf/rollouts, tokens   rollouts trained on, and their sampled tokens
  perf/inference_idle_s   seconds since then in which no request was in flight
  perf/max_concurrent     most rollouts in flight, now; none in deterministic mode
  perf/kv_used, preemptions  since then: largest share of a KV cache in use, sequences whose KV was given up
  perf/event_loop_lag     largest delay of a timer since then, in seconds
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.advantages import ScoredGroup, is_constant
from trireme.core.weights import UpdateReport

GOOD_REWARD = 0.5
"""A group of equal rewards counts as all good from here on, as all bad below."""
STOP_REASONS = ("stop", "length", "max_seq_len")
ENDINGS = ("requeued", "dropped", "filtered", "failed", "expired_running", "expired_finished")


@dataclass(frozen=True)
class StepSummary:
    """What a step leaves behind: its row of metrics, of each group it was `trained` on problem, index, requeues and
    floor, in the order in which they were taken, and the records of some (`orchestrator.recorder`)."""

    metrics: dict[str, float]
    trained: list[dict[str, Any]]
    records: list[str]


class IdleClock:
    """Adds up the seconds in which nothing was in flight: `with clock:` around each request. `in_flight`: how many."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.in_flight = 0
        self._since = now()
        self._idle = 0.0

    def __enter__(self) -> None:
        if not self.in_flight:
            self._idle += self._now() - self._since
        self.in_flight += 1

    def __exit__(self, *error: object) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._since = self._now()

    def take(self) -> float:
        """Idle seconds since the last call."""
        if not self.in_flight:
            now = self._now()
            self._idle, self._since = self._idle + now - self._since, now
        idle, self._idle = self._idle, 0.0
        return idle


@dataclass
class StepMeter:
    """What happened since the last row."""

    trained: list[ScoredGroup] = field(default_factory=list)
    filtered: list[ScoredGroup] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0

    def row(self, step: int, counts: Mapping[str, int], before: Mapping[str, int], idle_s: float) -> dict[str, float]:
        """The row of `step`; `counts` are the ledger's now, `before` those of the last row."""
        rollouts = [trajectory for scored in self.trained for trajectory in scored.trajectories_G]
        rewarded = sorted(self.trained + self.filtered, key=lambda scored: scored.group.index)
        return {
            **env_metrics(rewarded),
            **off_policy_metrics(step, self.trained, counts, before),
            **{f"ledger/{name}": float(value) for name, value in counts.items()},
            **{f"rollout_errors/{name}": float(count) for name, count in sorted(self.errors.items())},
            "perf/rollouts": float(len(rollouts)),
            "perf/tokens": float(sum(trajectory.num_action_tokens for trajectory in rollouts)),
            "perf/inference_idle_s": idle_s,
            "perf/event_loop_lag": self.lag_s,
        }


def update_metrics(reports: Sequence[UpdateReport], seconds: float) -> dict[str, float]:
    """What one update of all replicas leaves in a row."""
    return {
        "weights/canary_max_diff": max(report.canary_max_diff for report in reports),
        "weights/reprefill_tokens": float(sum(report.reprefill_tokens for report in reports)),
        "time/update": seconds,
        "time/update_pause": max(report.pause_s for report in reports),
    }


def env_metrics(scored_P: Sequence[ScoredGroup]) -> dict[str, float]:
    """`reward/total`, `env/*` and `stop/*` of some groups; at least one."""
    by_tag: dict[str, list[ScoredGroup]] = defaultdict(list)
    for scored in scored_P:
        for tag in dict.fromkeys(("all", *scored.tags)):
            by_tag[tag].append(scored)
    of_all = _means(scored_P)
    means = {tag: of_all if len(part) == len(scored_P) else _means(part) for tag, part in by_tag.items()}
    row = {f"env/{tag}/{name}": value for tag, of_tag in means.items() for name, value in of_tag.items()}
    stops: Counter[str] = Counter(t.stop_reason for scored in scored_P for t in scored.trajectories_G)
    return {
        "reward/total": row["env/all/reward/total"],
        **row,
        **{f"stop/{reason}": stops[reason] / stops.total() for reason in STOP_REASONS},
    }


def _means(scored_P: Sequence[ScoredGroup]) -> dict[str, float]:
    trajectories = [t for scored in scored_P for t in scored.trajectories_G]
    turns = [turn for trajectory in trajectories for turn in trajectory.transitions]
    kinds = Counter(_kind(scored.rewards_G) for scored in scored_P)
    reported = [*(turn.metrics for turn in turns), *(m for scored in scored_P for m in scored.metrics_G)]
    return {
        **_mean_of_each(reported),
        "reward/total": float(np.mean([r for scored in scored_P for r in scored.rewards_G])),
        "turns_per_episode": len(turns) / len(trajectories),
        "ac_tokens_per_turn": sum(len(turn.action) for turn in turns) / len(turns),
        "ob_tokens_per_turn": sum(len(turn.observation) for turn in turns) / len(turns),
        "length_cut": sum(turn.stop_reason == "length" for turn in turns) / len(turns),
        **{f"by_group/frac_{kind}": kinds[kind] / len(scored_P) for kind in ("mixed", "all_good", "all_bad")},
    }


def _kind(rewards_G: Sequence[float]) -> str:
    if not is_constant(rewards_G):
        return "mixed"
    return "all_good" if rewards_G[0] >= GOOD_REWARD else "all_bad"


def _mean_of_each(reported: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in reported:
        for name, value in metrics.items():
            values[name].append(float(value))
    return {name: float(np.mean(column)) for name, column in values.items()}


def off_policy_metrics(
    step: int, trained: Sequence[ScoredGroup], counts: Mapping[str, int], before: Mapping[str, int]
) -> dict[str, float]:
    """`off_policy/*`; `trained` holds at least one group."""
    ages = [step - scored.group.floor for scored in trained]
    rollouts = [trajectory.transitions for scored in trained for trajectory in scored.trajectories_G]
    versions, mixed = (
        np.concatenate([getattr(turn, name) for turns in rollouts for turn in turns]) for name in ("versions", "mixed")
    )
    spanned = [len({identity.version for turn in turns for identity in turn.identities}) for turns in rollouts]
    return {
        "off_policy/mean": float(np.mean(ages)),
        "off_policy/max": float(max(ages)),
        "off_policy/token_mean": float(step - np.mean(versions)),
        "off_policy/versions_spanned": float(max(spanned)),
        "off_policy/mixed_frac": float(np.mean(mixed)),
        "off_policy/in_flight": float(counts["running"]),
        "off_policy/in_queue": float(counts["finished"]),
        **{f"off_policy/{name}": float(counts[name] - before[name]) for name in ENDINGS},
    }
