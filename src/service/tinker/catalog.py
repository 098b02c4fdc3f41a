"""Stores what clients save on disk: training runs with their saved entries (states and weights), by `tinker://` paths.

    tinker://<model>/weights/<name>            <root>/<model>/weights/<name>/           all that training needs
    tinker://<model>/sampler_weights/<name>    <root>/<model>/sampler_weights/<name>/   a model in Hugging Face layout,
                                                                                        or an adapter in peft's
    tinker://<model>/external_weights/<name>   <root>/<model>/external_weights/<name>/  the same, for download

An entry counts as saved once `checkpoint.json` is in its directory, which is written last. A new entry is written in a
directory of its own (`<root>/<model>/new-weights/<name>/`), which is then renamed to the entry's directory. Times are
seconds since 1970.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from service.requests import RequestRefused
from service.tinker.owners import SERVER, Caller
from trireme.checkpoint.files import fsync_directory, make_directory, replace_file, storage_errors
from trireme.core.errors import CheckpointInvalid
from trireme.core.finite_json import to_json
from trireme.core.paths import path_in

SavedKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[SavedKind, ...] = ("weights", "sampler_weights", "external_weights")
SCHEME = "tinker://"
NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.-]{1,255}")
MARK = "checkpoint.json"
RUN = "run.json"
STAGING = "new-"
"""Begins the names of directories next to the directories of KINDS. They hold unfinished writes."""


@dataclass(frozen=True)
class SavedRun:
    """The record of a training run: a model that a client has trained."""

    model_id: str
    base_model: str
    user_metadata: Mapping[str, object]
    began_s: float
    lora: Mapping[str, Any] | None = None
    """The record of its adapter, from `service.tinker.adapters.record_of`; None: the whole model is trained."""
    project_id: str = ""
    """The project of a run that was made by a copy; "": the project of the run's session counts."""
    owner: str = ""
    """The owner of the key with which it was made (`service.tinker.owners`); "": only admin keys open it."""


@dataclass(frozen=True)
class SavedWeights:
    """The record of one saved entry: a state or weights of a model."""

    model_id: str
    kind: SavedKind
    name: str
    saved_s: float
    expires_s: float | None
    user_metadata: Mapping[str, str]
    files: Mapping[str, int]
    """The size of each file in it, in bytes."""
    request: str = ""
    """The id of the request that saved it."""
    public: bool = False
    """True if every caller with a key may read it."""

    @property
    def path(self) -> str:
        """The `tinker://` path of the entry, by which clients name it."""
        return path_of(self.model_id, self.kind, self.name)

    @property
    def size(self) -> int:
        """The size of all files of the entry, in bytes."""
        return sum(self.files.values())


def path_of(model_id: str, kind: SavedKind, name: str) -> str:
    """Returns the `tinker://` path of a model's saved entry."""
    return f"{SCHEME}{model_id}/{kind}/{name}"


class Catalog:
    """Writes, finds and deletes the saved entries below `root`. `now` returns the seconds since 1970."""

    def __init__(self, root: Path, base_model: str, now: Callable[[], float]) -> None:
        self._root = root
        self._base_model = base_model
        self._now = now

    # ---- writing

    def begin(
        self,
        model_id: str,
        user_metadata: Mapping[str, object] | None,
        lora: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> None:
        """Records a new training run of `owner`. Does nothing if the run is already recorded. `lora`: the record of its
        adapter (None: the whole model is trained). Raises StorageFailed."""
        if not (self._directory(model_id) / RUN).exists():
            self._begin(SavedRun(model_id, self._base_model, user_metadata or {}, self._now(), lora, owner=owner))

    def _begin(self, run: SavedRun) -> None:
        directory = self._directory(run.model_id)
        with storage_errors(directory):
            make_directory(directory)
            replace_file(directory / RUN, to_json(asdict(run)).encode())

    def staging(self, path: str, overwrite: bool = False) -> Path:
        """Returns a directory for the files of the entry `path`: the caller creates it, writes the files, and calls
        `keep`. Removes what an unfinished earlier write has left there. Raises RequestRefused for a malformed path.
        Unless `overwrite`, also raises it if the entry already exists."""
        if (self._place(path) / MARK).exists() and not overwrite:
            raise RequestRefused(f"{path} is there already; give another name, or overwrite = True")
        staging = self._place(path, STAGING)
        with storage_errors(staging):
            self.discard(path)
            make_directory(staging.parent)
        return staging

    def discard(self, path: str) -> None:
        """Removes an unfinished entry, with the directory that `staging` returned for it."""
        shutil.rmtree(self._place(path, STAGING), ignore_errors=True)

    def saved_by(self, path: str, request: str) -> SavedWeights | None:
        """Returns the entry at `path` if the request with the id `request` saved it, else None. When a restarted server
        runs the request again, it sees by this that the entry was already saved."""
        try:
            saved = self._look_up(path, SERVER)
        except RequestRefused:
            return None
        if request and saved.request == request:
            return saved
        return None

    def keep(
        self,
        path: str,
        sizes: Mapping[str, int],
        ttl_s: int | None,
        user_metadata: Mapping[str, str],
        request: str = "",
    ) -> SavedWeights:
        """Completes the entry `path`: moves the directory of `staging` to its place, and replaces an earlier entry
        there. `sizes`: the bytes of each file; `ttl_s`: seconds for which the entry is stored (None: for ever);
        `request`: the id of the request that saves it. Raises StorageFailed."""
        directory = self._place(path)
        staging = self._place(path, STAGING)
        expires_s = self._expiry(ttl_s)
        saved = SavedWeights(*_parts(path), self._now(), expires_s, user_metadata, sizes, request)
        with storage_errors(directory):
            replace_file(staging / MARK, to_json(asdict(saved)).encode())
            _move(staging, directory)
        return saved

    def copy(self, path: str, model_id: str, ttl_s: int | None, project_id: str, caller: Caller = SERVER) -> str:
        """Copies the entry `path` into the training run `model_id`, which is made for the copy and cannot be trained.
        The copy shares the files of the entry by hard links. Returns the path of the copy. If the copy exists already,
        only returns its path. Raises RequestRefused if the caller may not read the entry, and StorageFailed."""
        source, saved = self.find(path, caller=caller)
        copied = path_of(model_id, saved.kind, saved.name)
        if not (self._place(copied) / MARK).exists():
            of = self.run(saved.model_id)
            self._begin(SavedRun(model_id, of.base_model, {}, self._now(), of.lora, project_id, caller.owner))
            staging = self.staging(copied)
            with storage_errors(staging):
                for file in saved.files:
                    place = path_in(staging, file)
                    make_directory(place.parent)
                    os.link(path_in(source, file), place)
            self.keep(copied, saved.files, ttl_s, saved.user_metadata)
        return copied

    def _expiry(self, ttl_s: int | None) -> float | None:
        if ttl_s is None:
            return None
        return self._now() + ttl_s

    def set_ttl(self, path: str, ttl_s: int | None, caller: Caller = SERVER) -> None:
        """Sets for how many seconds from now an entry is stored; None: for ever. Raises RequestRefused if the caller
        has no such entry, and StorageFailed."""
        self._note(path, caller, expires_s=self._expiry(ttl_s))

    def set_public(self, path: str, public: bool, caller: Caller) -> None:
        """Records whether all callers may read an entry. Raises RequestRefused if the caller has no such entry, and
        StorageFailed."""
        self._note(path, caller, public=public)

    def _note(self, path: str, caller: Caller, **changed: object) -> None:
        saved = self._look_up(path, caller)
        directory = self._place(path)
        with storage_errors(directory):
            replace_file(directory / MARK, to_json(asdict(saved) | changed).encode())

    def delete(self, path: str, caller: Caller = SERVER) -> None:
        """Deletes an entry, also a damaged one. Raises RequestRefused if the caller has no such entry, and
        StorageFailed."""
        self._look_up(path, caller)
        directory = self._place(path)
        with storage_errors(directory):
            (directory / MARK).unlink(missing_ok=True)  # from now on it does not count
            shutil.rmtree(directory, ignore_errors=True)

    def expire(self) -> None:
        """Deletes all expired entries."""
        for run in self.runs():
            for saved in self.saved(run.model_id):
                if saved.expires_s is not None and saved.expires_s <= self._now():
                    with suppress(RequestRefused):  # it was deleted in between
                        self.delete(saved.path)

    # ---- reading

    def find(self, path: str, kind: SavedKind | None = None, caller: Caller = SERVER) -> tuple[Path, SavedWeights]:
        """Returns the directory and the record of an entry. Raises RequestRefused if `caller` may read no entry at
        `path`, if the entry is not of this `kind` (None: any), or if a file of it is missing or has another size."""
        directory = self._place(path)
        saved = self._look_up(path, caller, reads=True)
        if kind and saved.kind != kind:
            raise RequestRefused(f"the path {path}; expected {SCHEME}<model>/{kind}/<name>")
        for file, size in saved.files.items():
            try:
                place = path_in(directory, file)
            except CheckpointInvalid as error:
                raise RequestRefused(f"{path} is damaged: {error}; use another one") from None
            actual = place.stat().st_size if place.exists() else None
            if actual != size:
                raise RequestRefused(
                    f"{path} is damaged: its file {file} had {size} bytes and has {actual}; use another one"
                )
        return directory, saved

    def _look_up(self, path: str, caller: Caller, reads: bool = False) -> SavedWeights:
        """Returns the record of an entry, without a check of its files. Raises RequestRefused if the entry is missing,
        or belongs to another owner. With `reads`, published entries of other owners are returned too."""
        with suppress(FileNotFoundError):
            saved = SavedWeights(**json.loads((self._place(path) / MARK).read_bytes()))
            if (saved.public and reads) or caller.may(self.run(_parts(path)[0]).owner):
                return saved
        raise RequestRefused(f"the path {path}, at which nothing is saved here; the list of checkpoints tells what is")

    def _place(self, path: str, prefix: str = "") -> Path:
        model_id, kind, name = _parts(path)
        return path_in(self._directory(model_id), f"{prefix}{kind}/{name}")

    def run(self, model_id: str, caller: Caller = SERVER) -> SavedRun:
        """Returns the record of a training run. Raises RequestRefused if the run is missing or belongs to another
        owner."""
        directory = self._directory(model_id)
        if (directory / RUN).exists():
            run = self._run_in(directory)
        else:
            run = None
        if run is None or not caller.may(run.owner):
            raise RequestRefused(
                f"the training run {model_id!r}, which is not here; the list of training runs tells what is"
            )
        return run

    def runs(self, caller: Caller = SERVER) -> list[SavedRun]:
        """Returns all training runs that `caller` may see, the newest first."""
        saved_runs = [self._run_in(file.parent) for file in self._root.glob(f"*/{RUN}")]
        saved_runs = [run for run in saved_runs if caller.may(run.owner)]
        return sorted(saved_runs, key=lambda run: run.began_s, reverse=True)

    def saved(self, model_id: str) -> list[SavedWeights]:
        """Returns all saved entries of a model, the oldest first."""
        return sorted(self._saved(model_id), key=lambda weights: weights.saved_s)

    def _saved(self, model_id: str) -> Iterator[SavedWeights]:
        for kind in KINDS:
            for mark in path_in(self._directory(model_id), kind).glob(f"*/{MARK}"):
                with suppress(FileNotFoundError):  # it was deleted in between
                    yield SavedWeights(**json.loads(mark.read_bytes()))

    @staticmethod
    def _run_in(directory: Path) -> SavedRun:
        return SavedRun(**json.loads((directory / RUN).read_bytes()))

    def _directory(self, model_id: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-]+:train:\d+", model_id):
            raise RequestRefused(f"the model {model_id!r}; expected <session>:train:<number>")
        return path_in(self._root, model_id.replace(":", "-"))


def recover(root: Path) -> None:
    """Finishes the work of a killed server: moves complete new entries to their places, and removes incomplete ones.
    Must not be called while a server writes below `root`. Raises StorageFailed."""
    for staging in root.glob(f"*/{STAGING}*/*"):
        with storage_errors(staging):
            if (staging / MARK).exists():
                _move(
                    staging, path_in(staging.parents[1], f"{staging.parent.name.removeprefix(STAGING)}/{staging.name}")
                )
            else:
                shutil.rmtree(staging)


def _move(staging: Path, directory: Path) -> None:
    """Replaces `directory` by `staging`. If the process ends before the rename, `staging` stays complete, and `recover`
    can move it."""
    make_directory(directory.parent)
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)
    fsync_directory(directory.parent)


def _parts(path: str) -> tuple[str, SavedKind, str]:
    model_id, _, rest = path.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    for candidate in KINDS:
        if path.startswith(SCHEME) and kind == candidate and NAME.fullmatch(name):
            return model_id, candidate, name
    raise RequestRefused(
        f"the path {path!r}; expected {SCHEME}<model>/<{' or '.join(KINDS)}>/<name>, with a name of up to 255 letters, "
        "digits, `_`, `-` and `.`"
    )
