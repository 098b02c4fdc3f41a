"""The routes of what is saved, which are training runs and checkpoints, and of what this server has not."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from service.asked import RequestRefused
from service.errors import JsonReply
from service.tinker.bodies import CopyBody, PathBody, Seq, TtlBody
from service.tinker.callers import Asking
from service.tinker.catalog import KINDS, SCHEME, SavedKind, SavedRun, SavedWeights
from service.tinker.owners import Caller
from service.tinker.promises import UnknownId, UserError
from service.tinker.serving import TinkerServer
from trireme.config.trainer import ATTENTION, MLP, UNEMBED

RUNS = "/api/v1/training_runs"
OWNER = "trireme"
TYPES: dict[SavedKind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
BILLING = "/api/v1/billing/usage"
NOT_HERE = {
    "/api/v1/audit": "an audit log; the logs/ of the run directory tell what the rooms did",
    f"{BILLING}/events": "billing, as nothing is charged; get_current_checkpoint_storage_usage tells what is saved",
    "/api/v1/sessions/{session_id}/trace_export": "traces of sessions; the logs/ of the run directory tell what it did",
    "/api/v1/create_custom_loss": "losses that run in the server; forward_backward_custom takes the function itself, "
    "and computes it in the client",
}
"""What clients may ask for and this server has not, and what to do instead."""


class SavedRoutes:
    """The routes of runs and checkpoints."""

    def __init__(self, server: TinkerServer) -> None:
        self._server, self._catalog = server, server.catalog

    def add(self, app: FastAPI) -> None:
        """Adds them to an app."""
        app.get(RUNS)(self.runs)
        app.get(RUNS + "/{model_id}")(self.run)
        app.get(RUNS + "/{model_id}/checkpoints")(self.checkpoints)
        app.delete(RUNS + "/{model_id}/checkpoints/{kind}/{name}")(self.delete)
        app.put(RUNS + "/{model_id}/checkpoints/{kind}/{name}/ttl")(self.set_ttl)
        app.post(RUNS + "/{model_id}/checkpoints/{kind}/{name}/publish")(self.publish)
        app.delete(RUNS + "/{model_id}/checkpoints/{kind}/{name}/publish")(self.unpublish)
        app.post("/api/v1/copy_weights")(self.copy)
        app.get(BILLING + "/checkpoints/current")(self.usage)
        app.get("/api/v1/checkpoints")(self.all_checkpoints)
        app.post("/api/v1/weights_info")(self.weights_info)
        for path in NOT_HERE:
            app.add_api_route(path, self.not_here, methods=["GET", "POST"])

    async def not_here(self, request: Request) -> Response:
        """Refuses what this server has not got."""
        raise RequestRefused(f"this server has not got {NOT_HERE[request.scope['route'].path]}", status=404)

    async def runs(self, caller: Asking, limit: Seq = 20, offset: Seq = 0, project_id: str | None = None) -> JsonReply:
        """Lists training runs, the newest first."""
        found = [run for run in self._catalog.runs(caller) if project_id in (None, self._project(run))]
        shown = [self._run(run) for run in found[offset : offset + limit]]
        return JsonReply({"training_runs": shown, "cursor": _cursor(offset, limit, len(found))})

    async def run(self, caller: Asking, model_id: str) -> JsonReply:
        """Describes a training run."""
        return JsonReply(self._run(self._found(caller, model_id)))

    def _found(self, caller: Caller, model_id: str) -> SavedRun:
        try:
            return self._catalog.run(model_id, caller)
        except UserError as error:
            raise UnknownId(str(error)) from None

    async def checkpoints(self, caller: Asking, model_id: str) -> JsonReply:
        """Lists what a training run saved."""
        saved = self._catalog.saved(self._found(caller, model_id).model_id)
        return JsonReply({"checkpoints": [_checkpoint(each) for each in saved]})

    async def all_checkpoints(self, caller: Asking, limit: Seq = 100, offset: Seq = 0) -> JsonReply:
        """Lists what all training runs saved."""
        found = [saved for run in self._catalog.runs(caller) for saved in self._catalog.saved(run.model_id)]
        shown = [_checkpoint(each) for each in found[offset : offset + limit]]
        return JsonReply({"checkpoints": shown, "cursor": _cursor(offset, limit, len(found))})

    async def delete(self, caller: Asking, model_id: str, kind: str, name: str) -> Response:
        """Deletes something that was saved."""
        self._catalog.delete(f"{SCHEME}{model_id}/{kind}/{name}", caller)
        return Response(status_code=204)

    async def set_ttl(self, caller: Asking, model_id: str, kind: str, name: str, body: TtlBody) -> Response:
        """Sets how long something is kept."""
        self._catalog.set_ttl(f"{SCHEME}{model_id}/{kind}/{name}", body.ttl_seconds, caller)
        return Response(status_code=204)

    async def weights_info(self, caller: Asking, body: PathBody) -> JsonReply:
        """Tells which base a path belongs to, and of an adapter what it is."""
        _, saved = self._catalog.find(body.tinker_path, caller=caller)
        run = self._catalog.run(saved.model_id)
        layers = set(run.lora["targets"]) if run.lora else set()
        parts = {"train_attn": ATTENTION, "train_mlp": MLP, "train_unembed": UNEMBED}
        trained = {name: not layers.isdisjoint(names) for name, names in parts.items()} if run.lora else {}
        return JsonReply({"base_model": run.base_model, **lora_of(run), **trained})

    async def publish(self, caller: Asking, model_id: str, kind: str, name: str) -> Response:
        """Lets the owners of all keys read something."""
        self._catalog.set_public(f"{SCHEME}{model_id}/{kind}/{name}", True, caller)
        return Response(status_code=204)

    async def unpublish(self, caller: Asking, model_id: str, kind: str, name: str) -> Response:
        """Closes it to others again."""
        self._catalog.set_public(f"{SCHEME}{model_id}/{kind}/{name}", False, caller)
        return Response(status_code=204)

    async def copy(self, caller: Asking, body: CopyBody, x_idempotency_key: Annotated[str, Header()] = "") -> JsonReply:
        """Copies something into a training run of its own. The same request, made again, gets the same copy."""
        number = (
            uuid.uuid5(uuid.NAMESPACE_URL, f"{caller.owner}/{x_idempotency_key}") if x_idempotency_key else uuid.uuid4()
        )
        asked = (body.source_path, f"{number.hex}:train:0", body.ttl_seconds, body.destination_project_id, caller)
        copied = await asyncio.to_thread(self._catalog.copy, *asked)
        return JsonReply({"tinker_path": copied.path})

    async def usage(self, caller: Asking, project_id: str | None = None) -> JsonReply:
        """Tells how much is saved in each project. It costs nothing."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for run in self._catalog.runs(caller):
            saved = [sum(each.files.values()) for each in self._catalog.saved(run.model_id)]
            if saved and project_id in (None, self._project(run)):
                sizes[self._project(run)] += saved
        return JsonReply({"data": [_usage(project, each) for project, each in sizes.items()]})

    def _project(self, run: SavedRun) -> str:
        session = run.model_id.partition(":")[0]
        return run.project_id or self._server.said(session).get("project_id") or ""

    def _run(self, run: SavedRun) -> dict[str, Any]:
        newest = {saved.kind: saved for saved in self._catalog.saved(run.model_id)}
        last_s = max([run.began_s, *(saved.saved_s for saved in newest.values())])
        shown = {kind: _checkpoint(newest[kind]) if kind in newest else None for kind in KINDS}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": run.owner or OWNER,
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
        "public": saved.public,
        "user_metadata": dict(saved.user_metadata),
        "expires_at": None if saved.expires_s is None else _time(saved.expires_s),
    }


def _usage(project: str, sizes: list[int]) -> dict[str, Any]:
    total = sum(sizes)
    counted = {"checkpoint_count": len(sizes), "size_bytes": total, "size_gigabytes": total / 1e9}
    return {"project_id": project or None, "estimated_monthly_cost_usd": 0.0, **counted}


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
