"""How each public method of the client's classes is called in the tour (`tinker_tour`), and which answer is right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import tinker
from tinker import types
from tinker_support import DEADLINE_S, KEY, Served

CLASSES = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)
BASE_MODEL = "assets/sort-base"
"""The name of the model is that of its tokenizer."""
METADATA = {"about": "tour"}
PROJECT = "project-1"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def datums() -> list[types.Datum]:
    targets = types.TensorData(data=[2, 3, 4], dtype="int64")
    return [types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": targets})]


def own_loss(_: Any, logprobs: Any) -> Any:
    return -sum(values.sum() for values in logprobs), {}


def server_loss(logprobs: Any) -> Any:
    loss = -logprobs.sum()
    return loss, {"custom/own:sum": loss}


class Stage:
    """What methods are called on. Each part is made when it is asked for."""

    def __init__(self, served: Served) -> None:
        self.served, self._names = served, count()
        self.service = tinker.ServiceClient(METADATA, PROJECT, display_name="Tour", base_url=served.url, api_key=KEY)

    @cached_property
    def training(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(BASE_MODEL, rank=8, user_metadata=METADATA).result(DEADLINE_S)

    def adam(self) -> types.AdamParams:
        """Gives the model a gradient, and returns how it is applied."""
        self.training.forward_backward(datums(), "cross_entropy").result(DEADLINE_S)
        return types.AdamParams(learning_rate=0.05)

    @cached_property
    def run(self) -> str:
        return str(self.training.get_info().model_id)

    @cached_property
    def state(self) -> str:
        return self.training.save_state("state").result(DEADLINE_S).path

    @cached_property
    def weights(self) -> str:
        return self.training.save_weights_for_sampler("weights").result(DEADLINE_S).path

    @cached_property
    def external(self) -> str:
        return self.training.save_weights_external("external").result(DEADLINE_S).path

    @cached_property
    def sampling(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=BASE_MODEL).result(DEADLINE_S)

    @cached_property
    def sampler(self) -> str:
        return str(self.sampling._sampling_session_id)

    @cached_property
    def session(self) -> str:
        return str(self.service.holder.get_session_id())

    def new_name(self) -> str:
        return f"name-{next(self._names)}"

    @property
    def has_ended(self) -> bool:
        return self.served.server.state.sessions[self.session].ended_s is not None

    def of(self, owner: type) -> Any:
        """Returns the instance of a class whose method is called, in a session that has begun."""
        assert self.session
        makers: Mapping[type, Callable[[], Any]] = {
            tinker.ServiceClient: lambda: self.service,
            tinker.TrainingClient: lambda: self.training,
            tinker.SamplingClient: lambda: self.sampling,
            tinker.RestClient: lambda: self.service.create_rest_client(),
            tinker.AdminClient: lambda: tinker.AdminClient(base_url=self.served.url, api_key=KEY),
        }
        return makers[owner]()


def _is_sampler(stage: Stage, answer: Any) -> bool:
    return len(answer.compute_logprobs(PROMPT).result(DEADLINE_S)) == 3


def _is_model(stage: Stage, answer: Any) -> bool:
    return bool(answer.forward(datums(), "cross_entropy").result(DEADLINE_S).metrics["loss:sum"] > 0)


def _is_loss(stage: Stage, answer: Any) -> bool:
    return _passed(stage, stage.training.forward_backward_custom(datums(), answer).result(DEADLINE_S))


def _passed(stage: Stage, answer: Any) -> bool:
    return bool(answer.metrics["loss:sum"] > 0)


def _is_tokenizer(stage: Stage, answer: Any) -> bool:
    return bool(answer.encode("Sort: 1"))


def _none(stage: Stage, answer: Any) -> bool:
    return answer is None


def _is_run(stage: Stage, answer: Any) -> bool:
    return (answer.training_run_id, answer.user_metadata) == (stage.run, METADATA)


def _lists_state(stage: Stage, answer: Any) -> bool:
    return stage.state in [checkpoint.tinker_path for checkpoint in answer.checkpoints]


def _uses(stage: Stage, answer: Any) -> bool:
    return any(item.project_id == PROJECT and item.size_bytes > 0 for item in answer.data)


def _copied(stage: Stage, answer: Any) -> bool:
    stage.training = stage.service.create_training_client_from_state(answer).result(DEADLINE_S)
    return _is_model(stage, stage.training)


def _checkpoints(stage: Stage) -> Any:
    return stage.service.create_rest_client().list_checkpoints(stage.run).result(DEADLINE_S).checkpoints


def _is_deleted(stage: Stage, answer: Any) -> bool:
    return stage.state not in [checkpoint.tinker_path for checkpoint in _checkpoints(stage)]


def _state_of(stage: Stage) -> Any:
    return next(checkpoint for checkpoint in _checkpoints(stage) if checkpoint.tinker_path == stage.state)


def _serves_base(stage: Stage, answer: Any) -> bool:
    return [model.model_name for model in answer.supported_models] == [BASE_MODEL]


@dataclass(frozen=True)
class Call:
    """How a method and its twin are called, and what tells that the answer is right."""

    arguments: Callable[[Stage], Arguments]
    right: Callable[[Stage, Any], bool]


def call(right: Callable[[Stage, Any], bool], *arguments: Any, **named: Any) -> Call:
    """Returns a call; arguments that are functions are asked with the stage."""

    def of(stage: Stage, value: Any) -> Any:
        return value.ask(stage) if isinstance(value, Of) else value

    return Call(
        lambda s: (tuple(of(s, argument) for argument in arguments), {k: of(s, v) for k, v in named.items()}), right
    )


@dataclass(frozen=True)
class Of:
    ask: Callable[[Stage], Any]


STATE, RUN, SESSION = Of(lambda s: s.state), Of(lambda s: s.run), Of(lambda s: s.session)
NAME = Of(lambda s: s.new_name())
SEARCH = types.SessionSearchRequest(display_name="tour", user_metadata=METADATA)

CALLS: dict[str, Call] = {
    "ServiceClient.close": call(lambda s, a: s.has_ended, "success"),
    "ServiceClient.copy_weights": call(_copied, STATE),
    "ServiceClient.create_custom_loss": call(_is_loss, server_loss, {"logprobs": 1}),
    "ServiceClient.create_lora_training_client": call(_is_model, BASE_MODEL, rank=8),
    "ServiceClient.create_rest_client": call(lambda s, a: isinstance(a, tinker.RestClient)),
    "ServiceClient.create_sampling_client": call(_is_sampler, base_model=BASE_MODEL),
    "ServiceClient.create_training_client_from_state": call(_is_model, STATE),
    "ServiceClient.create_training_client_from_state_with_optimizer": call(_is_model, STATE),
    "ServiceClient.get_console_url": call(lambda s, a: a.startswith("https://")),
    "ServiceClient.get_server_capabilities": call(_serves_base),
    "ServiceClient.get_telemetry": call(lambda s, a: a is not None),
    "ServiceClient.holder": call(lambda s, a: a.get_session_id() == s.session),
    "TrainingClient.create_sampling_client": call(_is_sampler, Of(lambda s: s.weights)),
    "TrainingClient.forward": call(_passed, datums(), "cross_entropy"),
    "TrainingClient.forward_backward": call(_passed, datums(), "cross_entropy"),
    "TrainingClient.forward_backward_custom": call(_passed, datums(), own_loss),
    "TrainingClient.get_console_url": call(lambda s, a: a.startswith("https://")),
    "TrainingClient.get_info": call(lambda s, a: a.model_data.model_name == BASE_MODEL),
    "TrainingClient.get_telemetry": call(lambda s, a: a is not None),
    "TrainingClient.get_tokenizer": call(_is_tokenizer),
    "TrainingClient.load_state": call(lambda s, a: a.path == s.state, STATE),
    "TrainingClient.load_state_with_optimizer": call(lambda s, a: a.path == s.state, STATE),
    "TrainingClient.optim_step": call(lambda s, a: a.metrics["grad_norm"] > 0, Of(lambda s: s.adam())),
    "TrainingClient.save_state": call(lambda s, a: "/weights/name-" in a.path, NAME),
    "TrainingClient.save_weights_and_get_sampling_client": call(_is_sampler),
    "TrainingClient.save_weights_external": call(lambda s, a: "/external_weights/name-" in a.path, NAME),
    "TrainingClient.save_weights_for_sampler": call(lambda s, a: "/sampler_weights/name-" in a.path, NAME),
    "SamplingClient.compute_logprobs": call(lambda s, a: a[0] is None and len(a) == 3, PROMPT),
    "SamplingClient.create": call(_is_sampler, Of(lambda s: s.service.holder), base_model=BASE_MODEL),
    "SamplingClient.from_sampler_handle": call(_is_sampler, Of(lambda s: s.sampling.get_sampler_handle()), api_key=KEY),
    "SamplingClient.get_base_model": call(lambda s, a: a == BASE_MODEL),
    "SamplingClient.get_sampler_handle": call(lambda s, a: bool(a)),
    "SamplingClient.get_telemetry": call(lambda s, a: a is not None),
    "SamplingClient.get_tokenizer": call(_is_tokenizer),
    "SamplingClient.on_queue_state_change": call(_none, Of(lambda s: _queue_state()), "a test"),
    "SamplingClient.sample": call(lambda s, a: len(a.sequences) == 2, PROMPT, 2, types.SamplingParams(max_tokens=4)),
    "RestClient.assign_session_project": call(
        lambda s, a: s.session in [item.session_id for item in _search(s, project_ids=["project-2"])],
        SESSION,
        "project-2",
    ),
    "RestClient.copy_weights": call(_copied, STATE, PROJECT),
    "RestClient.delete_checkpoint": call(_is_deleted, RUN, Of(lambda s: _id_of(s.state))),
    "RestClient.delete_checkpoint_from_tinker_path": call(_is_deleted, STATE),
    "RestClient.export_session_trace": call(lambda s, a: bool(a), SESSION),
    "RestClient.get_audit_log": call(lambda s, a: a.entries is not None),
    "RestClient.get_billing_usage": call(lambda s, a: a.data is not None, "2026-11-01", "2026-11-02"),
    "RestClient.get_current_checkpoint_storage_usage": call(_uses, Of(lambda s: bool(s.state) and PROJECT)),
    "RestClient.get_external_weights_urls": call(lambda s, a: _downloads(s, a), Of(lambda s: s.external)),
    "RestClient.get_sampler": call(lambda s, a: a.base_model == BASE_MODEL, Of(lambda s: s.sampler)),
    "RestClient.get_server_capabilities": call(_serves_base),
    "RestClient.get_session": call(lambda s, a: a.user_metadata == METADATA, SESSION),
    "RestClient.get_telemetry": call(lambda s, a: True),
    "RestClient.get_training_run": call(_is_run, RUN),
    "RestClient.get_training_run_by_tinker_path": call(_is_run, STATE),
    "RestClient.get_weights_info_by_tinker_path": call(lambda s, a: a.base_model == BASE_MODEL, STATE),
    "RestClient.list_checkpoints": call(_lists_state, Of(lambda s: bool(s.state) and s.run)),
    "RestClient.list_sessions": call(lambda s, a: s.session in a.sessions, Of(lambda s: 100 * bool(s.session))),
    "RestClient.list_training_runs": call(
        lambda s, a: a.training_runs[0].training_run_id == s.run, Of(lambda s: bool(s.run) and 5), project_id=PROJECT
    ),
    "RestClient.list_user_checkpoints": call(_lists_state, Of(lambda s: bool(s.state) and 100)),
    "RestClient.publish_checkpoint_from_tinker_path": call(lambda s, a: _state_of(s).public, STATE),
    "RestClient.search_sessions": call(
        lambda s, a: a.sessions[0].session_id == s.session, Of(lambda s: bool(s.session) and SEARCH)
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": call(lambda s, a: _state_of(s).expires_at, STATE, 3600),
    "RestClient.unpublish_checkpoint_from_tinker_path": call(
        lambda s, a: not _state_of(s).public, Of(lambda s: _published(s))
    ),
    "RestClient.whoami": call(lambda s, a: bool(a.user_urn)),
    "AdminClient.get_audit_log": call(lambda s, a: a.entries is not None),
    "AdminClient.get_billing_usage": call(lambda s, a: a.data is not None, "2026-11-01", "2026-11-02"),
    "AdminClient.get_current_checkpoint_storage_usage": call(_uses, Of(lambda s: bool(s.state) and PROJECT)),
    "AdminClient.get_telemetry": call(lambda s, a: True),
}


def _queue_state() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.PAUSED_CAPACITY


def _id_of(path: str) -> str:
    return path.partition("/weights/")[1].strip("/") + "/" + path.rpartition("/")[2]


def _search(stage: Stage, **query: Any) -> Any:
    request = types.SessionSearchRequest(**query)
    return stage.service.create_rest_client().search_sessions(request).result(DEADLINE_S).sessions


def _published(stage: Stage) -> str:
    stage.service.create_rest_client().publish_checkpoint_from_tinker_path(stage.state).result(DEADLINE_S)
    assert _state_of(stage).public
    return stage.state


def _downloads(stage: Stage, answer: Any) -> bool:
    import httpx

    (url,) = answer.urls.values()
    return httpx.get(url).content == stage.served.trainer.theta.tobytes()


BY_CLIENT = {
    "RestClient.whoami": (
        "requires JWT auth",
        "the client asks with a JWT alone, which this server does not use; search_sessions tells who owns a session",
    )
}
"""What the client refuses without asking the server: a part of its error, and what the docs say."""
MAKERS_PAGE = "the URL of a page of Tinker's makers; the client makes it without a request to the server"
NOTES = {
    "ServiceClient.create_custom_loss": "the loss runs in the client, not on the server",
    "ServiceClient.copy_weights": "the copy shares the files of its source; any name is accepted as a project",
    "ServiceClient.get_console_url": MAKERS_PAGE,
    "TrainingClient.get_console_url": MAKERS_PAGE,
    "ServiceClient.get_telemetry": "accepted, and not kept",
    "TrainingClient.load_state": "the client itself says that it is deprecated",
    "TrainingClient.load_state_with_optimizer": "the client itself says that it is deprecated",
    "TrainingClient.save_weights_external": "without `age_encryption_recipients`",
    "SamplingClient.on_queue_state_change": "runs in the client, and writes to the client's log",
    "SamplingClient.sample": "without the options that *Refused calls* names",
    "RestClient.assign_session_project": "any name is accepted as a project",
    "RestClient.copy_weights": "as `ServiceClient.copy_weights`",
    "RestClient.get_external_weights_urls": "the URLs are valid for an hour, but not after the server ends",
    "RestClient.publish_checkpoint_from_tinker_path": "all keys may then read it",
    "RestClient.get_current_checkpoint_storage_usage": "the cost is always 0",
}
"""What else the docs say of methods that work."""
