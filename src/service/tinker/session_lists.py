"""The routes of sessions: lists, searches, what their clients say of them, and their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.errors import JsonReply
from service.tinker.bodies import FinishBody, ProjectBody, SearchBody, Seq, StatusBody
from service.tinker.callers import Asking, OwnThings
from service.tinker.clients import ClientSession
from service.tinker.owners import Caller
from service.tinker.serving import TinkerServer

SESSIONS = "/api/v1/sessions"
FINISHED = "client_finished"


class SessionListRoutes:
    """The routes of sessions."""

    def __init__(self, server: TinkerServer) -> None:
        self._server, self._state = server, server.state

    def add(self, app: FastAPI) -> None:
        """Adds them to an app."""
        app.get(SESSIONS)(self.sessions)
        app.post(SESSIONS + "/search")(self.search)
        app.get(SESSIONS + "/{session_id}")(self.session)
        app.put(SESSIONS + "/{session_id}/project")(self.set_project)
        app.post(SESSIONS + "/{session_id}/finish")(self.finish)

    async def sessions(self, caller: Asking, limit: Seq = 20, offset: Seq = 0) -> JsonReply:
        """Lists sessions, the newest first."""
        found = [each.session_id for each in reversed(OwnThings(self._state, caller).sessions())]
        return JsonReply({"sessions": found[offset : offset + limit]})

    async def session(self, caller: Asking, session_id: str) -> JsonReply:
        """Describes a session."""
        session = self._session(caller, session_id)
        told = session.metadata
        shown = {name: told.get(name) for name in ("user_metadata", "display_name")}
        return JsonReply({"training_run_ids": session.models, "sampler_ids": session.samplers, **shown})

    async def finish(self, caller: Asking, session_id: str, body: FinishBody | None = None) -> Response:
        """Ends a session. What its client said first of the reason is kept."""
        session = self._session(caller, session_id)
        self._server.finish(session_id)
        said = body or FinishBody()
        if "status" not in session.metadata:
            status = {"type": FINISHED, "reason": {"type": said.reason.type}, "detail": said.detail}
            self._state.tell(session_id, {"status": status})
        return Response(status_code=204)

    async def set_project(self, caller: Asking, session_id: str, body: ProjectBody) -> Response:
        """Notes the project of a session."""
        self._session(caller, session_id)
        self._state.tell(session_id, {"project_id": body.project_id})
        return Response(status_code=204)

    async def search(self, caller: Asking, body: SearchBody) -> JsonReply:
        """Lists the sessions that were looked for, the newest first."""
        found = sorted(self._found(caller, body), key=_place, reverse=True)
        if body.cursor:
            last = body.cursor.last_created_at.timestamp(), body.cursor.last_session_id
            found = [each for each in found if _place(each) < last]
        page, rest = found[: body.limit], found[body.limit :]
        cursor = (
            {"last_created_at": page[-1]["created_at"], "last_session_id": page[-1]["session_id"]} if rest else None
        )
        return JsonReply({"sessions": page, "next_cursor": cursor})

    def _found(self, caller: Caller, body: SearchBody) -> Iterator[dict[str, Any]]:
        owners = {"own": [_owner(caller.owner)], "user": body.owner.owner_urns}.get(body.owner.type)
        for session in OwnThings(self._state, caller).sessions():
            session_id = session.session_id
            each = self._summary(session)
            named = [session_id == body.session_id] if body.session_id else []
            if body.display_name:
                shown = (each["display_name"] or "").lower()
                named.append(all(word in shown for word in body.display_name.lower().split()))
            matches = (
                any(named) or not named,
                owners is None or each["owner"] in owners,
                body.project_ids is None or each["project_id"] in body.project_ids,
                body.user_metadata.items() <= (each["user_metadata"] or {}).items(),
                body.statuses is None or any(_is(each["status"], status) for status in body.statuses),
            )
            if all(matches):
                yield each

    def _summary(self, session: ClientSession) -> dict[str, Any]:
        told = session.metadata
        saved = [each for model_id in session.models for each in self._server.catalog.saved(model_id)]
        active = {"type": "active"} if session.ended_s is None else None
        return {
            "session_id": session.session_id,
            "created_at": datetime.fromtimestamp(told.get("created_s", 0.0), UTC).isoformat(),
            "owner": _owner(session.owner),
            "project_id": told.get("project_id") or "",
            "status": told.get("status", active),
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(sum(each.files.values()) for each in saved),
            "display_name": told.get("display_name"),
            "user_metadata": told.get("user_metadata"),
        }

    def _session(self, caller: Caller, session_id: str) -> ClientSession:
        return OwnThings(self._state, caller).session(session_id)


def _owner(key: str) -> str:
    return f"urn:trireme:key:{key}"


def _place(summary: Mapping[str, Any]) -> tuple[float, str]:
    return datetime.fromisoformat(summary["created_at"]).timestamp(), summary["session_id"]


def _is(status: Mapping[str, Any] | None, asked: StatusBody) -> bool:
    """Tells whether a session has a status. None is that of one whose client was silent for too long."""
    if status is None or status["type"] != asked.type:
        return False
    return asked.reasons is None or status.get("reason", {}).get("type") in asked.reasons
