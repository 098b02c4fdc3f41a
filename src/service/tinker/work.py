"""The trainer does for clients, one request after the other, what they ask for: by its verbs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from service.tinker.catalog import Catalog, SavedWeights
from service.tinker.codec import ForwardBackwardCall, encode_output
from service.tinker.promises import Failure, Outcome, Success, UserError
from service.tinker.verbs import FilesToCome, TrainerVerbs
from trireme.core.datum import Datum
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.types import AdamParams, ForwardBackwardOutput
from trireme.core.weights import PublishedWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Creation:
    """Begins a model: with the base's weights, or with a saved state."""

    base_model: str | None
    """The base that the client asked for; None: that of the state."""
    user_metadata: Mapping[str, Any] | None
    optimizer: str
    """The optimiser that it wants."""
    path: str | None = None
    """The state to begin with."""
    with_optimizer: bool = False
    """The optimiser's state is loaded too."""


@dataclass(frozen=True)
class Loading:
    """Has a model take a saved state."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class Update:
    """Applies the gradients."""

    adam: AdamParams


@dataclass(frozen=True)
class Saving:
    """Saves a state, weights for samplers, or weights for download."""

    kind: Literal["state", "snapshot", "inflight", "external"]
    name: str | None
    """None: the weights are for one sampler, and are not written."""
    ttl_s: int | None
    overwrite: bool
    user_metadata: Mapping[str, str] | None
    sampler_seq: int | None = None
    """The number of the sampler that is to be made, in its session."""


@dataclass(frozen=True)
class Unusable:
    """Takes the number of a request that was refused when it came: later ones wait for that number."""

    error: str


Work = Creation | Loading | ForwardBackwardCall | Update | Saving | Unusable


@dataclass(frozen=True)
class Done:
    """The result of a request to the trainer."""

    outcome: Outcome
    published: PublishedWeights | None = None
    """The weights that samplers may ask for now."""


class TrainingWorker:
    """The trainer, for one client's model after the other. Its methods are called by one thread at a time."""

    def __init__(
        self,
        trainer: TrainerVerbs,
        catalog: Catalog,
        bases: Sequence[str],
        base_state: Path,
        save_s: float,
        max_len: int,
    ) -> None:
        """`bases`: the names of the base, the first of which is told to clients. `base_state`: a new directory for its
        state. `save_s`: how long a save may take. `max_len`: the most tokens of a datum."""
        self._trainer, self._catalog, self._save_s, self._max_len = trainer, catalog, save_s, max_len
        self.bases, self._base_state = bases, base_state
        self._version = 0
        self._passes = 0
        self._failed: str | None = None
        self.failure: TriremeError | None = None
        """Why the trainer cannot be used any more."""

    def begin(self) -> PublishedWeights:
        """Keeps the base's state, with which models begin, and returns its weights. Raises TriremeError."""
        self._trainer.save_state(self._base_state).wait(self._save_s)
        return self._publish()

    def run(self, model_id: str, work: Work) -> Done:
        """Does what a client asked for."""
        try:
            return self._do(model_id, work)
        except (UserError, ValueError) as error:
            failure = Failure(str(error), "user")
        except RoomFailed as error:
            self.failure = error
            failure = Failure(f"the trainer has failed, and this server ends: {error}", "server")
        except TriremeError as error:
            failure = Failure(str(error), "server" if isinstance(error, StorageFailed) else "user")
        except Exception as error:  # else the client would wait for ever for this request, and for all behind it
            log.exception("a request to train failed")
            failure = Failure(f"an error of the server, which its log tells: {type(error).__name__}", "server")
        if isinstance(work, ForwardBackwardCall) and not work.forward_only:
            self._failed = f"its request {work.seq_id} failed: {failure.error}"
        return Done(failure)

    def _do(self, model_id: str, work: Work) -> Done:
        match work:
            case Creation():
                return self._create(model_id, work)
            case Loading():
                self._load(work.path, work.with_optimizer)
                return Done(Success({"path": work.path, "model_id": model_id, "type": "load_weights"}))
            case ForwardBackwardCall():
                return Done(Success(encode_output(self._pass(work))))
            case Update():
                return self._update(work)
            case Saving(kind="state"):
                return self._save_state(model_id, work)
            case Saving(kind="external"):
                return self._save_external(model_id, work)
            case Saving():
                return self._save_for_sampler(model_id, work)
            case Unusable(error):
                raise UserError(error)

    def _create(self, model_id: str, work: Creation) -> Done:
        if work.base_model is not None and work.base_model not in self.bases:
            raise UserError(f"base_model = {work.base_model!r}; expected {self.bases[0]}, the model of this server")
        if work.optimizer != "adamw":
            raise UserError(f"the optimizer {work.optimizer!r}; expected adamw, the only one here")
        created: dict[str, object] = {"model_id": model_id}
        if work.path is None:
            self._trainer.load_state(self._base_state, [])
            created["type"] = "create_model"
        else:
            self._load(work.path, work.with_optimizer)
            created |= {"path": work.path, "type": "load_weights"}
        self._passes, self._failed = 0, None
        self._catalog.begin(model_id, work.user_metadata)
        return Done(Success(created))

    def _load(self, path: str, with_optimizer: bool) -> None:
        directory, saved = self._catalog.find(path, "weights")
        if (base := self._catalog.run(saved.model_id).base_model) not in self.bases:
            raise UserError(f"{path} belongs to the base {base}; expected a state of {self.bases[0]}")
        self._trainer.load_state(directory, [])
        if not with_optimizer:
            self._trainer.reset_optimizer()
        self._passes, self._failed = 0, None

    def _pass(self, call: ForwardBackwardCall) -> ForwardBackwardOutput:
        parameters, data = call.parameters, call.data()
        if not data:
            raise UserError("no datums; expected at least one")
        longest = max(range(len(data)), key=lambda number: data[number].model_input.length)
        if (length := data[longest].model_input.length) > self._max_len:
            raise UserError(
                f"datum {longest} of {length} tokens; expected at most {self._max_len}, the model's context"
            )
        if call.forward_only:
            output = self._trainer.forward(data)
            return replace(output, metrics=_loss(data, output) if call.loss_fn == "cross_entropy" else {})
        output = self._trainer.forward_backward(data, call.loss_fn, parameters)
        self._passes += 1
        return output

    def _update(self, work: Update) -> Done:
        """Applies the gradients, unless a part of them is missing: then all are dropped."""
        passes, failed = self._passes, self._failed
        self._passes, self._failed = 0, None
        if failed:
            self._trainer.drop_gradients()
            raise UserError(
                f"nothing was updated, and all gradients are dropped, as a part of them is missing: {failed}"
            )
        if not passes:
            raise UserError("optim_step without a gradient; expected a forward_backward before it")
        return Done(Success({"metrics": dict(self._trainer.optim_step(work.adam).metrics)}))

    def _save_state(self, model_id: str, work: Saving) -> Done:
        if work.name is None:
            raise UserError("save_weights without a path; expected the name of the state")
        staging = self._catalog.staging(model_id, "weights", work.name, work.overwrite)
        saved = self._keep(staging, self._trainer.save_state(staging), work)
        return Done(Success({"path": saved.path, "type": "save_weights"}))

    def _save_for_sampler(self, model_id: str, work: Saving) -> Done:
        """Makes the weights available to samplers, and writes those that have a name."""
        if work.name is None:
            return Done(Success({"type": "save_weights_for_sampler"}), self._publish())
        staging = self._catalog.staging(model_id, "sampler_weights", work.name, work.overwrite)
        published = self._publish()
        saved = self._keep(staging, self._trainer.save_weights(staging, published), work)
        return Done(Success({"path": saved.path, "type": "save_weights_for_sampler"}), published)

    def _save_external(self, model_id: str, work: Saving) -> Done:
        """Writes the weights for download; samplers do not get them."""
        assert work.name is not None, "checked when it was accepted"
        staging = self._catalog.staging(model_id, "external_weights", work.name, work.overwrite)
        saved = self._keep(staging, self._trainer.save_weights(staging, self._publish()), work)
        size = sum(saved.files.values())
        return Done(Success({"path": saved.path, "size_bytes": size, "type": "save_weights_external"}))

    def _keep(self, staging: Path, written: FilesToCome, work: Saving) -> SavedWeights:
        try:
            files = written.wait(self._save_s)
        except StorageFailed:
            self._catalog.discard(staging)  # a disk that is full would stay so
            raise
        return self._catalog.keep(staging, files, work.ttl_s, work.user_metadata)

    def _publish(self) -> PublishedWeights:
        published = self._trainer.publish_weights(self._version)
        self._version += 1
        return published


def _loss(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """Returns the cross-entropy of a pass without a gradient."""
    weights = np.concatenate([datum.loss_fn_inputs["weights"].data for datum in data])
    counted = weights != 0
    return {"loss:sum": -float(np.dot(weights[counted].astype(np.float64), output.logprobs[counted]))}
