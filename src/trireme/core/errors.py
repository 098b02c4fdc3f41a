"""The errors that a run can end with, and its exit codes.

Every error says what was given, what was expected and what to do. The exit codes are part of the interface:
0 reached `max_steps`; 1 failed while running; 2 bad input, refused before any actor starts; 3 stopped by a limit
of its own; 75 SIGTERM; 130 Ctrl-C.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_LIMIT = 3
EXIT_SIGTERM = 75
EXIT_INTERRUPTED = 130


class TriremeError(Exception):
    """Base of all errors that a user is meant to read without a traceback."""

    exit_code = EXIT_FAILED


class BadInput(TriremeError):
    """Configuration or environment that cannot work; raised before any actor starts."""

    exit_code = EXIT_BAD_INPUT


class BadRequest(BadInput):
    """No replica can sample this request: vLLM refuses it, or several replicas were lost while they sampled it. The
    caller has to change the request. Other requests can still be sampled."""


class LimitReached(TriremeError):
    """The run stopped at one of its own limits: too many failed or refused rollouts, too many groups in a row that
    cannot be trained on, too many steps in a row with a refused update, a KL that is too large, or too many
    restarts."""

    exit_code = EXIT_LIMIT


class RoomFailed(TriremeError):
    """A room (actor) raised, died, or did not answer within its deadline; names the room and its log."""


class ServicesLost(RoomFailed):
    """Ray's own processes, which this command has started on its machine, have ended, and every actor with them."""


class WeightsGone(RoomFailed):
    """The trainer no longer keeps the bytes of a version that a replica or a checkpoint needs. The replica is not
    broken: the next update brings it newer weights."""


class ReplicaBehind(TriremeError):
    """A replica's weights are older than a request allows, or the replica sleeps and has no weights. The replica has
    sampled nothing, and is not broken."""


class ProvenanceError(TriremeError):
    """A token comes from weights that are not allowed: of unknown identity, or older than max_steps_off_policy."""


class WeightsRefused(TriremeError):
    """An update of weights failed its digest or its canary: the replica's weights are not the published ones."""


class NonFiniteGradient(TriremeError):
    """An optimiser step was refused because its gradient is not finite; the weights are unchanged."""


class CheckpointInvalid(TriremeError):
    """A checkpoint does not verify: torn, truncated, altered, incomplete, or of another format; says which file and
    why."""


class StorageFailed(TriremeError):
    """A file or an object in storage could not be written or read; the message names its place and the reason."""


class DiskFull(StorageFailed):
    """Something could not be written because the disk is full or a quota is used up."""


class LockLost(TriremeError):
    """Another driver, which the message names, has taken over the run directory. This driver must not write there any
    more."""


def as_failure(owner: str, error: BaseException) -> TriremeError:
    """Returns `error` itself if it is a TriremeError, else a RoomFailed that names `owner`, the type and the
    message."""
    if isinstance(error, TriremeError):
        return error
    return RoomFailed(f"{owner}: {type(error).__name__}: {error}")
