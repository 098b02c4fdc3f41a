r"""Holds the prompts and answers of a session as a tree, and finds the answer that a new request continues.

    messages   system, user ----- assistant, tool ----- assistant, user ---- ...
    nodes      prompt 0 --- answer 1 --- prompt 3 --- answer 4               the same agent's next turn
                        \-- answer 2                                         the second of two samples
               prompt 5 --- answer 6                                         a sub-agent, or a compacted history

A node holds the tokens that it adds to its parent: the new tokens of a prompt, or the sampled tokens of an answer. The
longest known chain of messages with which a request begins, and which ends with an answer, picks the answer to
continue. The prompt consists of all tokens up to that answer, and then of the renderer's tokens for the new messages.
Text of sampled answers is never tokenised again.

A format may show earlier answers in another way than they were sampled, for example without their thinking. Then the
prompt cannot continue from the sampled tokens. It begins a new branch, which `retokenised` counts, and the sampled
tokens stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from service.sessions.branches import Branch, Logprobs, TokenIds
from service.sessions.chains import ChainPoint, MessageChains
from trireme.core.types import StopReason, VersionSpan, WeightIdentity
from trireme.renderers import Message, Renderer, ToolSpec

ROOT = -1
"""The parent of nodes that begin at the root of the tree, before all tokens."""


@dataclass(frozen=True, eq=False)
class SampledAnswer:
    """One answer: its sampled tokens, and the message that the client reads."""

    message: Message
    """The answer as a message, without its tokens."""
    tokens: TokenIds
    """[T]."""
    logprobs: Logprobs
    """[T]."""
    spans: tuple[VersionSpan, ...]
    """The weights that sampled each part of the tokens; together the spans cover all tokens, in order."""
    stop_reason: StopReason


@dataclass(frozen=True, eq=False)
class TurnGiven:
    """One request with its answers, as `SessionTree.add` takes it."""

    follows: int
    """The answer that its messages continue, or ROOT."""
    parent: int
    """The node with the tokens that begin the prompt: `follows`, or ROOT where the prompt begins anew."""
    messages: tuple[Message, ...]
    """The messages of the request after the answer `follows`."""
    tools: tuple[ToolSpec, ...]
    """The tools, if a conversation begins with this request; empty if the request continues an answer."""
    prompt: TokenIds
    """The prompt's tokens after the tokens up to `parent`."""
    answers: tuple[SampledAnswer, ...]
    options: str = ""
    """`TurnRequest.options` of the request: how to sample its answers. A retry has the same options."""


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node in the tree of a session's messages: a prompt, or an answer to it."""

    parent: int
    """The node with the tokens directly before this node's tokens, or ROOT."""
    branch: int
    start: int
    """The index of its first token in its branch; `end` is the index after its last token."""
    end: int
    point: ChainPoint
    """The chain of messages, from the first one on, that ends with this node."""
    follows: int
    """For a prompt: the answer that its messages continue, or ROOT. For an answer: its prompt."""
    first_weights: WeightIdentity | None
    """The weights of the first sampled token from the root of the tree to the end of this node; None: no token was
    sampled."""
    children: list[int] = field(default_factory=list)
    message: Message | None = None
    """The answer as the client reads it; None for a prompt."""
    spans: tuple[VersionSpan, ...] = ()
    """The weights that sampled each part of an answer, counted from its first token; empty for a prompt."""
    stop_reason: StopReason = "stop"
    delivered: bool = False
    """True if the client has received the answer."""
    turns: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """For a prompt: (options, answers) for each of its requests in order: `TurnRequest.options`, and the nodes of the
    answers."""


@dataclass(frozen=True, eq=False)
class Match:
    """Says which answer in a session's tree a request continues, and how much of the request the tree already has."""

    node: int
    """The answer that the request continues, or ROOT."""
    matched: int
    """Number of messages of the request up to that answer, included; for a plain prompt (text or token ids), number of
    tokens."""
    prompt: int | None
    """The prompt of the newest earlier request with the same messages, if it continues the same answer; None: there is
    none, or this is a plain prompt."""
    same: tuple[int, ...]
    """The prompts of all earlier requests with the same messages, or, for a plain prompt, the same tokens."""
    echo: int
    """The last answer that the request contains, which shows that the client has received it; or ROOT."""


@dataclass
class TreeCounts:
    """Counts the growth of a tree."""

    turns: int = 0
    """Requests that were answered."""
    answers: int = 0
    roots: int = 0
    """Prompts that begin a conversation."""
    forks: int = 0
    """Nodes that got another child."""
    retokenised: int = 0
    """Prompts that continue the messages of an answer, but not its tokens."""


class SessionTree:
    """The prompts and answers of one session as a tree, which holds each token once."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self.branches: list[Branch] = []
        self.counts = TreeCounts()
        self.weights: set[WeightIdentity] = set()
        """All weights that sampled a token of this tree."""
        self.texts: dict[int, str] = {}
        """A cache of answers as text, special tokens included, by node; `service.sessions.prompts` fills it."""
        self._chains = MessageChains()

    # ---- reading

    def match(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Match:
        """Finds the answer that a conversation continues: the last of its answers that is in the tree. Of answers with
        equal messages, prefers one that was delivered to the client."""
        path = self._chains.walk(messages, tools)
        if len(path) == len(messages) + 1:
            same = tuple(path[-1].prompts)
        else:
            same = ()
        node = ROOT
        matched = 0
        for place in range(len(path) - 1, 0, -1):
            if path[place].answers and place < len(messages):
                node = max(path[place].answers, key=lambda node: (self.nodes[node].delivered, node))
                matched = place
                break
        prompts = [prompt for prompt in same if self.nodes[prompt].follows == node]
        return Match(node, matched, prompts[-1] if prompts else None, same, node)

    def render(
        self, match: Match, messages: Sequence[Message], tools: Sequence[ToolSpec], renderer: Renderer
    ) -> tuple[int, TokenIds]:
        """Returns (node, tokens) for the prompt of a request: the node up to which the tree already has the prompt's
        tokens (ROOT: it has none of them), and the prompt's tokens after that node."""
        if match.prompt is not None:
            return self.nodes[match.prompt].parent, self.tokens(match.prompt)
        if match.node == ROOT:
            return ROOT, np.asarray(renderer.generation_prompt(messages, tools), np.int32)
        conversation = [*self._messages_to(match.node), *messages[match.matched :]]
        follows = renderer.continuation(conversation, tools)
        if follows is not None:
            return match.node, np.asarray(follows, np.int32)
        before = self.path_tokens(self.nodes[match.node].follows)
        conversation[match.matched - 1] = cast(Message, {**conversation[match.matched - 1], "prompt": before.tolist()})
        prompt = np.asarray(renderer.generation_prompt(conversation, tools), np.int32)
        path = self.path_tokens(match.node)
        if np.array_equal(prompt[: len(path)], path):
            return match.node, prompt[len(path) :]
        return ROOT, prompt

    def answer(self, node: int) -> SampledAnswer:
        """Returns the answer at a node. Its arrays are views of the tree, not copies."""
        entry = self.nodes[node]
        assert entry.message is not None
        return SampledAnswer(entry.message, self.tokens(node), self.logprobs(node), entry.spans, entry.stop_reason)

    def tokens(self, node: int) -> TokenIds:
        """Returns the tokens of this node only, as a view."""
        entry = self.nodes[node]
        return self.branches[entry.branch].tokens[entry.start : entry.end]

    def logprobs(self, node: int) -> Logprobs:
        """Returns the log-probabilities of the tokens of this node only, as a view."""
        entry = self.nodes[node]
        return self.branches[entry.branch].logprobs[entry.start : entry.end]

    def path_tokens(self, node: int) -> TokenIds:
        """Returns all tokens from the root of the tree to the end of a node, [T]; none for ROOT."""
        return self.joined(node, np.empty(0, np.int32))

    def joined(self, node: int, behind: TokenIds) -> TokenIds:
        """Returns a new array: all tokens from the root of the tree to the end of `node`, followed by the tokens in
        `behind`."""
        pieces = [behind]
        while node != ROOT:
            branch = self.branches[self.nodes[node].branch]
            pieces.append(branch.tokens[: self.nodes[node].end])
            node = branch.origin
        return np.concatenate(pieces[::-1])

    def first_weights(self, node: int) -> WeightIdentity | None:
        """Returns the weights that sampled the first sampled token on the path from the root of the tree to the end of
        a node; None if no token on this path was sampled."""
        if node == ROOT:
            return None
        return self.nodes[node].first_weights

    def has_any(self, answers: Sequence[int]) -> bool:
        """Returns True if at least one of the nodes `answers` was delivered to the client."""
        return any(self.nodes[node].delivered for node in answers)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the tree."""
        return sum(branch.length for branch in self.branches)

    def _messages_to(self, node: int) -> list[Message]:
        """Returns the messages of the conversation up to the answer `node`, included. Messages that were sampled have
        their thinking and their tokens."""
        messages: list[Message] = []
        answer: TreeNode | None = self.nodes[node]
        point: ChainPoint | None = self.nodes[node].point
        while point is not None and point.message is not None:
            if answer is not None and answer.point is point:
                entry: Any = {**(answer.message or {}), "tokens": self.tokens(node).data}
                messages.append(entry)
                node = self.nodes[answer.follows].follows
                answer = self.nodes[node] if node != ROOT else None
            else:
                messages.append(point.message)
            point = point.before
        return messages[::-1]

    # ---- growing

    def add(self, turn: TurnGiven) -> tuple[int, ...]:
        """Adds a request with its answers to the tree. Returns the nodes of the answers."""
        if turn.follows != ROOT:
            follows = self.nodes[turn.follows].point
        else:
            follows = None
        point = self._chains.extend(follows, turn.messages, turn.tools)
        prompt = self._prompt_node(turn, point)
        nodes = tuple(self._add_answer(prompt, point, answer) for answer in turn.answers)
        self.nodes[prompt].turns.append((turn.options, nodes))
        self.counts.turns += 1
        return nodes

    def _prompt_node(self, turn: TurnGiven, point: ChainPoint) -> int:
        """Returns the node of the prompt of `turn`: the node of an earlier prompt with the same tokens and the same
        place, or else a new node."""
        for candidate in point.prompts:
            node = self.nodes[candidate]
            same = (node.parent, node.follows) == (turn.parent, turn.follows)
            if same and np.array_equal(self.tokens(candidate), turn.prompt):
                return candidate
        self.counts.roots += turn.follows == ROOT
        self.counts.retokenised += turn.parent != turn.follows
        new_node = self._grow(turn.parent, turn.prompt, None, point)
        self.nodes[new_node].follows = turn.follows
        self.nodes[new_node].first_weights = self.first_weights(turn.parent)
        point.prompts.append(new_node)
        return new_node

    def _add_answer(self, prompt: int, prompt_point: ChainPoint, answer: SampledAnswer) -> int:
        read = cast(Message, {key: value for key, value in answer.message.items() if key != "thinking"})
        point = self._chains.extend(prompt_point, [read])
        new_node = self._grow(prompt, answer.tokens, answer.logprobs, point)
        node = self.nodes[new_node]
        node.follows = prompt
        node.first_weights = self.first_weights(prompt) or answer.spans[0].identity
        node.message = answer.message
        node.spans = answer.spans
        node.stop_reason = answer.stop_reason
        point.answers.append(new_node)
        self.weights.update(span.identity for span in answer.spans)
        self.counts.answers += 1
        return new_node

    def _grow(
        self,
        parent: int,
        tokens: TokenIds,
        logprobs: Logprobs | None,
        point: ChainPoint,
    ) -> int:
        """Adds a node with these tokens and returns it. The tokens are appended to the branch of `parent` if `parent`
        is the last node of that branch; otherwise they begin a new branch."""
        new_node = len(self.nodes)
        number = len(self.branches)
        if parent != ROOT:
            before = self.nodes[parent]
            if self.branches[before.branch].length == before.end and self.branches[before.branch].nodes[-1] == parent:
                number = before.branch
            self.counts.forks += bool(before.children)
            before.children.append(new_node)
        if number == len(self.branches):
            self.branches.append(Branch(parent))
        branch = self.branches[number]
        branch.append(new_node, tokens, logprobs)
        self.nodes.append(TreeNode(parent, number, branch.length - len(tokens), branch.length, point, ROOT, None))
        return new_node
