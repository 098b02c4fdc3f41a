"""Sessions of a run for the console: a list, the tree of one, and the tokens up to one of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service.console.tokens import TokenPiece, missing, tokens_page
from service.sessions.records import FORMAT, SessionEnded, decode
from service.sessions.session import LOST, AgentSession, SessionBook
from service.sessions.tree import ROOT, TreeNode
from service.store import read_copy, stamp
from trireme.core.finite_json import JsonObject
from trireme.core.tokenizer import Decode

MOST_SESSIONS = 200
MOST_NODES = 2000
PREVIEW_CHARS = 400


class StoredSessions:
    """Reads sessions from the store in `directory`. While a service has the store open, reading works only on a local
    file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._book = SessionBook()
        self._stamp: object = None

    def __call__(self) -> SessionBook:
        """Returns all stored sessions; reads them again only if the files of the store have changed. Raises
        StorageFailed if the store cannot be read."""
        changed = stamp(self._directory)
        if changed == self._stamp:
            return self._book
        rows, lost = read_copy(self._directory, FORMAT)
        book = SessionBook()
        for row in rows:
            book.apply(decode(row))
        for name, session in book.sessions.items():
            if lost and session.end_record is None:
                session.end_record = SessionEnded(name, session.last, LOST)
        self._book = book
        self._stamp = changed
        return book


class RunSessions:
    """Describes sessions for the console. `book` returns the sessions; another thread may add to these sessions at any
    time. `decode` returns the function that turns tokens into text, or None."""

    def __init__(self, book: Callable[[], SessionBook], decode: Callable[[], Decode | None]) -> None:
        self._book = book
        self._decode = decode

    def listing(self) -> JsonObject:
        """Lists the MOST_SESSIONS sessions with the latest activity, the latest first, and counts the others."""
        newest = sorted(self._book().sessions.values(), key=lambda session: session.last, reverse=True)
        return {
            "sessions": [session.summary() for session in newest[:MOST_SESSIONS]],
            "others": max(0, len(newest) - MOST_SESSIONS),
        }

    def tree(self, name: str) -> JsonObject:
        """Describes a session and the first MOST_NODES nodes of its tree, without their tokens. Raises RequestRefused
        if there is no such session."""
        session = self._session(name)
        nodes = [_node(session, number) for number in range(min(len(session.tree.nodes), MOST_NODES))]
        return session.summary() | {"nodes": nodes, "nodes_left_out": len(session.tree.nodes) - len(nodes)}

    def tokens(self, name: str, node: int, start: int) -> JsonObject:
        """Returns a page of the tokens on the path from the root of a session's tree to the end of `node`; the page
        begins at token `start`. Raises RequestRefused if there is no such session or node."""
        session = self._session(name)
        nodes = session.tree.nodes
        if not 0 <= node < len(nodes):
            raise missing(f"node {node} of a session with {len(nodes)}", "one that the tree has")
        path = []
        while node != ROOT:
            path.append(node)
            node = nodes[node].parent
        pieces = [_piece(session, number) for number in reversed(path)]
        return tokens_page(pieces, start, self._decode()) | {"floor": session.opened.floor}

    def _session(self, name: str) -> AgentSession:
        session = self._book().sessions.get(name)
        if session is None:
            raise missing(f"the session {name!r}", "one that is there and that was not forgotten")
        return session


def _node(session: AgentSession, number: int) -> JsonObject:
    tree, node = session.tree, session.tree.nodes[number]
    reward = session.rewards.get(number)
    fields: JsonObject = {
        "node": number,
        "parent": node.parent,
        "tokens": node.end - node.start,
        "branch": node.branch,
        **_preview(node.message or node.point.message or {}),
    }
    if node.message is None:
        return fields | {"kind": "prompt", "begins": node.follows == ROOT, "anew": node.parent != node.follows}
    return fields | {
        "kind": "answer",
        "versions": _versions(node),
        "stop_reason": node.stop_reason,
        "delivered": node.delivered,
        "reward": reward.value if reward else None,
        "mean_logprob": float(tree.logprobs(number).mean()) if node.end > node.start else None,
    }


def _versions(node: TreeNode) -> list[tuple[int, int]]:
    return [(span.identity.version, span.end - span.start) for span in node.spans]


def _preview(message: Mapping[str, Any]) -> dict[str, str]:
    """Returns the role and the beginning of the text of a message, with the names of its tool calls."""
    calls = "".join(f" [calls {call['name']}]" for call in message.get("tool_calls") or () if "name" in call)
    return {"role": str(message.get("role", "")), "preview": str(message.get("content", ""))[:PREVIEW_CHARS] + calls}


def _piece(session: AgentSession, number: int) -> TokenPiece:
    node = session.tree.nodes[number]
    tokens = session.tree.tokens(number)
    if node.message is None:
        return TokenPiece("observed", tokens.tolist())
    if node.delivered:
        delivered = ""
    else:
        delivered = "; not delivered, so not in the loss"
    note = f"answer {number}: {node.stop_reason}{delivered}"
    logprobs = session.tree.logprobs(number).tolist()
    return TokenPiece("sampled", tokens.tolist(), logprobs, _versions(node), node.message.get("content"), note)
