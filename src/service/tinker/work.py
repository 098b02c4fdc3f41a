"""Runs the requests of Tinker's clients on the trainer, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from service.requests import RequestRefused
from service.tinker.adapters import STATES, exported_spec, record_of, recorded_spec, spec_of
from service.tinker.bodies import (
    CreateModelBody,
    LoadModelBody,
    LoadWeightsBody,
    NewModelBody,
    OptimStepBody,
    SaveBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveStateBody,
    Unusable,
    Work,
)
from service.tinker.catalog import Catalog, SavedKind, SavedRun, SavedWeights, path_of
from service.tinker.codec import ForwardBackwardCall, encode_output
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Outcome, Success
from trireme.config.trainer import LoraConfig
from trireme.core.datum import Datum
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.types import ForwardBackwardOutput
from trireme.core.weights import AdapterSpec, PublishedWeights
from trireme.process.faults import fault_point
from trireme.run.rooms import PendingFiles, Trainer

Payload = dict[str, object]
Result = tuple[Outcome, PublishedWeights | None]
"""(outcome, weights): the outcome of a request to the trainer, and the weights that the request made available to
samplers, else None."""
log = logging.getLogger(__name__)


@dataclass
class Gradient:
    """The state of a model's gradients since the model's last update: the number of passes, and whether a pass
    failed."""

    passes: int = 0
    failed: str | None = None
    """Why a part of the gradients is missing; None: no part is."""


class NotRestored(Exception):
    """Raised when a model's steps could not be repeated after the trainer was lost."""


class TrainingWorker:
    """Runs one request after the other on the trainer. Without `lora` it trains one whole model at a time; with `lora`,
    several models in turn, each an adapter. Only one thread at a time may call its methods."""

    def __init__(
        self,
        trainer: Trainer,
        catalog: Catalog,
        bases: Sequence[str],
        base_state: Path,
        save_s: float,
        max_len: int,
        lora: LoraConfig | None,
    ) -> None:
        """`bases`: the names of the base model (clients see the first). `base_state`: a new directory for the state of
        the base model. `save_s`: the seconds that a save may take. `max_len`: the most tokens of a datum. `lora`: the
        trainer's settings for adapters, with a seed; None: the whole model is trained."""
        self._trainer = trainer
        self._catalog = catalog
        self._save_s = save_s
        self._max_len = max_len
        self.bases = bases
        self._base_state = base_state
        self.lora = lora
        self._version = 0
        self._gradients: dict[str, Gradient] = {}
        self._closed = False
        self.failure: TriremeError | None = None
        """Why the trainer cannot be used any more; None: it can."""

    def begin(self) -> PublishedWeights:
        """Returns the published weights of the base model. Without `lora`, first saves the state of the base model,
        with which new models begin. Raises TriremeError."""
        if not self.lora:  # else the adapter with which the trainer has begun, and which changes nothing, is kept
            self._trainer.save_state(self._base_state).wait(self._save_s)
        return self._publish()

    @property
    def models(self) -> list[str]:
        """The ids of the models that the trainer holds."""
        return list(self._gradients)

    def forget(self, model_id: str) -> None:
        """Frees the gradients and the adapter of an ended model."""
        if self._gradients.pop(model_id, None) and self.lora:
            self._trainer.drop_adapter(model_id)

    def close(self) -> None:
        """Ends the use of this worker. If a save still runs in another thread, it then raises RoomFailed and does not
        count as saved, because another worker will run its request again."""
        self._closed = True

    def checkpoint(self, model_id: str, directory: Path) -> None:
        """Saves the trainer's state of a model in the new directory `directory`. Without adapters, the trainer must
        hold this model. Raises TriremeError if that fails."""
        self._use(model_id)
        self._trainer.save_state(directory).wait(self._save_s)

    def _use(self, model_id: str) -> None:
        if self.lora:
            self._trainer.use_adapter(model_id)

    def load_checkpoint(self, model_id: str, directory: Path) -> None:
        """Restores a model from a directory that `checkpoint` has written. Raises NotRestored if the trainer's settings
        do not fit the model, and TriremeError."""
        try:
            spec = recorded_spec(model_id, self._catalog.run(model_id).lora, self.lora)
        except RequestRefused as error:
            raise NotRestored(str(error)) from None
        self._add(model_id, spec)
        self._load(model_id, directory)

    def again(self, model_id: str, work: Work, error: str, caller: Caller) -> PublishedWeights | None:
        """Repeats an earlier step of a model, after the model's checkpoint and its steps before this one were restored.
        `error`: why the step failed the first time; "": it did not fail. A step that failed is not run, but counts as
        failed again. Returns the weights that the step published for samplers, else None. Raises RoomFailed if the
        trainer is lost, and NotRestored if the step fails now."""
        if error:  # it must not succeed now: the client was told that it failed
            self._gradients[model_id].failed = error
            return None
        if isinstance(work, SaveForSamplerBody):
            return self.publish(model_id)
        outcome, _ = self.run(model_id, work, caller)
        if self.failure:
            raise self.failure
        if isinstance(outcome, Failure):
            raise NotRestored(outcome.error)
        return None

    def publish(self, model_id: str) -> PublishedWeights:
        """Makes the weights of a model available to samplers. Raises TriremeError."""
        self._use(model_id)
        return self._publish()

    def run(self, model_id: str, work: Work, caller: Caller, request: str = "") -> Result:
        """Runs a client's request. Returns its outcome (a Failure if the request raised an error) and the weights that
        it published for samplers, else None. Sets `failure` if the trainer is lost. `request`: the id of the
        request."""
        try:
            if not isinstance(work, NewModelBody):
                self._use(model_id)
            return self._do(model_id, work, caller, request)
        except Exception as error:  # else the client would wait for ever for this request, and for all behind it
            if isinstance(error, RoomFailed):
                self.failure = error
            failure = failure_of(error)
            if isinstance(work, ForwardBackwardCall) and not work.forward_only:
                self._gradients[model_id].failed = f"its request {work.seq_id} failed: {failure.error}"
            return failure, None

    def _do(self, model_id: str, work: Work, caller: Caller, request: str) -> Result:
        published: PublishedWeights | None = None
        payload: bytes | Payload
        match work:
            case CreateModelBody() | LoadModelBody():
                payload = self._create(model_id, work, caller)
            case LoadWeightsBody():
                payload = self._load_weights(model_id, work, caller)
            case ForwardBackwardCall():
                payload = encode_output(self._pass(model_id, work))
            case OptimStepBody():
                payload = self._update(model_id, work)
            case SaveStateBody(path=name):
                saved = self._save(path_of(model_id, "weights", name), work, request, self._trainer.save_state)
                payload = {"path": saved.path, "type": "save_weights"}
            case SaveExternalBody(path=name):
                write = partial(self._trainer.save_weights, published=self._publish())
                saved = self._save(path_of(model_id, "external_weights", name), work, request, write)
                payload = {"path": saved.path, "size_bytes": saved.size, "type": "save_weights_external"}
            case SaveForSamplerBody(path=name):
                published = self._publish()
                payload = {"type": "save_weights_for_sampler"}
                if name is not None:
                    write = partial(self._trainer.save_weights, published=published)
                    saved = self._save(path_of(model_id, "sampler_weights", name), work, request, write)
                    payload["path"] = saved.path
            case Unusable(error=error):
                raise RequestRefused(error)
        return Success(payload), published

    def _create(self, model_id: str, work: CreateModelBody | LoadModelBody, caller: Caller) -> Payload:
        if work.base_model not in (None, *self.bases):
            named = " or ".join(dict.fromkeys(self.bases))
            raise RequestRefused(f"base_model = {work.base_model!r}; expected {named}, the model of this server")
        created: Payload = {"model_id": model_id, "type": "create_model"}
        spec: AdapterSpec | None = None
        start: Path | None = None
        state: Path | None = None
        if isinstance(work, LoadModelBody):
            created = {"model_id": model_id, "type": "load_weights", "path": work.path}
            directory, saved, run = self._source(work.path, caller, None if self.lora else "weights")
            if saved.kind == "weights":
                state = directory
                spec = recorded_spec(work.path, run.lora, self.lora)
            else:
                start = directory
                spec = exported_spec(work.path, run.lora)
                if work.optimizer:
                    raise RequestRefused(
                        f"{work.path} has no state of the optimiser; load it without, or load a state ({STATES})"
                    )
        elif self.lora:
            spec = spec_of(work.lora_config, self.lora)
        else:
            state = self._base_state
        self._add(model_id, spec, start)
        if state:
            self._load(model_id, state, not isinstance(work, LoadModelBody) or work.optimizer)
        if spec and self.lora:
            record = record_of(spec, self.lora)
        else:
            record = None
        self._catalog.begin(model_id, work.user_metadata, record, caller.owner)
        return created

    def _add(self, model_id: str, spec: AdapterSpec | None, start: Path | None = None) -> None:
        """Adds a new model to the trainer and makes it the model in use; `forget` removes it. `start`: the directory of
        saved weights with which its adapter begins."""
        if spec:
            self._trainer.add_adapter(model_id, spec, start)
            self._trainer.use_adapter(model_id)
        self._gradients[model_id] = Gradient()

    def _load(self, model_id: str, state: Path, with_optimizer: bool = True) -> None:
        self._trainer.load_state(state, [])
        if not with_optimizer:
            self._trainer.reset_optimizer()
        self._gradients[model_id] = Gradient()

    def _source(self, path: str, caller: Caller, kind: SavedKind | None) -> tuple[Path, SavedWeights, SavedRun]:
        """Returns the directory of a saved entry, its record, and the record of its training run. Raises RequestRefused
        if the caller may read no such entry, or if the entry belongs to another base model."""
        directory, saved = self._catalog.find(path, kind, caller)
        run = self._catalog.run(saved.model_id)
        if run.base_model not in self.bases:
            raise RequestRefused(f"{path} belongs to the base {run.base_model}; expected a state of {self.bases[0]}")
        return directory, saved, run

    def _load_weights(self, model_id: str, work: LoadWeightsBody, caller: Caller) -> Payload:
        """Loads a saved state into a model. Raises RequestRefused if the adapter of the state has another rank or other
        layers."""
        directory, _, run = self._source(work.path, caller, "weights")
        current = recorded_spec(model_id, self._catalog.run(model_id).lora, self.lora)
        saved = recorded_spec(work.path, run.lora, self.lora)
        if current and saved and replace(saved, seed=current.seed) != current:
            raise RequestRefused(
                f"{work.path} is of an adapter of rank {saved.rank} for {', '.join(saved.targets)}; expected one of "
                f"rank {current.rank} for {', '.join(current.targets)}, as this model has: create a client from the "
                "state"
            )
        self._load(model_id, directory, work.optimizer)
        return {"path": work.path, "model_id": model_id, "type": "load_weights"}

    def _pass(self, model_id: str, call: ForwardBackwardCall) -> ForwardBackwardOutput:
        parameters = call.parameters
        data = self._data(call)
        if call.forward_only:
            output = self._trainer.forward(data)
            return replace(output, metrics=_loss(data, output) if call.loss_fn == "cross_entropy" else {})
        output = self._trainer.forward_backward(data, call.loss_fn, parameters)
        self._gradients[model_id].passes += 1
        return output

    def _data(self, call: ForwardBackwardCall) -> list[Datum]:
        """Returns the datums of a pass. Raises RequestRefused if the pass has no datums, or if a datum is malformed or
        longer than `max_len`."""
        data = call.data()
        if not data:
            raise RequestRefused("no datums; expected at least one")
        longest = max(range(len(data)), key=lambda number: data[number].model_input.length)
        length = data[longest].model_input.length
        if length > self._max_len:
            raise RequestRefused(
                f"datum {longest} of {length} tokens; expected at most {self._max_len}, the model's context"
            )
        return data

    def _update(self, model_id: str, work: OptimStepBody) -> Payload:
        """Applies a model's gradients in an optimiser update. If a pass since the last update failed, drops all
        gradients and raises RequestRefused."""
        gradient = self._gradients[model_id]
        self._gradients[model_id] = Gradient()
        if gradient.failed:
            self._trainer.drop_gradients()
            raise RequestRefused(
                f"nothing was updated, and all gradients are dropped, as a part of them is missing: {gradient.failed}"
            )
        if not gradient.passes:
            raise RequestRefused("optim_step without a gradient; expected a forward_backward before it")
        if self.lora and work.adam_params.eps == 0:  # at first the gradient of A is 0: it would be divided by 0
            self._trainer.drop_gradients()
            raise RequestRefused("adam_params.eps = 0 for an adapter; expected more than 0: nothing was updated")
        return {"metrics": dict(self._trainer.optim_step(work.adam_params.params()).metrics)}

    def _save(self, path: str, work: SaveBody, request: str, write: Callable[[Path], PendingFiles]) -> SavedWeights:
        """Lets `write` fill a new directory, and adds the directory to the catalog as the entry `path`. Returns the
        entry. If the same request saved this entry before the server was killed, writes nothing and returns that entry.
        Raises RoomFailed if the trainer was lost, and StorageFailed."""
        saved = self._catalog.saved_by(path, request)
        if saved:
            return saved
        staging = self._catalog.staging(path, work.overwrite)
        try:
            files = write(staging).wait(self._save_s)
        except StorageFailed:
            self._catalog.discard(path)  # a disk that is full would stay so
            raise
        if self._closed:
            raise RoomFailed("the trainer was lost while it saved; the save is repeated")
        sizes = {file.path.partition("/")[2]: file.size for file in files}  # it stands below its directory's name
        saved = self._catalog.keep(path, sizes, work.ttl_seconds, work.user_metadata or {}, request)
        fault_point("tinker.save.kept")
        return saved

    def _publish(self) -> PublishedWeights:
        published = self._trainer.publish_weights(self._version)
        self._version += 1
        return published


def _loss(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """Returns the metrics of a forward pass: the weighted cross-entropy, summed over all tokens."""
    weights = np.concatenate([datum.loss_fn_inputs["weights"].data for datum in data])
    counted = weights != 0
    return {"loss:sum": -float(np.dot(weights[counted].astype(np.float64), output.logprobs[counted]))}


def failure_of(error: Exception) -> Failure:
    """Returns the Failure that a client gets for `error`: a message, and whether the user or the server caused the
    error."""
    match error:
        case RoomFailed():
            return Failure(f"rooms were lost twice while they worked on this request: {error}", "server")
        case StorageFailed():
            return Failure(str(error), "server")
        case TriremeError() | RequestRefused() | ValueError():
            return Failure(str(error), "user")
    log.error("a request failed", exc_info=error)
    return Failure(f"an error of the server, which its log tells: {type(error).__name__}", "server")
