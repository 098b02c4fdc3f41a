"""The data that a user gives the trainer: tokens, and columns of numbers. `trireme.core.types` re-exports these.

Field names are Tinker's. Lists, numpy arrays and torch tensors are accepted, and stored as numpy columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

TensorDtype = Literal["float32", "int64", "int32"]
ColumnLike: TypeAlias = Union["TensorData", npt.ArrayLike, "Tensor"]

LOSS_FN_INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int32",
    "mask": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "weights": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_log_ratio": "float32",
    "versions": "int32",
}
"""The columns of numbers for each token that a datum may have, with their dtypes. `versions`: the version that sampled
the token, -1 for tokens that the policy did not sample. `sequence_log_ratio`: the mean log-ratio of trainer and sampler
over the token's sequence, for a sequence in several datums (`trainer.losses`); the trainer adds it where it is
needed."""


class TensorData:
    """Numbers as a numpy array `data` with a `dtype` (by default float32, or int64 for whole numbers) and a `shape` (by
    default the shape of `data`). Raises ValueError for values that the dtype cannot hold.

    >>> TensorData([0.5, 1]).dtype, TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]).tolist()
    ('float32', [[1, 2], [3, 4]])
    """

    __slots__ = ("data",)

    def __init__(self, data: ColumnLike, dtype: TensorDtype | None = None, shape: Sequence[int] | None = None) -> None:
        array = _as_array(data)
        array = _cast(array, dtype or ("float32" if array.dtype.kind == "f" else "int64"))
        self.data: npt.NDArray[Any] = array if shape is None else array.reshape(shape)

    @property
    def dtype(self) -> str:
        return self.data.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to_torch(self) -> Tensor:
        """Copies the numbers to a tensor on the CPU."""
        import torch

        return torch.tensor(self.data)

    def tolist(self) -> list[Any]:
        return list(self.data.tolist())

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray[np.generic]:
        return np.array(self.data, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"TensorData({self.data!r})"


def _as_array(values: ColumnLike) -> npt.NDArray[np.generic]:
    if isinstance(values, TensorData):
        return values.data
    if hasattr(values, "detach"):  # a tensor, wherever it is; numpy has no bfloat16
        tensor: Tensor = values.detach().cpu()
        values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.asarray(values)


def _cast(array: npt.NDArray[np.generic], dtype: TensorDtype) -> npt.NDArray[np.generic]:
    """Returns `array` as `dtype`. A float dtype rounds to its precision. Raises ValueError for a number that an integer
    dtype cannot hold exactly, and for a number beyond the range of a float dtype."""
    if array.dtype == dtype:
        return array
    whole = np.dtype(dtype).kind == "i"
    of_numbers = array.dtype.kind in "biuf"
    wrong = np.ones(array.shape, np.bool_)
    if of_numbers:
        with np.errstate(over="ignore", invalid="ignore"):
            cast: npt.NDArray[np.generic] = array.astype(dtype)
            if whole:
                wrong = cast != array
            else:
                wrong = np.isinf(cast) & np.isfinite(array)
        if not wrong.any():
            return cast
    if whole:
        bounds = f"from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
    else:
        bounds = f"within the range of {dtype}"
    if of_numbers:
        problem = f"the number {array[wrong].flat[0]}"
    else:
        problem = f"{str(array.tolist())[:100]}"
    raise ValueError(f"{problem}; expected {'whole ' * whole}numbers {bounds}")


@dataclass(frozen=True, eq=False)
class EncodedTextChunk:
    """A part of a `ModelInput`: token ids."""

    tokens: Sequence[int] | npt.NDArray[np.int32]  # token ids
    type: Literal["encoded_text"] = "encoded_text"


@dataclass(frozen=True, eq=False, init=False)
class ModelInput:
    """The tokens that a model reads, given as token ids or as a list of `chunks`.

    Raises ValueError for chunks of images, because trainer and samplers read tokens only, and for values that are no
    token ids.

    >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
    [1, 2, 3]
    """

    tokens: npt.NDArray[np.int32]  # [T]

    def __init__(self, tokens: ColumnLike = (), *, chunks: Iterable[EncodedTextChunk] = ()) -> None:
        whole = _as_array(tokens)
        if chunks:
            whole = np.concatenate([whole, *map(_tokens_of, chunks)])
        object.__setattr__(self, "tokens", _cast(whole, "int32"))

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(tokens)

    def to_ints(self) -> list[int]:
        return list(self.tokens.tolist())

    def append_int(self, token: int) -> ModelInput:
        """Returns a new input with the token at its end."""
        return ModelInput([*self.tokens, token])

    @property
    def length(self) -> int:
        return len(self.tokens)


def _tokens_of(chunk: EncodedTextChunk) -> npt.NDArray[np.generic]:
    kind = getattr(chunk, "type", type(chunk).__name__)
    if kind != "encoded_text":
        raise ValueError(
            f"a ModelInput with a chunk of type {kind!r}; expected chunks of type 'encoded_text': images are not "
            "supported, trainer and samplers read tokens only"
        )
    return _as_array(chunk.tokens)


@dataclass(frozen=True, eq=False, init=False)
class Datum:
    """One training sequence of T tokens. Raises ValueError for an unknown column, a column without length T, and a
    temperature that is not positive and finite.

    >>> Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "mask": [0, 1]}).loss_fn_inputs["mask"].tolist()
    [0.0, 1.0]
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]
    """Columns [T], aligned with the *targets*, of the dtypes in `LOSS_FN_INPUT_DTYPES`; a loss says which it needs."""
    temperature: float = 1.0  # at which the tokens were sampled; the trainer divides logits by it

    def __init__(
        self, model_input: ModelInput, loss_fn_inputs: Mapping[str, ColumnLike], temperature: float = 1.0
    ) -> None:
        if not 0 < temperature < inf:
            raise ValueError(
                f"a datum with temperature {temperature:g}; expected the temperature that its tokens were sampled at, "
                "above 0: the trainer divides logits by it, so it cannot train on greedy choices (temperature 0)"
            )
        columns = {name: _column(name, values, model_input.length) for name, values in loss_fn_inputs.items()}
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", columns)
        object.__setattr__(self, "temperature", temperature)


def _column(name: str, values: ColumnLike, length: int) -> TensorData:
    if name not in LOSS_FN_INPUT_DTYPES:
        raise ValueError(f"unknown loss_fn_inputs column {name!r}; known: {', '.join(LOSS_FN_INPUT_DTYPES)}")
    dtype = LOSS_FN_INPUT_DTYPES[name]
    column = TensorData(values, dtype)
    if column.data.shape != (length,):
        raise ValueError(f"column {name!r} has shape {column.shape}, expected ({length},) like model_input")
    return column
