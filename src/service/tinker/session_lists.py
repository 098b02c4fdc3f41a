"""The routes of sessions other than their beginning: lists, searches, descriptions by clients, and the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI

from service.errors import JsonReply
from service.tinker.bodies import FinishBody, ProjectBody, SearchBody, Seq, StatusBody
from service.tinker.callers import Asking
from service.tinker.clients import ClientSession
from service.tinker.owners import Caller
from service.tinker.serving import TinkerServer

SESSIONS = "/api/v1/sessions"
FINISHED = "client_finished"


class SessionListRoutes:
    """The routes that list, search, describe and end clients' sessions."""

    def __init__(self, server: TinkerServer) -> None:
        self._server = server
        self._state = server.state

    def add(self, app: FastAPI) -> None:
        """Adds these routes to an app."""
        app.get(SESSIONS)(self.sessions)
        app.post(SESSIONS + "/search")(self.search)
        app.get(SESSIONS + "/{session_id}")(self.session)
        app.put(SESSIONS + "/{session_id}/project", status_code=204)(self.set_project)
        app.post(SESSIONS + "/{session_id}/finish", status_code=204)(self.finish)

    async def sessions(self, caller: Asking, limit: Seq = 20, offset: Seq = 0) -> JsonReply:
        """Lists sessions, the newest first."""
        session_ids = [session.session_id for session in self._visible(caller)]
        return JsonReply({"sessions": session_ids[offset : offset + limit]})

    def _visible(self, caller: Caller) -> list[ClientSession]:
        """Returns the sessions that a caller may see, the newest first."""
        return [session for session in reversed(self._state.sessions.values()) if caller.may(session.caller.owner)]

    async def session(self, caller: Asking, session_id: str) -> JsonReply:
        """Describes a session."""
        session = self._state.session(session_id, caller)
        shown = {name: session.metadata.get(name) for name in ("user_metadata", "display_name")}
        return JsonReply({"training_run_ids": session.models, "sampler_ids": session.samplers, **shown})

    async def finish(self, caller: Asking, session_id: str, body: FinishBody | None = None) -> None:
        """Ends a client's session. If the client gives several reasons one after the other, only the first one
        counts."""
        session = self._state.session(session_id, caller)
        request = body or FinishBody()
        if not session.end_reason:
            self._state.finish(session, self._server.now(), "its client has finished it")
        if "status" not in session.metadata:
            status = {"type": FINISHED, "reason": {"type": request.reason.type}, "detail": request.detail}
            self._state.tell(session, status=status)

    async def set_project(self, caller: Asking, session_id: str, body: ProjectBody) -> None:
        """Records the project of a session."""
        self._state.tell(self._state.session(session_id, caller), project_id=body.project_id)

    async def search(self, caller: Asking, body: SearchBody) -> JsonReply:
        """Lists a page of the sessions that match the search, the newest first, with a cursor for the next page."""
        matches = sorted(self._matching(caller, body), key=_place, reverse=True)
        if body.cursor:
            last = body.cursor.last_created_at.timestamp(), body.cursor.last_session_id
            matches = [summary for summary in matches if _place(summary) < last]
        page = matches[: body.limit]
        rest = matches[body.limit :]
        if rest:
            cursor = {"last_created_at": page[-1]["created_at"], "last_session_id": page[-1]["session_id"]}
        else:
            cursor = None
        return JsonReply({"sessions": page, "next_cursor": cursor})

    def _matching(self, caller: Caller, body: SearchBody) -> Iterator[dict[str, Any]]:
        owners = {"own": [_urn(caller)], "user": body.owner.owner_urns}.get(body.owner.type)
        words = (body.display_name or "").lower().split()
        for summary in map(self._summary, self._visible(caller)):
            shown = (summary["display_name"] or "").lower()
            named = all(word in shown for word in words)
            matches = (
                summary["session_id"] == body.session_id or (named if words else not body.session_id),
                owners is None or summary["owner"] in owners,
                body.project_ids is None or summary["project_id"] in body.project_ids,
                body.user_metadata.items() <= (summary["user_metadata"] or {}).items(),
                body.statuses is None or any(_is(summary["status"], status) for status in body.statuses),
            )
            if all(matches):
                yield summary

    def _summary(self, session: ClientSession) -> dict[str, Any]:
        metadata = session.metadata
        saved = [weights.size for model_id in session.models for weights in self._server.catalog.saved(model_id)]
        return {
            "session_id": session.session_id,
            "created_at": datetime.fromtimestamp(metadata.get("created_s", 0.0), UTC).isoformat(),
            "owner": _urn(session.caller),
            "project_id": metadata.get("project_id") or "",
            "status": metadata.get("status", None if session.end_reason else {"type": "active"}),
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(saved),
            "display_name": metadata.get("display_name"),
            "user_metadata": metadata.get("user_metadata"),
        }


def _urn(caller: Caller) -> str:
    return f"urn:trireme:key:{caller.owner}"


def _place(summary: Mapping[str, Any]) -> tuple[float, str]:
    return datetime.fromisoformat(summary["created_at"]).timestamp(), summary["session_id"]


def _is(status: Mapping[str, Any] | None, condition: StatusBody) -> bool:
    """Returns True if a session's `status` meets the condition. `status` None (the client was silent for too long)
    meets no condition."""
    if status is None or status["type"] != condition.type:
        return False
    return condition.reasons is None or status.get("reason", {}).get("type") in condition.reasons
