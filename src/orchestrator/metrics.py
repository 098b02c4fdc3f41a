"""Makes the orchestrator's part of a step's row of metrics.

Rewards are taken before filtering: the row of step s covers the groups trained on in step s and the groups filtered
since the row before. Dropped and failed groups are counted, but their rewards are in no row.

  env/all/*, env/<tag>/*  reward/total, turns_per_episode, {ac,ob}_tokens_per_turn, length_cut (share of turns with an
                          answer cut by length), by_group/frac_{mixed,all_good,all_bad}, and the means of the
                          environments' metrics (parse_error: share of turns with a malformed answer)
  stop/<reason>           share of rollouts that ended for this reason
  off_policy/mean, max    age (step - floor) over the groups trained on
  off_policy/token_mean   step - version over their sampled tokens
  off_policy/versions_spanned  largest number of versions within one of their rollouts
  off_policy/mixed_frac   share of their sampled tokens that came from newer weights on KV of older ones (`keep_kv`)
  off_policy/*            in_flight, in_queue: groups sampling now, and waiting to be taken; others: groups that ended
                          so since the last row
  waste/<cause>           tokens wasted since the last row: of groups that were dropped while they
                          ran (`expired_running`, in whole answers) or had finished (`expired_finished`), of groups
                          that were `filtered`, and of `failed` groups and tries
  length/trained          mean tokens of the rollouts trained on
  ledger/*                the terms of the conservation equation, since the start of the run
  rollout_errors/<type>   failed tries since the last row
  weights/canary_max_diff, canary_mean_diff, reprefill_tokens, time/update  of the update to the version that the step
                          was trained with: largest and mean difference, tokens with KV computed again, seconds
                          from its start to the last replica's acknowledgement; time/update_pause: the longest that a
                          replica stood still meanwhile. Missing if no replica took that version (colocated)
  perf/rollouts, tokens   rollouts trained on, and their sampled tokens
  perf/inference_idle_s   seconds without any request in flight, counted since the last row
  perf/max_concurrent     the limit of rollouts in flight now; not in deterministic mode
  perf/kv_used, preemptions  since the last row: largest share of a KV cache in use, sequences with evicted KV
  perf/event_loop_lag     largest delay of a timer since the last row, in seconds
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.advantages import ScoredGroup, is_constant
from trireme.core.weights import UpdateReport

GOOD_REWARD = 0.5
"""A group with equal rewards counts as all good if they are at least this, else as all bad."""
STOP_REASONS = ("stop", "length", "max_seq_len")
ENDINGS = ("resampled", "dropped", "filtered", "failed", "expired_running", "expired_finished")


@dataclass
class StepMeter:
    """Collects the metrics between two rows."""

    counts: dict[str, int]
    """The result of `Ledger.counts` when the last row was made."""
    trained: list[ScoredGroup] = field(default_factory=list)
    """Groups taken for training since the last row."""
    filtered: list[ScoredGroup] = field(default_factory=list)
    """Groups filtered since the last row."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed tries, by the type of their error."""
    lag_s: float = 0.0
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    """{version: metrics of the update to it}, until `take` returns them. The next update may end before that."""

    def note_lag(self, seconds: float) -> None:
        """Records that the event loop was late by `seconds`. Each row of metrics has the largest delay since the last
        row."""
        self.lag_s = max(self.lag_s, seconds)

    def note_update(self, version: int, reports: Sequence[UpdateReport], seconds: float) -> None:
        """Stores the metrics of the update to `version` until `take` puts them into the row of metrics of step
        `version`. `reports`: one for each replica; `seconds`: from the start of the update to the last replica's
        acknowledgement."""
        self.updates[version] = {
            "weights/canary_max_diff": max(report.drift.largest for report in reports),
            "weights/canary_mean_diff": max(report.drift.mean for report in reports),
            "weights/reprefill_tokens": float(sum(report.reprefill_tokens for report in reports)),
            "perf/weights_received_mb": max(report.received for report in reports) / 1e6,
            "perf/weights_refused": float(sum(report.refused for report in reports)),
            "time/update": seconds,
            "time/update_pause": max(report.pause_s for report in reports),
        }

    def take(self, step: int, counts: dict[str, int], idle_s: float) -> dict[str, float]:
        """Returns the row of metrics of `step`, and begins the next row. `counts`: the present `Ledger.counts()`.
        `idle_s`: the seconds without a request in flight, counted since the last row."""
        rewarded = sorted(self.trained + self.filtered, key=lambda scored: scored.group.index)
        rollouts = sum(len(scored.trajectories_G) for scored in self.trained)
        tokens = sum(scored.tokens for scored in self.trained)
        row = {
            **env_metrics(rewarded),
            **self._off_policy(step, counts),
            **{f"ledger/{name}": float(value) for name, value in counts.items()},
            **{f"rollout_errors/{name}": float(count) for name, count in sorted(self.errors.items())},
            "waste/filtered": float(sum(scored.tokens for scored in self.filtered)),
            "length/trained": tokens / rollouts,
            "perf/rollouts": float(rollouts),
            "perf/tokens": float(tokens),
            "perf/inference_idle_s": idle_s,
            "perf/event_loop_lag": self.lag_s,
            **self.updates.pop(step, {}),
        }
        self.counts = counts
        self.lag_s = 0.0
        self.trained, self.filtered, self.errors = [], [], Counter()
        return row

    def _off_policy(self, step: int, counts: Mapping[str, int]) -> dict[str, float]:
        ages = [step - scored.group.floor for scored in self.trained]
        spans = [span for scored in self.trained for turn in scored.turns for span in turn.spans]
        lengths = np.asarray([span.end - span.start for span in spans])
        spanned = max(len(trajectory.versions) for scored in self.trained for trajectory in scored.trajectories_G)
        return {
            "off_policy/mean": float(np.mean(ages)),
            "off_policy/max": float(max(ages)),
            "off_policy/token_mean": float(
                step - np.average([span.identity.version for span in spans], weights=lengths)
            ),
            "off_policy/versions_spanned": float(spanned),
            "off_policy/mixed_frac": float(np.average([span.mixed for span in spans], weights=lengths)),
            "off_policy/in_flight": float(counts["running"]),
            "off_policy/in_queue": float(counts["finished"]),
            **{f"off_policy/{name}": float(counts[name] - self.counts[name]) for name in ENDINGS},
        }


def env_metrics(scored_P: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns the metrics `reward/total`, `env/*` and `stop/*` of the groups `scored_P`. There must be at least one
    group."""
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
    rewards = [reward for scored in scored_P for reward in scored.rewards_G]
    turns = [turn for scored in scored_P for turn in scored.turns]
    kinds = Counter(_kind(scored.rewards_G) for scored in scored_P)
    reported: dict[str, list[float]] = defaultdict(list)
    for metrics in (*(turn.metrics for turn in turns), *(m for scored in scored_P for m in scored.metrics_G)):
        for name, value in metrics.items():
            reported[name].append(float(value))
    return {
        **{name: float(np.mean(values)) for name, values in reported.items()},
        "reward/total": float(np.mean(rewards)),
        "turns_per_episode": len(turns) / len(rewards),
        "ac_tokens_per_turn": sum(turn.sampled for turn in turns) / len(turns),
        "ob_tokens_per_turn": sum(turn.observed for turn in turns) / len(turns),
        "length_cut": sum(turn.stop_reason == "length" for turn in turns) / len(turns),
        **{f"by_group/frac_{kind}": kinds[kind] / len(scored_P) for kind in ("mixed", "all_good", "all_bad")},
    }


def _kind(rewards_G: Sequence[float]) -> str:
    if not is_constant(rewards_G):
        return "mixed"
    if rewards_G[0] >= GOOD_REWARD:
        return "all_good"
    return "all_bad"
