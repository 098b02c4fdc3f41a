"""The routes that tell what is saved: training runs, checkpoints and sessions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from service.errors import JsonReply
from service.tinker.bodies import PathBody, TtlBody
from service.tinker.catalog import KINDS, SCHEME, SavedKind, SavedRun, SavedWeights
from service.tinker.promises import UnknownId, UserError
from service.tinker.serving import TinkerServer
from trireme.config.trainer import ATTENTION, MLP, UNEMBED

RUNS = "/api/v1/training_runs"
OWNER = "trireme"
TYPES: dict[SavedKind, str] = {"weights": "training", "sampler_weights": "sampler"}


class SavedRoutes:
    """The routes of runs, checkpoints and sessions."""

    def __init__(self, server: TinkerServer) -> None:
        self._server, self._catalog, self._state = server, server.catalog, server.state

    def add(self, app: FastAPI) -> None:
        """Adds them to an app."""
        app.get(RUNS)(self.runs)
        app.get(RUNS + "/{model_id}")(self.run)
        app.get(RUNS + "/{model_id}/checkpoints")(self.checkpoints)
        app.delete(RUNS + "/{model_id}/checkpoints/{kind}/{name}")(self.delete)
        app.put(RUNS + "/{model_id}/checkpoints/{kind}/{name}/ttl")(self.set_ttl)
        app.get("/api/v1/checkpoints")(self.all_checkpoints)
        app.post("/api/v1/weights_info")(self.weights_info)
        app.get("/api/v1/sessions")(self.sessions)
        app.get("/api/v1/sessions/{session_id}")(self.session)

    async def runs(self, limit: int = 20, offset: int = 0) -> JsonReply:
        """Lists training runs, the newest first."""
        found = self._catalog.runs()
        shown = [self._run(run) for run in found[offset : offset + limit]]
        return JsonReply({"training_runs": shown, "cursor": _cursor(offset, limit, len(found))})

    async def run(self, model_id: str) -> JsonReply:
        """Describes a training run."""
        return JsonReply(self._run(self._found(model_id)))

    def _found(self, model_id: str) -> SavedRun:
        try:
            return self._catalog.run(model_id)
        except UserError as error:
            raise UnknownId(str(error)) from None

    async def checkpoints(self, model_id: str) -> JsonReply:
        """Lists what a training run saved."""
        saved = self._catalog.saved(self._found(model_id).model_id)
        return JsonReply({"checkpoints": [_checkpoint(each) for each in saved]})

    async def all_checkpoints(self, limit: int = 100, offset: int = 0) -> JsonReply:
        """Lists what all training runs saved."""
        found = [saved for run in self._catalog.runs() for saved in self._catalog.saved(run.model_id)]
        shown = [_checkpoint(each) for each in found[offset : offset + limit]]
        return JsonReply({"checkpoints": shown, "cursor": _cursor(offset, limit, len(found))})

    async def delete(self, model_id: str, kind: str, name: str) -> Response:
        """Deletes something that was saved."""
        self._catalog.delete(f"{SCHEME}{model_id}/{kind}/{name}")
        return Response(status_code=204)

    async def set_ttl(self, model_id: str, kind: str, name: str, body: TtlBody) -> Response:
        """Sets how long something is kept."""
        self._catalog.set_ttl(f"{SCHEME}{model_id}/{kind}/{name}", body.ttl_seconds)
        return Response(status_code=204)

    async def weights_info(self, body: PathBody) -> JsonReply:
        """Tells which base a path belongs to, and of an adapter what it is."""
        _, saved = self._catalog.find(body.tinker_path)
        run = self._catalog.run(saved.model_id)
        layers = set(run.lora["targets"]) if run.lora else set()
        parts = {"train_attn": ATTENTION, "train_mlp": MLP, "train_unembed": UNEMBED}
        trained = {name: not layers.isdisjoint(names) for name, names in parts.items()} if run.lora else {}
        return JsonReply({"base_model": run.base_model, **lora_of(run), **trained})

    async def sessions(self, limit: int = 20, offset: int = 0) -> JsonReply:
        """Lists sessions, the newest first."""
        return JsonReply({"sessions": list(reversed(self._state.sessions))[offset : offset + limit]})

    async def session(self, session_id: str) -> JsonReply:
        """Describes a session."""
        if (session := self._state.sessions.get(session_id)) is None:
            raise UnknownId(f"the session {session_id!r}")
        shown = {"training_run_ids": session.models, "sampler_ids": session.samplers}
        return JsonReply({**shown, **session.metadata})

    def _run(self, run: SavedRun) -> dict[str, Any]:
        newest = {saved.kind: saved for saved in self._catalog.saved(run.model_id)}
        last_s = max([run.began_s, *(saved.saved_s for saved in newest.values())])
        shown = {kind: _checkpoint(newest[kind]) if kind in newest else None for kind in KINDS}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": OWNER,
            **lora_of(run),
            "last_request_time": _time(last_s),
            "last_checkpoint": shown["weights"],
            "last_sampler_checkpoint": shown["sampler_weights"],
            "user_metadata": dict(run.user_metadata),
        }


def lora_of(run: SavedRun) -> dict[str, object]:
    """Returns what the client is told of a model's adapter."""
    return {"is_lora": True, "lora_rank": run.lora["rank"]} if run.lora else {"is_lora": False}


def _checkpoint(saved: SavedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": TYPES[saved.kind],
        "time": _time(saved.saved_s),
        "tinker_path": saved.path,
        "size_bytes": sum(saved.files.values()),
        "user_metadata": dict(saved.user_metadata),
        "expires_at": None if saved.expires_s is None else _time(saved.expires_s),
    }


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
