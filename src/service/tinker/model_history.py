"""Remembers the requests that the trainer has done for a model since the model's newest checkpoint, so that they can be
repeated.

A server saves a model for itself from time to time, after an update, when no gradients are held. If the trainer is
lost, the server loads that checkpoint and repeats the later requests: creations of models, loads of saved states,
passes with a gradient, updates, and requests that made weights available to samplers. The client's results do not
change. Such a request is called a step in this module; it is not a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from service.tinker.bodies import (
    LoadModelBody,
    LoadWeightsBody,
    NewModelBody,
    OptimStepBody,
    SaveForSamplerBody,
    Work,
)
from service.tinker.codec import ForwardBackwardCall


@dataclass(frozen=True)
class Step:
    """A request that the trainer has done, to be repeated if the trainer is lost."""

    seq: int
    work: Work
    error: str = ""
    """Why the request failed; "": it did not fail."""


@dataclass(frozen=True)
class ModelHistory:
    """Holds everything that is needed to restore one model if the trainer dies: the model's newest checkpoint, and the
    requests (each a `Step`) that the trainer has done for the model since that checkpoint."""

    place: str = ""
    """The directory of the model's newest checkpoint; "": there is none."""
    steps: tuple[Step, ...] = ()
    """The steps since that checkpoint, without the steps in `batch`."""
    batch: tuple[Step, ...] = ()
    """The passes with a gradient since the newest update; the trainer holds their gradients."""
    began_s: float | None = None
    """When the first step since that checkpoint was done, in seconds of the server's clock; None: there is none."""

    def noted(self, step: Step, now: float) -> ModelHistory:
        """Returns the history after a request was done at the time `now`; unchanged if the request need not be
        repeated."""
        steps = self.steps
        batch = self.batch
        match step.work:
            case ForwardBackwardCall() if not step.work.forward_only:
                batch += (step,)
            case OptimStepBody():
                if not step.error:
                    steps += (*batch, step)
                batch = ()  # an update that failed has dropped all gradients
            case NewModelBody() | LoadWeightsBody() if not step.error:
                steps += (step,)
                batch = ()
            case SaveForSamplerBody() if not step.error:
                steps += (step,)
            case _:
                return self
        return replace(self, steps=steps, batch=batch, began_s=now if self.began_s is None else self.began_s)

    def saved(self, place: str) -> ModelHistory:
        """Returns the history after all steps were saved in a checkpoint, in the directory `place`."""
        return replace(self, place=place, steps=(), began_s=None)

    def is_due(self, now: float, every_s: float) -> bool:
        """Returns True if the server should save the model now. While the trainer holds gradients of the model, this is
        always False. Otherwise it is True if a step in this history loaded a saved state, because the client may delete
        that state. It is also True if the first step was done at least `every_s` seconds ago and the newest step is an
        optimiser update."""
        if self.batch or not self.steps:
            return False
        if any(isinstance(step.work, LoadModelBody | LoadWeightsBody) for step in self.steps):
            return True
        return (
            self.began_s is not None
            and now - self.began_s >= every_s
            # After a later snapshot, a checkpoint would let go of that.
            and isinstance(self.steps[-1].work, OptimStepBody)
        )

    def all_steps(self) -> Iterator[Step]:
        """Yields all steps, in the order in which to repeat them."""
        yield from self.steps
        yield from self.batch

    @property
    def numbers(self) -> set[int]:
        """The numbers of all steps."""
        return {step.seq for step in self.all_steps()}
