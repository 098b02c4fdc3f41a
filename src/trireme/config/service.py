"""The section `service`: the HTTP front door of the replicas."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import NonNegativeInt, Section


class SessionsConfig(Section):
    max_open: PositiveInt = 1024
    """Sessions that are open at the same time; a further one gets 429 with Retry-After."""
    turns: PositiveInt = 1000
    """Requests that one session answers; then it is closed."""
    tokens: PositiveInt = 1_000_000
    """Tokens of one session, of prompts and answers, each counted once, after which it is closed."""
    seconds: PositiveFloat = 7200.0
    """Seconds after which a session is closed."""
    idle_s: PositiveFloat = 900.0
    """Seconds without a word of its agent after which a session is closed: the agent is gone."""
    kept_s: PositiveFloat = 3600.0
    """Seconds after the end of a session in which it can be exported; then it is forgotten."""


class TinkerConfig(Section):
    names: list[str] = Field([])
    """Further names by which clients of `trireme serve` may request the model: the name on a model hub, say, where
    `model.name` is a directory."""
    snapshots: PositiveInt = 4
    """Sets of weights that `trireme serve` keeps in memory for samplers in addition to the base's, at least: sets of
    samplers that wait or sample stay too. Each takes as much as the published weights of the model."""
    commit_s: PositiveFloat = 60.0
    """Seconds of the trainer's work after which `trireme serve` saves the model that is trained, at its next update: if
    a process dies, about so much is computed again."""


class ServiceConfig(Section):
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on the driver's machine at which the run answers OpenAI's and Anthropic's clients (docs/service.md); none =
    off, for `inference` 8000; 0 = any that is free."""
    host: str = "127.0.0.1"
    """Address at which it listens. By default only this machine reaches it; others should come through a proxy with
    TLS."""
    keys: str | None = None
    """File with the keys that open it, of mode 600; none = new ones in `service.keys` of the run directory."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the replicas' places, the sequences that they decode together (inference.max_num_seqs of each), that
    chats may hold at once, at least one; further chats wait. It bounds places, not an engine's time.
    Default of `inference`, which trains nothing: 1."""
    max_waiting: NonNegativeInt = 256
    """Answers that wait for a place; further requests get 429 with Retry-After."""
    wait_s: PositiveFloat = 300.0
    """Seconds for which an answer waits for a place; then 429."""
    max_body_mb: PositiveFloat = 16.0
    """Largest body of a request, in megabytes; of one that comes in chunks without its length, at most 1."""
    body_s: PositiveFloat = 30.0
    """Seconds in which the body of a request must have come."""
    requests_per_minute: PositiveInt | None = None
    """Requests of one key in a minute; none = as many as come."""
    models: PositiveInt = 16
    """Models that `trireme serve` trains at the same time if they are adapters (trainer.lora); further clients wait. A
    whole model is trained alone."""
    sessions: SessionsConfig = SessionsConfig()
    """Limits of sessions (docs/sessions.md)."""
    tinker: TinkerConfig = TinkerConfig()
    """The server of Tinker's clients (docs/tinker.md)."""
