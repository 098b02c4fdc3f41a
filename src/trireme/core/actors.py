"""Types for Ray's actors: mypy checks `handle.method.remote(...)` as a call of the method, and an editor finds it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Concatenate, Never, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, cast, overload

Args = ParamSpec("Args")
Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Actor = TypeVar("Actor")

ActorProxy: TypeAlias = type[Actor]
"""A handle of an actor of the class `Actor`. As in Ray's own types, a handle is typed as the class itself: a method
that is read from the class has `remote` (`ActorMethod`), and cannot be called directly."""


class ActorOptions(TypedDict, total=False):
    """Ray's options of an actor: its resources, its environment variables, and its placement in the cluster."""

    num_cpus: float
    num_gpus: float
    runtime_env: Mapping[str, Mapping[str, str]]
    scheduling_strategy: Any
    """A scheduling strategy of Ray, for example for a node or a placement group."""
    gpus: Sequence[int]
    """The GPUs that the actor shares with an actor of another room, as numbers of the GPUs of its place, from 0. Not an
    option of Ray: Ray gives such an actor no GPUs (`trireme.process.ray_cluster.shared_gpus`)."""


def place_gpus(actors: Sequence[ActorOptions]) -> float:
    """Returns the number of GPUs that `actors` need together in one place. A GPU that several of them share counts
    once."""
    shared = {number for actor in actors for number in actor.get("gpus", ())}
    return sum(actor.get("num_gpus", 0.0) for actor in actors) + len(shared)


class Ref(Protocol[Value_co]):
    """Ray's reference to a value that another process computes or holds."""

    def __await__(self) -> Generator[object, None, Value_co]: ...


def as_argument(ref: Ref[Value]) -> Value:
    """Returns `ref` itself, typed as its value, so that it can be an argument of a remote call. Ray replaces the
    reference by the value before the method runs."""
    return cast(Value, ref)


class RemoteMethod(Protocol[Args, Value_co]):
    """A method of an actor, read from the actor's handle (`ActorProxy`)."""

    def remote(self, *args: Args.args, **kwargs: Args.kwargs) -> Ref[Value_co]:
        """Calls the method in the actor's process, and does not wait."""


class ActorMethod(Protocol[Args, Result_co, Value_co]):
    """A method of an actor's class. Called on an instance of the class, it returns `Result_co` as usual. On a handle
    (`ActorProxy`), call the method's `remote` instead, which returns a reference to `Value_co`."""

    @overload
    def __get__(self, instance: None, owner: type) -> RemoteMethod[Args, Value_co]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Callable[Args, Result_co]: ...


@overload
def remote_method(
    method: Callable[Concatenate[Never, Args], Coroutine[object, object, Value]],
) -> ActorMethod[Args, Coroutine[object, object, Value], Value]: ...


@overload
def remote_method(method: Callable[Concatenate[Never, Args], Value]) -> ActorMethod[Args, Value, Value]: ...


def remote_method(method: object) -> object:
    """Marks a method of an actor's class that other processes call. Returns `method` itself; only its type changes, to
    `ActorMethod`."""
    return method
