"""One session: an agent's tree, its rewards and its end, all restored from records; and the export of a session.

    branch 0   prompt | answer | prompt | answer           segment 0: all of it
    branch 1            ^ answer | prompt | answer         segment 1: the first prompt again, observed, and then its own

Each branch becomes a segment of a trajectory (`orchestrator.trajectory`), which begins with all tokens that come before
the branch. These are only observed there, so that each sampled token is trained exactly once: in the branch that holds
it. An answer that was not delivered is masked: the agent has not acted on it, so no reward says anything about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.requests import TurnRequest
from service.sessions.records import (
    AnswersDelivered,
    RewardGiven,
    SessionEnded,
    SessionOpened,
    SessionRecord,
    TurnAnswered,
)
from service.sessions.tree import ROOT, Match, SessionTree
from trireme.core.agents import AgentTurn
from trireme.core.staleness import deadline

LOST = "store: the machine was started again, so that turns may be missing"
"""The reason for which open sessions end when the store may lack some of their records."""


@dataclass(frozen=True)
class SessionLimits:
    """The limits of one session."""

    turns: int
    """The most requests that are answered."""
    tokens: int
    """No turn begins once the session's tree holds this number of tokens."""
    seconds: float
    """Seconds after its opening, after which it is ended."""
    idle_s: float
    """Seconds without a request, after which it is ended, because its agent seems to be gone."""
    kept_s: float
    """Seconds after its end, after which it is forgotten, exported or not."""


@dataclass(frozen=True, eq=False)
class SessionExport:
    """The training data of an ended session: its turns, reward and metrics."""

    problem: str
    temperature: float
    """The temperature at which all answers were sampled."""
    turns: tuple[AgentTurn, ...]
    """The answers with their prompts, segment by segment; empty if no request was answered."""
    reward: float
    """The sum of all rewards of the session. Each turn has its part of them."""
    metrics: Mapping[str, float]


@dataclass
class RequestCounts:
    """Counts retries, refused turns and overruled requests of one session, since this process began."""

    retries: int = 0
    """Retries that got answers to an earlier request, which were stored or still being sampled."""
    refused: int = 0
    """Turns that were refused because the session had ended, or because it could not have the sampled answers."""
    overruled: int = 0
    """Requests that wanted another sampling distribution than the run's."""


@dataclass(eq=False)
class RunningTurn:
    """A turn that is being sampled."""

    request: TurnRequest
    task: asyncio.Task[tuple[int, ...]]
    callers: list[Callable[..., None] | None]
    """One entry for each caller that waits for the turn: the function that gets parts of the answers for this caller,
    or None."""


@dataclass
class AgentSession:
    """The state of a session, which follows from its records, and the turns that this process is sampling for it."""

    opened: SessionOpened
    tree: SessionTree = field(default_factory=SessionTree)
    rewards: dict[int | None, RewardGiven] = field(default_factory=dict)
    """The newest reward of each answer, and of the whole session (None)."""
    end_record: SessionEnded | None = None
    last: float = 0.0
    """The time of its newest record."""
    heard: float = 0.0
    """The time at which this process last received a request of the session's agent, or replied to one."""
    requests: RequestCounts = field(default_factory=RequestCounts)
    running: list[RunningTurn] = field(default_factory=list)

    def apply(self, record: TurnAnswered | AnswersDelivered | RewardGiven | SessionEnded) -> tuple[int, ...]:
        """Applies the next record to the session. Returns the nodes of the answers in the record."""
        self.last = record.at
        match record:
            case TurnAnswered():
                return self.tree.add(record.turn)
            case AnswersDelivered():
                for node in record.nodes:
                    self.tree.nodes[node].delivered = True
            case RewardGiven():
                self.rewards[record.node] = record
            case SessionEnded():
                self.end_record = self.end_record or record
        return ()

    def is_answer(self, node: int) -> bool:
        """Returns True if `node` is the node of an answer in this session's tree."""
        return 0 <= node < len(self.tree.nodes) and self.tree.nodes[node].message is not None

    def stored(self, match: Match, options: str) -> tuple[int, ...] | None:
        """Returns the nodes of the stored answers that a retry gets: the answers to an earlier request with the same
        prompt and the same `options`. Of several such requests, takes the oldest one with no delivered answer, else the
        newest one. Returns None if no such request was answered."""
        turns = [turn for prompt in match.same for turn in self.tree.nodes[prompt].turns]
        same = [nodes for earlier, nodes in turns if earlier == options]
        undelivered = [nodes for nodes in same if not self.tree.has_any(nodes)]
        if undelivered:
            return undelivered[0]
        if same:
            return same[-1]
        return None

    def limit_reached(self, limits: SessionLimits, now: float) -> str | None:
        """Returns which limit the session has reached, as a reason why no further turn may begin at the time `now`;
        None if it has reached no limit."""
        turns = self.tree.counts.turns + len(self.running)
        tokens = self.tree.num_tokens
        seconds = now - self.opened.at
        if turns >= limits.turns:
            return f"turns: it had {turns} of at most {limits.turns}"
        if tokens >= limits.tokens:
            return f"tokens: it holds {tokens} of at most {limits.tokens}"
        if seconds >= limits.seconds:
            return f"seconds: it was opened {seconds:.0f} s ago, at most {limits.seconds:.0f} are allowed"
        return None

    @property
    def oldest_version(self) -> int | None:
        """The version of the session's oldest token; None if the session has no answer yet. The session's age counts
        from this version."""
        return min((weights.version for weights in self.tree.weights), default=None)

    def export(self, max_steps_off_policy: int | None = None) -> SessionExport:
        """Returns the session's answers, branch by branch (one segment each), and its rewards.

        `max_steps_off_policy`: the greatest age allowed; None: there is no bound. If a token of an answer has a version
        more than `max_steps_off_policy` above the version of the session's oldest token, the answer is marked as out of
        bound and does not count in the loss. This happens if the weights change while the answer is sampled.
        """
        answers = [node for branch in self.tree.branches for node in branch.nodes if self.is_answer(node)]
        reward = sum(record.value for record in self.rewards.values())
        turns = tuple(self._exported(node, node == max(answers), max_steps_off_policy) for node in answers)
        return SessionExport(self.opened.problem, self.opened.temperature, turns, reward, self._metrics())

    def _exported(self, answer: int, last: bool, max_steps_off_policy: int | None) -> AgentTurn:
        tree = self.tree
        node = tree.nodes[answer]
        newest = max((span.identity.version for span in node.spans), default=self.opened.floor)
        oldest = self.oldest_version
        bound = newest
        if oldest is not None and max_steps_off_policy is not None:
            bound = deadline(oldest, max_steps_off_policy)
        prompt = tree.nodes[node.follows]
        before = prompt.parent  # an answer of this branch, unless the branch begins with it or with this prompt
        follows = before != ROOT and prompt.branch == node.branch == tree.nodes[before].branch
        return AgentTurn(
            tree.tokens(node.follows) if follows else tree.path_tokens(node.follows),
            follows,
            answer,
            tree.tokens(answer),
            tree.logprobs(answer),
            node.spans,
            node.stop_reason,
            self._reward_of(answer, last),
            node.delivered,
            newest <= bound,
        )

    def _reward_of(self, node: int, last: bool) -> float:
        """Returns the reward of the answer `node`. If it is the session's `last` answer, adds the reward of the whole
        session."""
        places = (node, None) if last else (node,)
        return sum(record.value for place, record in self.rewards.items() if place in places)

    def _metrics(self) -> dict[str, float]:
        summary = self.summary()
        names = (*vars(self.tree.counts), "retries", "overruled", "tokens", "sampled")
        metrics = {name: float(value) for record in self.rewards.values() for name, value in record.metrics.items()}
        metrics |= {f"session/{name}": float(summary[name]) for name in names}
        return metrics | {"session/undelivered": float(summary["answers"] - summary["delivered"])}

    def summary(self) -> dict[str, Any]:
        """Describes the session as JSON values. Safe while another thread adds to the session."""
        answers = [node for node in list(self.tree.nodes) if node.message is not None]
        rewards = [record.value for record in list(self.rewards.values())]
        return {
            "session": self.opened.session,
            "problem": self.opened.problem,
            "floor": self.opened.floor,
            "opened": self.opened.at,
            "last": self.last,
            "open": self.end_record is None,
            "reason": self.end_record.reason if self.end_record else None,
            "tokens": self.tree.num_tokens,
            **vars(self.tree.counts),
            **vars(self.requests),
            "delivered": sum(node.delivered for node in answers),
            "sampled": sum(node.end - node.start for node in answers),
            "reward": sum(rewards) if rewards else None,
        }


class SessionBook:
    """All sessions that were not forgotten, by name, in the state that follows from their records."""

    def __init__(self) -> None:
        self.sessions: dict[str, AgentSession] = {}

    def apply(self, record: SessionRecord) -> tuple[int, ...]:
        """Applies the next record to its session. Returns the nodes of the answers in the record."""
        if isinstance(record, SessionOpened):
            self.sessions[record.session] = AgentSession(record, last=record.at)
            return ()
        return self.sessions[record.session].apply(record)
