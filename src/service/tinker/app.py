"""The HTTP side of the Tinker server: its routes, and the replies for outcomes and refusals."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.errors import JsonReply, as_refused, error_reply
from service.guard import Limits, RequestGuard
from service.keys import ServiceKeys
from service.requests import RequestRefused
from service.tinker.bodies import (
    BeatBody,
    CreateModelBody,
    LoadModelBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    RetrieveBody,
    SampleBody,
    SamplerBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveStateBody,
    SessionBody,
    TrainingBody,
    Unusable,
)
from service.tinker.callers import Asking, caller_of
from service.tinker.codec import PROTOBUF, ForwardBackwardCall
from service.tinker.downloads import DownloadRoutes
from service.tinker.lists import SavedRoutes, lora_of
from service.tinker.owners import Caller
from service.tinker.promises import Failure, GoneError, Promise, SampleWork, UnknownId
from service.tinker.serving import TinkerServer
from service.tinker.session_lists import SessionListRoutes
from service.tinker.weight_cache import BASE
from trireme.core.datum import ModelInput
from trireme.core.errors import TriremeError

PREFIX = "/api/v1"
OLDEST = (0, 25)
NEWEST = (0, 38)
"""Versions of the client between which this server was tried; unit tests drive it with the newest."""
CLIENT_CONFIG = {
    "fwdbwd_max_chunk_len": 4096,
    "create_model_via_load_weights": True,
}
"""Settings that clients get from this server: a client sends large parts of batches, and a client before 0.38 makes a
model that begins with a state by one request, for which it need not know a rank."""


class TinkerRoutes:
    """The routes of training and sampling."""

    def __init__(self, server: TinkerServer) -> None:
        self._server = server
        self._state = server.state

    def add(self, app: FastAPI) -> None:
        """Adds these routes to an app."""
        posts: tuple[Callable[..., Awaitable[Response]], ...] = (
            self.create_session,
            self.session_heartbeat,
            self.telemetry,
            self.create_model,
            self.load_weights,
            self.get_info,
            self.forward_backward,
            self.optim_step,
            self.save_weights,
            self.save_weights_for_sampler,
            self.save_weights_external,
            self.create_sampling_session,
            self.asample,
            self.retrieve_future,
        )
        for route in posts:
            app.post(f"{PREFIX}/{route.__name__}")(route)
        app.post(PREFIX + "/client/config")(self.client_config)
        app.post(PREFIX + "/client/dynamic_config")(self.dynamic_config)
        app.get(PREFIX + "/healthz")(self.health)
        app.get(PREFIX + "/get_server_capabilities")(self.capabilities)
        app.get(PREFIX + "/samplers/{sampler_id}")(self.sampler)

    # ---- the client

    async def health(self) -> JsonReply:
        """Reports that the server answers."""
        return JsonReply({"status": "ok"})

    async def client_config(self) -> JsonReply:
        """Returns settings for the client."""
        return JsonReply(CLIENT_CONFIG)

    async def dynamic_config(self) -> JsonReply:
        """Returns the settings that change while a client runs: this server has none."""
        return JsonReply({})

    async def telemetry(self) -> JsonReply:
        """Accepts the client's telemetry and discards it."""
        return JsonReply({"status": "accepted"})

    async def capabilities(self) -> JsonReply:
        """Lists the names of the served model, with the model's context length in tokens."""
        size = self._server.offer.served.max_len
        models = [
            {"model_name": name, "max_context_length": size, "trainable": True, "sampleable": True}
            for name in self._server.offer.listed
        ]
        return JsonReply({"supported_models": models})

    async def create_session(self, caller: Asking, body: SessionBody) -> JsonReply:
        """Begins a session of a client. Replies with the session's id."""
        session_id = uuid.uuid4().hex
        metadata = body.model_dump(include={"user_metadata", "display_name", "project_id"})
        self._state.begin_session(session_id, self._server.now(), caller, **metadata, created_s=time.time())
        notices = {"info_message": self._server.offer.greeting}
        if not _tried(body.sdk_version):
            oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
            notices["warning_message"] = (
                f"this server was tested with tinker {oldest} to {newest}, not {body.sdk_version}"
            )
        return JsonReply({"session_id": session_id, **notices})

    async def session_heartbeat(self, caller: Asking, body: BeatBody) -> JsonReply:
        """Records that the client of a session is alive. Refuses with 410 (gone) if the session has ended, or the
        server does not know it."""
        try:
            self._state.living(body.session_id, caller).beat_s = self._server.now()
        except UnknownId as error:
            raise GoneError(str(error)) from None
        return JsonReply({})

    # ---- training

    async def create_model(self, caller: Asking, body: CreateModelBody) -> JsonReply:
        """Accepts a request for a new model. Replies with the request's id, by which the client retrieves the outcome
        later (`retrieve_future`)."""
        return _promised(self._state.create_model(body.session_id, body.model_seq_id, body, caller))

    async def load_weights(self, caller: Asking, body: LoadModelBody | LoadWeightsBody) -> JsonReply:
        """Accepts a request for a new model that begins with a saved state, or a request to load a saved state into an
        existing model."""
        if isinstance(body, LoadModelBody):
            return _promised(self._state.create_model(body.session_id, body.model_seq_id, body, caller))
        return self._train(caller, body)

    def _train(self, caller: Caller, work: TrainingBody | ForwardBackwardCall) -> JsonReply:
        """Accepts a request to a model of this caller. Replies with the request's id, by which the client retrieves the
        outcome later (`retrieve_future`)."""
        return _promised(self._server.train(work.model_id, work.seq_id, work, caller))

    async def get_info(self, caller: Asking, body: ModelBody) -> JsonReply:
        """Describes a model."""
        model = self._state.model(body.model_id, caller)
        name = self._server.offer.base_model
        data = {"model_name": name, "tokenizer_id": self._server.offer.tokenizer_id}
        if model.next_seq:
            lora = lora_of(self._server.catalog.run(model.model_id))
        else:
            lora = {}
        return JsonReply({"model_id": model.model_id, "model_name": name, "model_data": data, **lora})

    async def forward_backward(self, caller: Asking, request: Request) -> JsonReply:
        """Accepts a request for a forward pass, or a forward and backward pass, on datums; the body is a protobuf
        message. Replies with the request's id, by which the client retrieves the outcome later
        (`retrieve_future`)."""
        encoding = request.headers.get("content-encoding")
        if encoding:
            raise RequestRefused(f"a body in the encoding {encoding}; expected none, as client/config says")
        return self._train(caller, ForwardBackwardCall.of(await request.body()))

    async def optim_step(self, caller: Asking, body: OptimStepBody) -> JsonReply:
        """Accepts an optimiser update of a model."""
        return self._train(caller, body)

    async def save_weights(self, caller: Asking, body: SaveStateBody) -> JsonReply:
        """Accepts a request to save the state of a model."""
        return self._train(caller, body)

    async def save_weights_for_sampler(self, caller: Asking, body: SaveForSamplerBody) -> JsonReply:
        """Accepts a request to make the weights of a model available to samplers."""
        return self._train(caller, body)

    async def save_weights_external(self, caller: Asking, body: SaveExternalBody) -> JsonReply:
        """Accepts a request to save weights for download."""
        return self._train(caller, body)

    # ---- sampling

    async def create_sampling_session(self, caller: Asking, body: SamplerBody) -> JsonReply:
        """Begins a sampling session with the base model's weights, or with saved weights that the caller may read."""
        self._state.living(body.session_id, caller)
        if body.model_path is not None:
            self._server.catalog.find(body.model_path, "sampler_weights", caller)
            self._server.check_held(body.model_path)
        elif not self._server.offer.serves(body.base_model):
            names = " or ".join(self._server.offer.listed)
            raise RequestRefused(f"base_model = {body.base_model!r}; expected {names}", param="base_model")
        target = body.model_path or BASE
        sampler = self._state.create_sampler(body.session_id, body.sampling_session_seq_id, target)
        return JsonReply({"sampling_session_id": sampler.sampler_id})

    async def sampler(self, caller: Asking, sampler_id: str) -> JsonReply:
        """Describes a sampling session."""
        sampler = self._state.sampler(sampler_id, caller)
        if sampler.target.startswith("tinker://"):
            path = {"model_path": sampler.target}
        else:
            path = {}
        return JsonReply({"sampler_id": sampler_id, "base_model": self._server.offer.base_model, **path})

    async def asample(self, caller: Asking, body: SampleBody) -> JsonReply:
        """Accepts a request for samples. Replies with an id for each sample and with the request's id, by which the
        client retrieves the outcome later (`retrieve_future`)."""
        sampler = self._state.sampler(body.sampling_session_id, caller)
        prompt = ModelInput(body.tokens())
        params = body.params(self._server.offer.room(prompt, body.sampling_params.stop_ids()))
        work = SampleWork(prompt, body.num_samples, params, bool(body.prompt_logprobs), body.topk_prompt_logprobs)
        promise = self._server.sample(sampler, body.seq_id, work)
        names = [f"{promise.request_id}/{number}" for number in range(body.num_samples)]
        return _promised(promise, sample_sequence_ids=names)

    # ---- outcomes

    async def retrieve_future(self, caller: Asking, body: RetrieveBody) -> Response:
        """Replies with the outcome of a request. If there is no outcome within HOLD_S seconds, replies with 408, and
        the client asks again."""
        promise = self._state.promise(body.request_id, caller)
        outcome = await self._server.outcome(promise)
        if outcome is None:
            reason = self._state.queued(promise)
            queue = {"queue_state": "paused_capacity" if reason else "active", "queue_state_reason": reason}
            return JsonReply({"request_id": body.request_id, **queue}, status_code=408)
        if isinstance(outcome, Failure):
            return JsonReply({"error": outcome.error, "category": outcome.category})
        if isinstance(outcome.payload, bytes):
            return Response(outcome.payload, media_type=PROTOBUF)
        return JsonReply(outcome.payload)


def _promised(promise: Promise, **fields: object) -> JsonReply:
    return JsonReply({"request_id": promise.request_id, **fields})


def _tried(sdk_version: str) -> bool:
    """Returns True if the server was tested with the client's version."""
    match = re.match(r"(\d+)\.(\d+)\b", sdk_version)
    return match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST


def make_tinker_app(server: TinkerServer, keys: ServiceKeys, limits: Limits) -> FastAPI:
    """Makes the FastAPI app of the Tinker server."""
    app = FastAPI(title="Trireme", docs_url=None, redoc_url=None, openapi_url=None)
    TinkerRoutes(server).add(app)
    SavedRoutes(server).add(app)
    SessionListRoutes(server).add(app)
    DownloadRoutes(server.catalog, time.time).add(app)

    async def refused(request: Request, error: Exception) -> Response:
        answer = as_refused(error)
        if isinstance(error, RequestValidationError) and isinstance(error.body, dict):
            _take_number(server, caller_of(request), error.body, answer.message)
        return error_reply(request.url.path, answer)

    for kind in (RequestRefused, RequestValidationError, HTTPException, TriremeError, Exception):
        app.add_exception_handler(kind, refused)
    app.add_middleware(RequestGuard, keys=keys, limits=limits, metrics=None)
    return app


def _take_number(server: TinkerServer, caller: Caller, body: dict[str, Any], message: str) -> None:
    """Records a refused request to one of this caller's models as failed, with `message` as its failure. This uses up
    the request's number; otherwise later requests of the model would wait for that number."""
    if isinstance(body.get("seq_id"), int):
        with suppress(RequestRefused):
            server.train(str(body.get("model_id")), body["seq_id"], Unusable(error=message), caller)
