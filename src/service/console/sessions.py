"""Sessions of a run for the console: a list, the tree of one, and the tokens up to one of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.asked import RequestRefused
from service.console.journal import JournalReader, SessionSummary
from service.console.tokens import TokenPiece, tokens_page
from service.sessions.session import AgentSession
from service.sessions.tree import ROOT, TreeNode
from trireme.core.tokenizer import Decode

MOST_SESSIONS = 200
MOST_NODES = 2000
PREVIEW_CHARS = 400


class RunSessions:
    """The sessions in the journal below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._journal = JournalReader(directory)
        self._last: tuple[tuple[str, int], AgentSession, int] | None = None

    def listing(self) -> dict[str, Any]:
        """Lists the sessions that were heard of last, the newest first, and how many others there are."""
        unread = self._journal.look()
        newest = sorted(self._journal.sessions.items(), key=lambda item: item[1].last, reverse=True)
        return {
            "sessions": [_summary(name, known) for name, known in newest[:MOST_SESSIONS]],
            "others": max(0, len(newest) - MOST_SESSIONS),
            "unread": unread,
        }

    def tree(self, name: str) -> dict[str, Any]:
        """Describes a session and its nodes, without their tokens. Raises RequestRefused."""
        session, left_out = self._session(name)
        nodes = [_node(session, number) for number in range(min(len(session.tree.nodes), MOST_NODES))]
        return {
            **_summary(name, self._journal.sessions[name]),
            "counts": vars(session.tree.counts),
            "nodes": nodes,
            "nodes_left_out": len(session.tree.nodes) - len(nodes),
            "records_left_out": left_out,
        }

    def tokens(self, name: str, node: int, start: int, decode: Decode | None) -> dict[str, Any]:
        """Returns a page of all tokens up to a node, with its own. Raises RequestRefused."""
        session, _ = self._session(name)
        nodes = session.tree.nodes
        if not 0 <= node < len(nodes):
            raise _missing(f"node {node} of a session with {len(nodes)}", "one that the tree has")
        path = []
        while node != ROOT:
            path.append(node)
            node = nodes[node].parent
        pieces = [_piece(session, number) for number in reversed(path)]
        return tokens_page(pieces, start, decode) | {"floor": session.opened.floor}

    def _session(self, name: str) -> tuple[AgentSession, int]:
        """Returns a session as it is now. The last one is kept, as its tokens are asked for page by page."""
        self._journal.look()
        known = self._journal.sessions.get(name)
        key = name, len(known.places) if known else 0
        if self._last is None or self._last[0] != key:
            found = self._journal.session(name)
            if found is None:
                raise _missing(f"the session {name!r}", "one that the journal has and that was not forgotten")
            self._last = key, *found
        return self._last[1], self._last[2]


def _missing(given: str, expected: str) -> RequestRefused:
    return RequestRefused(f"given: {given}; expected: {expected}; to do: choose one of the list", status=404)


def _summary(name: str, known: SessionSummary) -> dict[str, Any]:
    return {
        "session": name,
        "problem": known.opened.problem,
        "floor": known.opened.floor,
        "opened": known.opened.at,
        "last": known.last,
        "turns": known.turns,
        "answers": known.answers,
        "delivered": known.delivered,
        "sampled": known.sampled,
        "reward": sum(known.rewards.values()) if known.rewards else None,
        "ended": known.ended,
    }


def _node(session: AgentSession, number: int) -> dict[str, Any]:
    tree, node = session.tree, session.tree.nodes[number]
    given = session.rewards.get(number)
    told: dict[str, Any] = {
        "node": number,
        "parent": node.parent,
        "tokens": node.end - node.start,
        "strand": node.strand,
        **_preview(node.message or node.point.message or {}),
    }
    if node.message is None:
        return told | {"kind": "prompt", "begins": node.follows == ROOT, "anew": node.parent != node.follows}
    return told | {
        "kind": "answer",
        "versions": _versions(node),
        "stop_reason": node.stop_reason,
        "delivered": node.delivered,
        "reward": given.value if given else None,
        "mean_logprob": float(tree.logprobs(number).mean()) if node.end > node.start else None,
    }


def _versions(node: TreeNode) -> list[tuple[int, int]]:
    return [(span.identity.version, span.end - span.start) for span in node.spans]


def _preview(message: Mapping[str, Any]) -> dict[str, str]:
    """Returns the role and the beginning of a message."""
    calls = "".join(f" [calls {call['name']}]" for call in message.get("tool_calls") or () if "name" in call)
    return {"role": str(message.get("role", "")), "preview": str(message.get("content", ""))[:PREVIEW_CHARS] + calls}


def _piece(session: AgentSession, number: int) -> TokenPiece:
    node, tokens = session.tree.nodes[number], session.tree.tokens(number)
    if node.message is None:
        return TokenPiece("observed", tokens.tolist())
    delivered = "" if node.delivered else "; not delivered, so not in the loss"
    note = f"answer {number}: {node.stop_reason}{delivered}"
    logprobs = session.tree.logprobs(number).tolist()
    return TokenPiece("sampled", tokens.tolist(), logprobs, _versions(node), node.message.get("content"), note)
