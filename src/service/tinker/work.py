"""The trainer does for clients, one request after the other, what they ask for: by its verbs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.tinker.adapters import STATES, exported_spec, record_of, recorded_spec, spec_of
from service.tinker.asked import Creation, Loading, Saving, Unusable, Update, Work
from service.tinker.catalog import Catalog, path_of
from service.tinker.codec import ForwardBackwardCall, encode_output
from service.tinker.owners import Caller
from service.tinker.promises import Failure, Outcome, Success, UserError
from service.tinker.verbs import FilesToCome, TrainerVerbs
from trireme.config.trainer import LoraConfig
from trireme.core.datum import Datum
from trireme.core.errors import RoomFailed, StorageFailed, TriremeError
from trireme.core.types import ForwardBackwardOutput
from trireme.core.weights import AdapterSpec, PublishedWeights
from trireme.process.faults import fault_point

log = logging.getLogger(__name__)


@dataclass
class Gradient:
    """The gradients of a model since its last update."""

    passes: int = 0
    failed: str | None = None
    """Why a part of them is missing."""


@dataclass(frozen=True)
class Done:
    """The result of a request to the trainer."""

    outcome: Outcome
    published: PublishedWeights | None = None
    """The weights that samplers may ask for now."""


class NotRestored(Exception):
    """The trainer was lost, and what it had done for a model could not be done again."""


class TrainingWorker:
    """The trainer, for one request after the other: of one model after the other, or with `lora` of several models in
    turn, each an adapter. Its methods are called by one thread at a time."""

    def __init__(
        self,
        trainer: TrainerVerbs,
        catalog: Catalog,
        bases: Sequence[str],
        base_state: Path,
        save_s: float,
        max_len: int,
        lora: LoraConfig | None = None,
    ) -> None:
        """`bases`: the names of the base, the first of which is told to clients. `base_state`: a new directory for its
        state. `save_s`: how long a save may take. `max_len`: the most tokens of a datum. `lora`: what adapters the
        trainer has, with a seed; None: the whole model is trained."""
        self._trainer, self._catalog, self._save_s, self._max_len = trainer, catalog, save_s, max_len
        self.bases, self._base_state = bases, base_state
        self.lora = lora
        self._version = 0
        self._gradients: dict[str, Gradient] = {}
        self._closed = False
        self.failure: TriremeError | None = None
        """Why the trainer cannot be used any more."""

    def begin(self) -> PublishedWeights:
        """Keeps the base's state, with which whole models begin, and returns its weights. Raises TriremeError."""
        if not self.lora:  # else the adapter with which the trainer has begun, and which changes nothing, is kept
            self._trainer.save_state(self._base_state).wait(self._save_s)
        return self._publish()

    def forget(self, model_id: str) -> None:
        """Frees what a model that has ended has taken."""
        if self._gradients.pop(model_id, None) and self.lora:
            self._trainer.drop_adapter(model_id)

    def close(self) -> None:
        """Has a call that still runs, in a thread that nothing waits for, keep nothing: it is done again."""
        self._closed = True

    def commit(self, model_id: str, directory: Path) -> None:
        """Saves in a new directory what the trainer holds of a model: without adapters of the one that it worked for
        last. Raises TriremeError."""
        if self.lora:
            self._trainer.use_adapter(model_id)
        self._trainer.save_state(directory).wait(self._save_s)

    def load_commit(self, model_id: str, directory: Path) -> None:
        """Makes a model again from what `commit` has saved. Raises NotRestored, TriremeError."""
        try:
            spec = recorded_spec(model_id, self._catalog.run(model_id).lora, self.lora)
        except UserError as error:
            raise NotRestored(str(error)) from None
        if spec:
            self._trainer.add_adapter(model_id, spec)
            self._trainer.use_adapter(model_id)
        self._gradients[model_id] = Gradient()
        self._trainer.load_state(directory, [])

    def again(self, model_id: str, work: Work, error: str) -> PublishedWeights | None:
        """Does again what was done before, after a commit or the other steps since then. `error`: why it failed then.
        Returns weights that are available to samplers again. Raises RoomFailed, NotRestored."""
        if error:  # it must not succeed now: the client was told that it failed
            self._gradients[model_id].failed = error
            return None
        if isinstance(work, Saving):
            return self.publish(model_id)
        outcome = self.run(model_id, work).outcome
        if self.failure:
            raise self.failure
        if isinstance(outcome, Failure):
            raise NotRestored(outcome.error)
        return None

    def publish(self, model_id: str) -> PublishedWeights:
        """Makes the weights of a model available to samplers. Raises TriremeError."""
        if self.lora:
            self._trainer.use_adapter(model_id)
        return self._publish()

    def run(self, model_id: str, work: Work, request: str = "") -> Done:
        """Does what a client asked for. `request`: its id."""
        try:
            if self.lora and not isinstance(work, Creation):
                self._trainer.use_adapter(model_id)
            return self._do(model_id, work, request)
        except Exception as error:  # else the client would wait for ever for this request, and for all behind it
            return self._failed(model_id, work, error)

    def _failed(self, model_id: str, work: Work, error: Exception) -> Done:
        """Returns what a client is told of an error, and notes that a part of its gradients is missing."""
        match error:
            case RoomFailed():
                self.failure = error
                failure = Failure(f"the trainer failed while it worked on this request: {error}", "server")
            case UserError() | ValueError():
                failure = Failure(str(error), "user")
            case TriremeError():
                failure = Failure(str(error), "server" if isinstance(error, StorageFailed) else "user")
            case _:
                log.error("a request to train failed", exc_info=error)
                failure = Failure(f"an error of the server, which its log tells: {type(error).__name__}", "server")
        if isinstance(work, ForwardBackwardCall) and not work.forward_only:
            self._gradients[model_id].failed = f"its request {work.seq_id} failed: {failure.error}"
        return Done(failure)

    def _do(self, model_id: str, work: Work, request: str) -> Done:
        match work:
            case Creation():
                return self._create(model_id, work)
            case Loading():
                self._check_same_adapter(model_id, work.path, work.caller)
                self._load(model_id, work.path, work.with_optimizer, work.caller)
                return Done(Success({"path": work.path, "model_id": model_id, "type": "load_weights"}))
            case ForwardBackwardCall():
                return Done(Success(encode_output(self._pass(model_id, work))))
            case Update():
                return self._update(model_id, work)
            case Saving(kind="state"):
                return self._save_state(model_id, work, request)
            case Saving(kind="external"):
                return self._save_external(model_id, work, request)
            case Saving():
                return self._save_for_sampler(model_id, work, request)
            case Unusable(error):
                raise UserError(error)

    def _create(self, model_id: str, work: Creation) -> Done:
        if work.base_model is not None and work.base_model not in self.bases:
            named = " or ".join(dict.fromkeys(self.bases))
            raise UserError(f"base_model = {work.base_model!r}; expected {named}, the model of this server")
        if work.optimizer != "adamw":
            raise UserError(f"the optimizer {work.optimizer!r}; expected adamw, the only one here")
        record = self._begin_adapter(model_id, work) if self.lora else None
        self._gradients[model_id] = Gradient()
        created: dict[str, object] = {"model_id": model_id}
        if work.path is not None:
            if not self._is_exported(work.path, work.caller):
                self._load(model_id, work.path, work.with_optimizer, work.caller)
            created |= {"path": work.path, "type": "load_weights"}
        else:
            if not self.lora:
                self._trainer.load_state(self._base_state, [])
            created["type"] = "create_model"
        self._catalog.begin(model_id, work.user_metadata, record, work.caller.owner)
        return Done(Success(created))

    def _begin_adapter(self, model_id: str, work: Creation) -> dict[str, Any]:
        """Makes and uses the adapter of a new model, and returns what is to be kept of it. `forget` drops it, also if
        the rest of the creation fails."""
        assert self.lora
        start = None
        if work.path is None:
            spec: AdapterSpec | None = spec_of(work.wish, self.lora)
        elif self._is_exported(work.path, work.caller):
            spec, start = self._exported(work.path, work.with_optimizer, work.caller)
        else:
            spec = self._saved_spec(work.path, work.caller)
        assert spec
        self._trainer.add_adapter(model_id, spec, start)
        self._trainer.use_adapter(model_id)
        return record_of(spec, self.lora)

    def _is_exported(self, path: str, caller: Caller) -> bool:
        """Tells whether a path is that of an adapter's weights in peft's form, with which another one may begin."""
        return self.lora is not None and self._catalog.find(path, None, caller)[1].kind != "weights"

    def _exported(self, path: str, with_optimizer: bool, caller: Caller) -> tuple[AdapterSpec, Path]:
        directory, saved = self._catalog.find(path, None, caller)
        if with_optimizer:
            raise UserError(f"{path} has no state of the optimiser; load it without, or load a state ({STATES})")
        run = self._catalog.run(saved.model_id)
        self._check_base(path, run.base_model)
        return exported_spec(path, run.lora), directory

    def _check_base(self, path: str, base_model: str) -> None:
        if base_model not in self.bases:
            raise UserError(f"{path} belongs to the base {base_model}; expected a state of {self.bases[0]}")

    def _saved_spec(self, path: str, caller: Caller) -> AdapterSpec | None:
        _, saved = self._catalog.find(path, "weights", caller)
        return recorded_spec(path, self._catalog.run(saved.model_id).lora, self.lora)

    def _check_same_adapter(self, model_id: str, path: str, caller: Caller) -> None:
        """Raises UserError unless a state is of such an adapter as a model has."""
        own = recorded_spec(model_id, self._catalog.run(model_id).lora, self.lora)
        saved = self._saved_spec(path, caller)
        if own and saved and replace(saved, seed=own.seed) != own:
            raise UserError(
                f"{path} is of an adapter of rank {saved.rank} for {', '.join(saved.targets)}; expected one of rank "
                f"{own.rank} for {', '.join(own.targets)}, as this model has: create a client from the state"
            )

    def _load(self, model_id: str, path: str, with_optimizer: bool, caller: Caller) -> None:
        directory, saved = self._catalog.find(path, "weights", caller)
        run = self._catalog.run(saved.model_id)
        self._check_base(path, run.base_model)
        recorded_spec(path, run.lora, self.lora)
        self._trainer.load_state(directory, [])
        if not with_optimizer:
            self._trainer.reset_optimizer()
        self._gradients[model_id] = Gradient()

    def _pass(self, model_id: str, call: ForwardBackwardCall) -> ForwardBackwardOutput:
        parameters, data = call.parameters, self._data(call)
        if call.forward_only:
            output = self._trainer.forward(data)
            return replace(output, metrics=_loss(data, output) if call.loss_fn == "cross_entropy" else {})
        output = self._trainer.forward_backward(data, call.loss_fn, parameters)
        self._gradients[model_id].passes += 1
        return output

    def _data(self, call: ForwardBackwardCall) -> list[Datum]:
        """Returns the datums of a pass. Raises UserError for those that the model cannot read."""
        data = call.data()
        if not data:
            raise UserError("no datums; expected at least one")
        longest = max(range(len(data)), key=lambda number: data[number].model_input.length)
        if (length := data[longest].model_input.length) > self._max_len:
            raise UserError(
                f"datum {longest} of {length} tokens; expected at most {self._max_len}, the model's context"
            )
        return data

    def _update(self, model_id: str, work: Update) -> Done:
        """Applies the gradients, unless a part of them is missing: then all are dropped."""
        gradient, self._gradients[model_id] = self._gradients[model_id], Gradient()
        if gradient.failed:
            self._trainer.drop_gradients()
            raise UserError(
                f"nothing was updated, and all gradients are dropped, as a part of them is missing: {gradient.failed}"
            )
        if not gradient.passes:
            raise UserError("optim_step without a gradient; expected a forward_backward before it")
        if self.lora and work.adam.eps == 0:  # at first the gradient of A is 0: it would be divided by 0
            self._trainer.drop_gradients()
            raise UserError("adam_params.eps = 0 for an adapter; expected more than 0: nothing was updated")
        return Done(Success({"metrics": dict(self._trainer.optim_step(work.adam).metrics)}))

    def _save_state(self, model_id: str, work: Saving, request: str) -> Done:
        if work.name is None:
            raise UserError("save_weights without a path; expected the name of the state")
        path = path_of(model_id, "weights", work.name)
        if not self._catalog.kept(path, request):
            staging = self._catalog.staging(model_id, "weights", work.name, work.overwrite)
            self._keep(staging, self._trainer.save_state(staging), work, request)
        return Done(Success({"path": path, "type": "save_weights"}))

    def _save_for_sampler(self, model_id: str, work: Saving, request: str) -> Done:
        """Makes the weights available to samplers, and writes those that have a name."""
        if work.name is None:
            return Done(Success({"type": "save_weights_for_sampler"}), self._publish())
        path = path_of(model_id, "sampler_weights", work.name)
        if self._catalog.kept(path, request):
            published = self._publish()
        else:
            staging = self._catalog.staging(model_id, "sampler_weights", work.name, work.overwrite)
            published = self._publish()
            self._keep(staging, self._trainer.save_weights(staging, published), work, request)
        return Done(Success({"path": path, "type": "save_weights_for_sampler"}), published)

    def _save_external(self, model_id: str, work: Saving, request: str) -> Done:
        """Writes the weights for download; samplers do not get them."""
        assert work.name is not None, "checked when it was accepted"
        path = path_of(model_id, "external_weights", work.name)
        if not self._catalog.kept(path, request):
            staging = self._catalog.staging(model_id, "external_weights", work.name, work.overwrite)
            self._keep(staging, self._trainer.save_weights(staging, self._publish()), work, request)
        _, saved = self._catalog.find(path)
        size = sum(saved.files.values())
        return Done(Success({"path": path, "size_bytes": size, "type": "save_weights_external"}))

    def _keep(self, staging: Path, written: FilesToCome, work: Saving, request: str) -> None:
        try:
            files = written.wait(self._save_s)
        except StorageFailed:
            self._catalog.discard(staging)  # a disk that is full would stay so
            raise
        if self._closed:
            raise RoomFailed("the trainer was lost; what it wrote is written again")
        self._catalog.keep(staging, files, work.ttl_s, work.user_metadata, request)
        fault_point("tinker.save.kept")

    def _publish(self) -> PublishedWeights:
        published = self._trainer.publish_weights(self._version)
        self._version += 1
        return published


def _loss(data: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """Returns the cross-entropy of a pass without a gradient."""
    weights = np.concatenate([datum.loss_fn_inputs["weights"].data for datum in data])
    counted = weights != 0
    return {"loss:sum": -float(np.dot(weights[counted].astype(np.float64), output.logprobs[counted]))}
