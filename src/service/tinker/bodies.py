"""The JSON bodies of the protocol's requests. Unknown fields of samples and updates are refused.

Bodies of requests to the trainer are also the stored form of these requests, from which they are run, and run again
after a loss of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from service.dialects.wire import Body, Few, Many, Stop, StopIds, Stops, Temperature, TokenId, TopK, TopP
from service.requests import RequestRefused
from service.tinker.codec import ForwardBackwardCall
from trireme.core.finite_json import JsonObject
from trireme.core.sampling_bounds import MOST_PROMPT_LOGPROBS, MOST_SAMPLES
from trireme.core.types import AdamParams, SamplingParams

Seq = Annotated[int, Field(ge=0, lt=2**63)]
"""An unpickled copy of a client's sampler numbers its samples from a random multiple of 10^9 on, up to 10^18."""
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""The seed of the first sample. The seeds of further samples count up from it, and stay below 2^63."""
Lifetime = Annotated[int, Field(gt=0, le=10**10)]
"""Seconds for which a saved entry is stored; small enough for a calendar that shows when they end."""
Labels = Annotated[dict[str, str], Few]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Told(Body):
    """A body that declares only the fields which this server uses; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class SessionBody(Told):
    """A request to begin a session."""

    sdk_version: str = ""
    user_metadata: JsonObject | None = None
    display_name: str | None = None
    project_id: str | None = None


class ReasonBody(Told):
    """The way in which a client ended: with success, by an error, or interrupted."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishBody(Told):
    """A request to end a session."""

    reason: ReasonBody = ReasonBody()
    detail: str | None = None


class ProjectBody(Told):
    """A request to set the project of a session."""

    project_id: str


class BeatBody(Told):
    """A sign of life from the client of a session."""

    session_id: str


class OptimizerBody(Told):
    """The optimiser that a client asks for."""

    type: Literal["adamw"] = "adamw"


class LoraBody(Told):
    """The adapter that a client asks for. A server that trains the whole model ignores it."""

    rank: Seq
    seed: Seed | None = None
    """None: the server's."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class NewModelBody(Told):
    """A request for a new model."""

    session_id: str
    model_seq_id: Seq
    base_model: str | None = None
    """None: the model of the state with which it begins."""
    user_metadata: JsonObject | None = None
    optimizer_config: OptimizerBody | None = None


class CreateModelBody(NewModelBody):
    """A request for a new model that begins with the weights of the base model."""

    lora_config: LoraBody | None = None


class LoadModelBody(NewModelBody):
    """A request for a new model that begins with a saved state."""

    path: str
    optimizer: bool
    """The optimiser's state is loaded too."""


class ModelBody(Told):
    """A request about a model."""

    model_id: str


class TrainingBody(ModelBody):
    """A numbered request to an existing model, for the trainer."""

    seq_id: Seq


class LoadWeightsBody(TrainingBody):
    """A request to load a saved state into an existing model."""

    path: str
    optimizer: bool


class AdamBody(Body):
    """The parameters of an Adam update."""

    learning_rate: NonNegative = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: NonNegative = 1e-12
    weight_decay: NonNegative = 0.0
    grad_clip_norm: Finite = 0.0

    def params(self) -> AdamParams:
        """Returns these parameters in the trainer's form. A `grad_clip_norm` of 0 or less means that gradients are not
        clipped."""
        fields = self.model_dump(exclude={"grad_clip_norm"})
        return AdamParams(**fields, max_grad_norm=self.grad_clip_norm if self.grad_clip_norm > 0 else float("inf"))


class OptimStepBody(TrainingBody):
    """A request for an optimiser update."""

    adam_params: AdamBody
    optimizer_params: None = None


class SaveBody(TrainingBody):
    """The common fields of the requests that save a model's state or weights."""

    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Labels | None = None


class SaveStateBody(SaveBody):
    """A request to save the state of a model."""

    path: str


class SaveExternalBody(SaveBody):
    """A request to save weights for download."""

    path: str
    age_encryption_recipients: None = None


class SaveForSamplerBody(SaveBody):
    """A request to make a model's weights available to samplers: with `path` they are saved under this name; with
    `sampling_session_seq_id` one new sampler gets them, and nothing is saved."""

    path: str | None = None
    sampling_session_seq_id: Seq | None = None
    """The number of the sampler in its session."""
    kind: Literal["snapshot", "inflight"] = "snapshot"

    @model_validator(mode="after")
    def path_or_sampler(self) -> Self:
        """Raises ValueError if both `path` and `sampling_session_seq_id` are given, or neither."""
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("expected a path, or else a sampling_session_seq_id")
        return self


class Unusable(Told):
    """A placeholder for a refused request. It takes the request's number, because later requests of the model wait for
    that number."""

    error: str


Work = NewModelBody | TrainingBody | ForwardBackwardCall | Unusable
"""Requests for the trainer."""


class SamplerBody(Told):
    """A request to begin a sampling session."""

    session_id: str
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Told):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: Many[TokenId] = Field([])


class PromptBody(Told):
    """A prompt."""

    chunks: Many[ChunkBody]


class SamplingBody(Body):
    """The sampling parameters of a request for samples."""

    max_tokens: Annotated[Seq, Field(gt=0)] | None = None
    seed: Seed | None = None
    stop: Stop | Stops | StopIds | None = None
    temperature: Temperature = 1.0
    top_k: TopK = -1
    top_p: TopP = 1.0

    def stop_ids(self) -> list[int]:
        """Returns the token ids that end a sample."""
        return [token for token in self.stop or () if isinstance(token, int)]


class SampleBody(Body):
    """A request for samples, optionally with log-probabilities of the prompt."""

    num_samples: Annotated[int, Field(gt=0, le=MOST_SAMPLES)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: str
    seq_id: Seq
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_PROMPT_LOGPROBS)] = 0
    topk_sample_logprobs: Seq = 0
    target_prompt_logprobs: JsonObject | None = None
    prompt_alt_tokens_k: Seq = 0
    prompt_logprobs_last_n: Seq | None = None
    record_stability_info: bool | None = None
    base_model: str | None = None
    model_path: str | None = None
    type: str = "sample"

    def tokens(self) -> list[int]:
        """Returns the tokens of the prompt. Raises RequestRefused for a part that is not text."""
        other = {chunk.type for chunk in self.prompt.chunks} - {"encoded_text"}
        if other:
            raise RequestRefused(
                f"a prompt with {', '.join(sorted(other))}; expected encoded_text alone", param="prompt"
            )
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def params(self, room: int) -> SamplingParams:
        """Returns the sampling parameters. `room`: the number of tokens that fit into the model's context after the
        prompt. A larger or missing `max_tokens` becomes `room`. Raises RequestRefused for unsupported fields."""
        unsupported: Mapping[str, tuple[object, str]] = {
            "topk_sample_logprobs": (
                self.topk_sample_logprobs,
                "sample, then ask for topk_prompt_logprobs of the whole",
            ),
            "target_prompt_logprobs": (self.target_prompt_logprobs, "ask for prompt_logprobs of each whole sequence"),
            "prompt_alt_tokens_k": (self.prompt_alt_tokens_k, "ask for topk_prompt_logprobs"),
            "prompt_logprobs_last_n": (self.prompt_logprobs_last_n, "ask for prompt_logprobs, and take the last ones"),
            "record_stability_info": (self.record_stability_info, "train with importance_sampling or ppo"),
        }
        for name, (value, instead) in unsupported.items():
            if value:
                raise RequestRefused(f"{name} = {value}, which is not supported; {instead}", param=name)
        options = self.sampling_params
        if options.stop == []:
            raise RequestRefused(
                "stop = [], a sample that nothing ends, which is not supported; leave stop out, and the model's "
                "end-of-sequence token ends it",
                param="stop",
            )
        fields = options.model_dump(exclude={"max_tokens"})
        return SamplingParams(**fields, max_tokens=min(options.max_tokens or room, room))


class RetrieveBody(Told):
    """A request for the outcome of an earlier request."""

    request_id: str


class PathBody(Told):
    """The `tinker://` path of a saved entry."""

    tinker_path: str


class TtlBody(Told):
    """The time for which a saved entry is kept."""

    ttl_seconds: Lifetime | None = None


class CopyBody(Told):
    """A request to copy a saved entry."""

    source_path: str
    destination_project_id: str
    ttl_seconds: Lifetime | None = None


class OwnerBody(Body):
    """The owners of the sessions to search for."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Many[str] = Field([])


class StatusBody(Body):
    """A condition of a search for sessions: the status that a session must have."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Many[str] | None = None


class SearchCursor(Body):
    """The last session of a page of search results, after which the next page begins."""

    last_created_at: datetime
    last_session_id: str


class SearchBody(Body):
    """A search for sessions: conditions, page size and cursor."""

    session_id: str | None = None
    project_ids: Many[str] | None = None
    user_metadata: Labels = Field({})
    display_name: str | None = None
    owner: OwnerBody = OwnerBody()
    statuses: Many[StatusBody] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None
