"""Reads a saved state without running code that the state brings with it.

DCP keeps its metadata as a pickle, which can call any function, and gives entries that are no tensors to `torch.load`
without `weights_only`. The state of a checkpoint has tensors only. So here a pickle may name the classes of such
metadata and nothing else, and DCP gets metadata of tensors in files of the directory itself.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from trireme.checkpoint.parts import PartReader
from trireme.core.errors import CheckpointInvalid

FILE = ".metadata"
CLASSES = (
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.serialization._get_layout,
    torch.Size,
)
ALLOWED = {**{(kind.__module__, kind.__qualname__): kind for kind in CLASSES}, ("pathlib", "PosixPath"): Path}
"""All names in the metadata of tensors, except dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in ALLOWED:
            raise CheckpointInvalid(
                f"it refers to {module}.{name}; expected only the classes that describe tensors. The file was damaged "
                "or altered: resume from another checkpoint"
            )
        return ALLOWED[module, name]


class StateReader(dcp.FileSystemReader):
    """Reads a part of a checkpoint that `dcp.save` wrote. Accepts tensors only and refuses everything else. If the part
    is in object storage, fetches the files that a load needs. Raises StorageFailed."""

    def __init__(self, part: PartReader) -> None:
        super().__init__(part.directory)
        self._part = part

    def read_metadata(self) -> metadata.Metadata:  # without a rank DCP asks for no other metadata
        """Returns the metadata of all tensors. Raises CheckpointInvalid if the bytes hold no such metadata."""
        file = Path(self.path) / FILE
        self._part.fetch([FILE])
        try:
            with file.open("rb") as stream:
                loaded = _MetadataUnpickler(stream).load()
            _check(loaded)
        except CheckpointInvalid as error:
            raise CheckpointInvalid(f"the metadata in {file} cannot be trusted: {error}") from None
        except Exception as error:  # a pickle can fail in any way
            raise CheckpointInvalid(f"{file} holds no metadata: {type(error).__name__}: {error}") from None
        loaded.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return loaded

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._part.fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


def _check(saved: Any) -> None:
    """Raises CheckpointInvalid unless every entry of `saved`, the metadata of a checkpoint, is a tensor that was stored
    unchanged in a data file directly in the directory of the metadata."""
    for name, tensor in saved.state_dict_metadata.items():
        if not isinstance(tensor, metadata.TensorStorageMetadata):
            raise CheckpointInvalid(f"{name} is a {type(tensor).__name__}; expected tensors only")
    for place in saved.storage_data.values():
        path = Path(place.relative_path)
        if path.suffix != filesystem.DEFAULT_SUFFIX or path.name != place.relative_path:
            raise CheckpointInvalid(f"it reads {place.relative_path!r}; expected a file in this directory")
        if place.transform_descriptors:
            raise CheckpointInvalid(f"it transforms bytes by {place.transform_descriptors}; expected plain tensors")
