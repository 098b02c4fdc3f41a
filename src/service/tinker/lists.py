"""The routes of training runs and checkpoints, and of features that this server does not have."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Request

from service.errors import JsonReply
from service.requests import RequestRefused
from service.tinker.bodies import CopyBody, PathBody, Seq, TtlBody
from service.tinker.callers import Asking
from service.tinker.catalog import KINDS, SavedKind, SavedRun, SavedWeights, path_of
from service.tinker.owners import Caller
from service.tinker.promises import UnknownId
from service.tinker.serving import TinkerServer
from trireme.config.trainer import ATTENTION, MLP, UNEMBED
from trireme.core.finite_json import JsonObject

RUNS = "/api/v1/training_runs"
SAVED = RUNS + "/{model_id}/checkpoints/{kind}/{name}"
At = Annotated[str, Depends(path_of)]
"""The `tinker://` path of the saved entry that the address of a request names."""
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
"""Features that this server does not have, and the alternatives."""


class SavedRoutes:
    """The routes of runs and checkpoints."""

    def __init__(self, server: TinkerServer) -> None:
        self._sessions = server.state.sessions
        self._catalog = server.catalog

    def add(self, app: FastAPI) -> None:
        """Adds these routes to an app."""
        app.get(RUNS)(self.runs)
        app.get(RUNS + "/{model_id}")(self.run)
        app.get(RUNS + "/{model_id}/checkpoints")(self.checkpoints)
        app.delete(SAVED, status_code=204)(self.delete)
        app.put(SAVED + "/ttl", status_code=204)(self.set_ttl)
        app.post(SAVED + "/publish", status_code=204)(self.publish)
        app.delete(SAVED + "/publish", status_code=204)(self.publish)
        app.post("/api/v1/copy_weights")(self.copy)
        app.get(BILLING + "/checkpoints/current")(self.usage)
        app.get("/api/v1/checkpoints")(self.all_checkpoints)
        app.post("/api/v1/weights_info")(self.weights_info)
        for path in NOT_HERE:
            app.add_api_route(path, self.not_here, methods=["GET", "POST"])

    async def not_here(self, request: Request) -> None:
        """Refuses, with 404, a request for a feature that this server does not have."""
        raise RequestRefused(f"this server has not got {NOT_HERE[request.scope['route'].path]}", status=404)

    async def runs(self, caller: Asking, limit: Seq = 20, offset: Seq = 0, project_id: str | None = None) -> JsonReply:
        """Lists training runs, the newest first."""
        matches = [run for run in self._catalog.runs(caller) if project_id in (None, self._project(run))]
        cursor = {"offset": offset, "limit": limit, "total_count": len(matches)}
        return JsonReply({"training_runs": list(map(self._run, matches[offset : offset + limit])), "cursor": cursor})

    async def run(self, caller: Asking, model_id: str) -> JsonReply:
        """Describes a training run."""
        return JsonReply(self._run(self._find_run(caller, model_id)))

    def _find_run(self, caller: Caller, model_id: str) -> SavedRun:
        try:
            return self._catalog.run(model_id, caller)
        except RequestRefused as error:
            raise UnknownId(str(error)) from None

    async def checkpoints(self, caller: Asking, model_id: str) -> JsonReply:
        """Lists the checkpoints of a training run."""
        saved = self._catalog.saved(self._find_run(caller, model_id).model_id)
        return JsonReply({"checkpoints": [_checkpoint(weights) for weights in saved]})

    async def all_checkpoints(self, caller: Asking, limit: Seq = 100, offset: Seq = 0) -> JsonReply:
        """Lists the checkpoints of all training runs of the caller."""
        weights = [saved for run in self._catalog.runs(caller) for saved in self._catalog.saved(run.model_id)]
        cursor = {"offset": offset, "limit": limit, "total_count": len(weights)}
        return JsonReply({"checkpoints": list(map(_checkpoint, weights[offset : offset + limit])), "cursor": cursor})

    async def delete(self, caller: Asking, path: At) -> None:
        """Deletes the saved entry at `path`."""
        self._catalog.delete(path, caller)

    async def set_ttl(self, caller: Asking, path: At, body: TtlBody) -> None:
        """Sets how long the saved entry at `path` is kept."""
        self._catalog.set_ttl(path, body.ttl_seconds, caller)

    async def publish(self, caller: Asking, path: At, request: Request) -> None:
        """Makes the saved entry at `path` readable by all callers with a key (POST), or by its owner only (DELETE)."""
        self._catalog.set_public(path, request.method == "POST", caller)

    async def weights_info(self, caller: Asking, body: PathBody) -> JsonReply:
        """Returns the base model of a saved entry, and the rank and layers of its adapter."""
        _, saved = self._catalog.find(body.tinker_path, caller=caller)
        run = self._catalog.run(saved.model_id)
        layers = set(run.lora["targets"]) if run.lora else set()
        parts = {"train_attn": ATTENTION, "train_mlp": MLP, "train_unembed": UNEMBED}
        if run.lora:
            trained = {name: not layers.isdisjoint(names) for name, names in parts.items()}
        else:
            trained = {}
        return JsonReply({"base_model": run.base_model, **lora_of(run), **trained})

    async def copy(self, caller: Asking, body: CopyBody, x_idempotency_key: Annotated[str, Header()] = "") -> JsonReply:
        """Copies a saved entry into a new training run. A repeated request with the same idempotency key gets the same
        copy."""
        if x_idempotency_key:
            number = uuid.uuid5(uuid.NAMESPACE_URL, f"{caller.owner}/{x_idempotency_key}")
        else:
            number = uuid.uuid4()
        arguments = (body.source_path, f"{number.hex}:train:0", body.ttl_seconds, body.destination_project_id, caller)
        return JsonReply({"tinker_path": await asyncio.to_thread(self._catalog.copy, *arguments)})

    async def usage(self, caller: Asking, project_id: str | None = None) -> JsonReply:
        """Returns the number and bytes of the caller's checkpoints by project, with a cost of 0."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for run in self._catalog.runs(caller):
            sizes[self._project(run)] += [weights.size for weights in self._catalog.saved(run.model_id)]
        shown = [
            {
                "project_id": project or None,
                "estimated_monthly_cost_usd": 0.0,
                "checkpoint_count": len(saved),
                "size_bytes": sum(saved),
                "size_gigabytes": sum(saved) / 1e9,
            }
            for project, saved in sizes.items()
            if saved and project_id in (None, project)
        ]
        return JsonReply({"data": shown})

    def _project(self, run: SavedRun) -> str:
        session = self._sessions.get(run.model_id.partition(":")[0])
        return run.project_id or (session and session.metadata.get("project_id")) or ""

    def _run(self, run: SavedRun) -> JsonObject:
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


def lora_of(run: SavedRun) -> JsonObject:
    """Returns the fields that describe a training run's adapter, as clients read them."""
    if run.lora:
        return {"is_lora": True, "lora_rank": run.lora["rank"]}
    return {"is_lora": False}


def _checkpoint(saved: SavedWeights) -> JsonObject:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": TYPES[saved.kind],
        "time": _time(saved.saved_s),
        "tinker_path": saved.path,
        "size_bytes": saved.size,
        "public": saved.public,
        "user_metadata": dict(saved.user_metadata),
        "expires_at": None if saved.expires_s is None else _time(saved.expires_s),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
