"""Gives the files of models that the driver's node has to the other nodes of a cluster, through Ray's object store.

A process that is about to read a model calls `bring_models`. If its node lacks the files, they are brought into the
cache of that node once (`trireme.process.model_cache`), and `trireme.core.model_places` says where they are.
This holds for nodes that join later too. A piece that several nodes ask for at about the same time is read once, and
Ray takes it from any node that has it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from trireme.config import CommonConfig
from trireme.core.model_files import TOKENIZER, ModelFiles, model_directory, sendable
from trireme.core.model_places import set_place
from trireme.process import waits
from trireme.process.model_cache import MODEL_CACHE, Contents, ModelCache, ModelPiece, checksum

SOURCE = "model files"
"""The name of the actor, in the namespace that Ray gives each driver."""
KEPT = 8
"""Pieces that stay in the object store for nodes that ask for them a little later."""
ANSWER_S = 60.0
"""Time limit for a piece, and for the list of files. The process of the source starts within it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offered:
    """The files of a model that a node gives."""

    files: ModelFiles
    node: str
    """Ray's id of the node, which has them itself."""
    address: str
    """The node's address in the cluster."""


class ModelSource:
    """Gives the files of models in `directories`, {name: directory}. `put` stores a value for other processes."""

    def __init__(self, directories: Mapping[str, Path], put: Callable[[Any], Any] = ray.put) -> None:
        self._directories, self._put = dict(directories), put
        self._files: dict[str, ModelFiles] = {}
        self._pieces: OrderedDict[ModelPiece, Any] = OrderedDict()
        self._sent: dict[str, int] = {}

    def offered(self, model: str) -> Offered | None:
        """Returns what there is of a model; None if this node lacks it, or a part of its weights."""
        if model not in self._directories:
            return None
        if model not in self._files:
            self._files[model] = ModelFiles.of(self._directories[model])
        return Offered(self._files[model], ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def read(self, piece: ModelPiece, to: str) -> list[Any]:
        """Returns the reference to a piece with its checksum, as the only item of a list, for the node `to`."""
        if piece not in self._pieces:
            contents = np.fromfile(self._directories[piece.model] / piece.file, np.uint8, piece.size, "", piece.offset)
            self._pieces[piece] = self._put((contents, checksum(contents)))
        self._pieces.move_to_end(piece)
        while len(self._pieces) > KEPT:
            self._pieces.popitem(last=False)
        self._sent[to] = self._sent.get(to, 0) + piece.size
        return [self._pieces[piece]]

    def sent(self) -> dict[str, int]:
        """Returns how many bytes each node has got, by the address of the node."""
        return dict(self._sent)


@contextmanager
def model_source(config: CommonConfig, node: Any) -> Iterator[None]:
    """Gives the files of a run's models for the time of the block. `node`: Ray's option that places an actor on the
    node of this process, the driver."""
    options = {"name": SOURCE, "num_cpus": 0, "scheduling_strategy": node}
    source = ray.remote(ModelSource).options(**options).remote(sendable(config.models, config.model.name))
    try:
        yield
    finally:
        ray.kill(source)


def bring_models(config: CommonConfig) -> None:
    """Brings the files of a run's models to this node, where it lacks them, or has others of the same name. Does
    nothing in a cluster that the driver has started, and for models that its node does not have. Takes long: call it in
    a thread of an event loop. Raises RoomFailed and StorageFailed, which name the node."""
    if (source := _source()) is None:
        return
    deadline = time.monotonic() + config.timeouts.start_s
    here, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    cache = ModelCache(Path(MODEL_CACHE).expanduser(), address)
    for model in config.models:
        who = f"the node of the driver, asked by node {address} for the files of {model}"
        offered: Offered | None = waits.get(source.offered.remote(model), who=who, timeout_s=ANSWER_S)
        if offered is None or offered.node == here or _has(model, offered.files):
            continue
        log.info("%s is not on this node: its %s bytes come from %s", model, offered.files.total_bytes, offered.address)
        set_place(model, cache.bring(model, offered.files, _reader(source, offered, address), deadline))


def sent_text() -> str:
    """Says what the driver's node has sent to which nodes; "" if that is nothing. Raises RoomFailed."""
    if (source := _source()) is None:
        return ""
    sent: dict[str, int] = waits.get(source.sent.remote(), who="the node of the driver", timeout_s=ANSWER_S)
    nodes = ", ".join(f"{size / 1e6:,.1f} MB to {node}" for node, size in sent.items())
    return f"files of the model were sent: {nodes}" if nodes else ""


def _source() -> Any:
    """Returns the handle of the job's source; None if there is none, or no Ray."""
    if not ray.is_initialized():
        return None
    try:
        return ray.get_actor(SOURCE)
    except ValueError:
        return None


def _has(model: str, files: ModelFiles) -> bool:
    directory = model_directory(model, TOKENIZER)
    return directory is not None and ModelFiles.of(directory) == files


def _reader(source: Any, offered: Offered, to: str) -> Callable[[ModelPiece], tuple[Contents, str]]:
    def read(piece: ModelPiece) -> tuple[Contents, str]:
        who = (
            f"node {offered.address}, asked by node {to} for {piece.file} of {piece.model} from byte {piece.offset} on"
        )
        (stored,) = waits.get(source.read.remote(piece, to), who=who, timeout_s=ANSWER_S)
        contents, expected = waits.get(stored, who=who, timeout_s=ANSWER_S)
        return contents, expected

    return read
