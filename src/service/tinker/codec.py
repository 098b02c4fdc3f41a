"""Converts the protocol's messages of training and sampling to the project's types, and results to messages.

Numbers travel as bytes, little endian. Unsupported features are refused by name (`RequestRefused`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from service.requests import RequestRefused
from service.tinker.protobuf import message_class
from trireme.config.losses import LOSSES, find_loss, loss_refusals
from trireme.core.datum import Datum, ModelInput
from trireme.core.types import ForwardBackwardOutput, PromptLogprobs, SampleResponse, TopkPromptLogprobs

PROTOBUF = "application/x-protobuf"
FLOAT32 = 1
INT64 = 2
INT32 = 3
BFLOAT16 = 4
DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
STOP_REASONS = {"stop": 0, "length": 1}
NO_TOKEN = 0
NO_LOGPROB = -99999.0
"""The log-probability in an empty cell of the table of likeliest tokens."""
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
SEQUENCE_MASK = "sequence_ratio_mask"
RECORDED = "stable_reinforce"

_Request = message_class("ForwardBackwardRequest")
_Output = message_class("ForwardBackwardOutput")
_Response = message_class("SampleResponse")


@dataclass(frozen=True)
class ForwardBackwardCall:
    """A request for a forward and backward pass, or a forward pass only. Its datums are decoded only when it runs."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    encoded: Any
    """The protobuf message of the request, which holds the datums."""

    @classmethod
    def of(cls, body: bytes) -> ForwardBackwardCall:
        """Returns the request in an HTTP body. Raises RequestRefused if the body is not a ForwardBackwardRequest in
        protobuf."""
        message = _Request()
        try:
            message.ParseFromString(body)
        except DecodeError:
            raise RequestRefused(
                f"a body of {len(body):,} bytes that is no ForwardBackwardRequest in protobuf; expected one, without "
                "a content encoding, as the client sends it since 0.25"
            ) from None
        config: dict[str, float | str] = dict(message.loss_fn_config)
        for name, value in message.loss_fn_config_v2.items():  # the first map repeats its numbers
            config[name] = value.text if value.HasField("text") else value.number
        return cls(message.model_id, message.seq_id, message.forward_only, message.loss_fn, config, message)

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters of the loss, by name. Raises RequestRefused for an unknown loss, and for parameters that the
        loss does not have."""
        if self.loss_fn == RECORDED:
            raise RequestRefused(
                f"the loss {RECORDED} needs what only its inventor's server records; set loss_fn to one of "
                f"{', '.join(LOSSES)} (importance_sampling where data is on-policy, else ppo)"
            )
        if self.loss_fn not in LOSSES:
            raise RequestRefused(
                f"the loss {self.loss_fn!r}; expected one of {', '.join(LOSSES)}, or forward_backward_custom, which "
                "computes any loss in the client"
            )
        words = {name: value for name, value in self.loss_fn_config.items() if isinstance(value, str)}
        if words:
            raise RequestRefused(
                f"loss_fn_config {words}; expected numbers: no loss here has a parameter that is a text"
            )
        values = {name: float(value) for name, value in self.loss_fn_config.items()}
        refusals = list(loss_refusals(self.loss_fn, values))
        if refusals:
            raise RequestRefused(" ".join(f"{refusal.value}; expected {refusal.expected}." for refusal in refusals))
        return values

    @property
    def tokens(self) -> int:
        """The number of tokens of all datums, found without decoding them."""
        return sum(len(chunk.encoded_text.tokens) // 4 for datum in self.encoded.data for chunk in datum.model_input)

    def data(self) -> list[Datum]:
        """Returns the datums, with the columns that the loss reads. Raises RequestRefused if a datum is malformed; the
        message names the datum."""
        return [self._datum(number, datum) for number, datum in enumerate(self.encoded.data)]

    def _datum(self, number: int, encoded: Any) -> Datum:
        try:
            tokens = np.concatenate([np.empty(0, "<i4"), *map(_tokens, encoded.model_input)])
            if not len(tokens):
                raise ValueError("no tokens in model_input; expected at least one")
            columns = {name: _array(name, tensor) for name, tensor in encoded.loss_fn_inputs.items()}
            return Datum(ModelInput(tokens), columns_of(self.loss_fn, columns))
        except ValueError as error:
            raise RequestRefused(f"datum {number}: {error}") from None


def columns_of(loss_fn: str, inputs: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
    """Returns the columns of `inputs` that the loss reads. Other columns are left out, because clients with custom
    losses send further columns with `forward`.

    For losses with advantages, this function makes the column `mask`, which the protocol does not have. If `inputs` has
    gspo's `sequence_ratio_mask`, `mask` is a copy of it. Otherwise `mask` is 1 for tokens with a nonzero advantage, and
    0 for all other tokens, such as those of prompts. For cross-entropy without weights, all tokens get the weight 1.
    Raises ValueError for missing columns.
    """
    read = find_loss(loss_fn).columns
    columns = {name: values for name, values in inputs.items() if name in read}
    if "target_tokens" not in columns:
        raise ValueError(f"no target_tokens; given are {', '.join(sorted(inputs)) or 'no columns'}")
    if "weights" in read:
        columns.setdefault("weights", np.ones(len(columns["target_tokens"]), np.float32))
        return columns
    missing = sorted({"logprobs", "advantages"} - set(columns))
    if missing:
        raise ValueError(
            f"the loss {loss_fn} reads {' and '.join(missing)}; loss_fn_inputs has only {', '.join(sorted(inputs))}"
        )
    columns["mask"] = inputs[SEQUENCE_MASK] if SEQUENCE_MASK in inputs else columns["advantages"] != 0
    columns["mask"] = columns["mask"].astype(np.float32)
    thresholds = {name: inputs[name] for name in THRESHOLDS if name in inputs}
    return {**columns, **(thresholds if THRESHOLDS[0] in LOSSES[loss_fn].parameters else {})}


def _tokens(chunk: Any) -> npt.NDArray[np.int32]:
    if not chunk.HasField("encoded_text"):
        raise ValueError("a chunk of model_input that is no encoded_text; images and sound are not supported")
    return np.frombuffer(chunk.encoded_text.tokens, "<i4")


def _array(name: str, tensor: Any) -> npt.NDArray[np.generic]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ValueError(
            f"{name} of shape {list(tensor.shape)}; expected one number for each token: several targets for one token "
            "(top-k distillation) are not supported"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"{name} has the dtype number {tensor.dtype}; expected {FLOAT32} (float32), {INT64} (int64), {INT32} "
            f"(int32) or {BFLOAT16} (bfloat16)"
        )
    values: npt.NDArray[np.generic] = np.frombuffer(tensor.dense, DTYPES[tensor.dtype])
    if tensor.dtype == BFLOAT16:  # the upper half of a float32
        values = (values.astype("<u4") << 16).view("<f4")
    if tensor.shape and list(tensor.shape) != [len(values)]:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, but its number of values is {len(values)}")
    return values


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Returns, as protobuf bytes, the log-probabilities of a pass and its metrics, which have names like
    `name:reduction`."""
    message = _Output(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    record = message.loss_fn_outputs.add(num_datums=len(output.offsets) - 1)
    logprobs = np.ascontiguousarray(output.logprobs, "<f4")
    field = record.fields["logprobs"]
    field.data = logprobs.tobytes()
    field.dtype = FLOAT32
    field.offsets = (output.offsets * logprobs.itemsize).astype("<i8").tobytes()  # in bytes, one more than datums
    return bytes(message.SerializeToString())


def encode_sample(response: SampleResponse, topk: int = 0) -> bytes:
    """Returns sampled sequences as protobuf bytes. `topk`: the number of likeliest tokens that were requested for each
    place of the prompt; 0: none."""
    message = _Response()
    for sequence in response.sequences:
        encoded = message.sequences.add(stop_reason=STOP_REASONS[sequence.stop_reason])
        encoded.tokens = np.ascontiguousarray(sequence.tokens, "<i4").tobytes()
        encoded.logprobs = np.ascontiguousarray(sequence.logprobs, "<f4").tobytes()
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(response.prompt_logprobs).tobytes()
    if response.topk_prompt_logprobs is not None and topk:
        tokens, logprobs = _table(response.topk_prompt_logprobs, topk)
        likeliest = message.topk_prompt_logprobs
        likeliest.token_ids, likeliest.logprobs = tokens.tobytes(), logprobs.tobytes()
        likeliest.k, likeliest.length = topk, len(tokens)
    return bytes(message.SerializeToString())


def _floats(logprobs: PromptLogprobs) -> npt.NDArray[np.float32]:
    return np.array([np.nan if logprob is None else logprob for logprob in logprobs], "<f4")


def _table(likeliest: TopkPromptLogprobs, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Returns (tokens, log-probabilities), each [T, k]: the `k` likeliest tokens at each place of the prompt, likeliest
    first. Missing entries are NO_TOKEN and NO_LOGPROB."""
    tokens = np.full((len(likeliest), k), NO_TOKEN, "<i4")
    logprobs = np.full((len(likeliest), k), NO_LOGPROB, "<f4")
    for place, row in enumerate(likeliest):
        best: Sequence[tuple[int, float]] = (row or [])[:k]
        for column, (token, logprob) in enumerate(best):
            tokens[place, column] = token
            logprobs[place, column] = logprob
    return tokens, logprobs
