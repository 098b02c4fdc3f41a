"""The codec against the client's own conversions: what one writes the other reads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from service.requests import RequestRefused
from service.tinker.codec import BFLOAT16, ForwardBackwardCall, columns_of, encode_output, encode_sample
from service.tinker.protobuf import SCHEMA, message_class
from trireme.core.types import ForwardBackwardOutput, SampledSequence, SampleResponse

TOKENS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def datums(draw: st.DrawFn) -> types.Datum:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=8))
    cut = draw(st.integers(0, len(tokens)))
    chunks: list[Any] = [types.EncodedTextChunk(tokens=part) for part in (tokens[:cut], tokens[cut:]) if part]
    targets = draw(st.lists(TOKENS, min_size=len(tokens), max_size=len(tokens)))
    columns: dict[str, Any] = {"target_tokens": np.array(targets, np.int64)}
    for name in ("logprobs", "advantages", "weights"):
        columns[name] = np.array(draw(st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens))), np.float32)
    inputs: Any = {name: types.TensorData.from_numpy(values) for name, values in columns.items()}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def encoded(data: list[types.Datum], loss_fn: Any, config: Any = None, seq_id: int = 3, **fields: Any) -> bytes:
    request = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=request, model_id="s:train:0", seq_id=seq_id)
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def one(loss_fn: Any = "cross_entropy", **columns: list[float]) -> bytes:
    inputs: Any = {
        name: types.TensorData(data=values, dtype="int64" if name == "target_tokens" else "float32")
        for name, values in columns.items()
    }
    return encoded([types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)], loss_fn)


NOTHING = types.TensorData(data=[], dtype="int64")
EMPTY = encoded(
    [types.Datum(model_input=types.ModelInput(chunks=[]), loss_fn_inputs={"target_tokens": NOTHING})], "cross_entropy"
)


@settings(max_examples=60, deadline=None)
@given(st.lists(datums(), max_size=4), st.sampled_from(["cross_entropy", "importance_sampling", "ppo"]), st.booleans())
def test_what_the_client_writes_is_read(data: list[types.Datum], loss_fn: str, forward_only: bool) -> None:
    call = ForwardBackwardCall.of(encoded(data, loss_fn, forward_only=forward_only))
    assert (call.model_id, call.seq_id, call.forward_only, call.loss_fn) == ("s:train:0", 3, forward_only, loss_fn)
    read = call.data()
    assert len(read) == len(data)
    for mine, theirs in zip(read, data, strict=True):
        assert mine.model_input.to_ints() == theirs.model_input.to_ints()
        columns = {name: column.data for name, column in mine.loss_fn_inputs.items()}
        expected = {name: np.asarray(t.data, t.dtype) for name, t in theirs.loss_fn_inputs.items() if name in columns}
        for name, values in expected.items():
            np.testing.assert_array_equal(columns[name], values)
        if loss_fn == "cross_entropy":
            assert set(columns) == {"target_tokens", "weights"}
        else:
            assert set(columns) == {"target_tokens", "logprobs", "advantages", "mask"}
            np.testing.assert_array_equal(columns["mask"], columns["advantages"] != 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(FLOATS, max_size=5), max_size=5), st.dictionaries(st.sampled_from(["loss:sum", "r:max"]), FLOATS)
)
def test_the_client_reads_outputs(logprobs_D: list[list[float]], metrics: dict[str, float]) -> None:
    flat = np.array([p for datum in logprobs_D for p in datum], np.float32)
    offsets = np.cumsum([0, *map(len, logprobs_D)]).astype(np.int64)
    read = deserialize_forward_backward_output(encode_output(ForwardBackwardOutput(flat, offsets, metrics)))
    assert len(read.loss_fn_outputs) == len(logprobs_D)
    for output, logprobs in zip(read.loss_fn_outputs, logprobs_D, strict=True):
        assert output["logprobs"].shape == [len(logprobs)]
        np.testing.assert_array_equal(np.asarray(output["logprobs"].data, np.float32), np.array(logprobs, np.float32))
    np.testing.assert_equal(read.metrics, metrics)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.sampled_from(["stop", "length"])), max_size=3),
    st.data(),
)
def test_the_client_reads_samples(given_S: list[tuple[list[int], Any]], draw: st.DataObject) -> None:
    sequences = [
        SampledSequence(np.array(tokens, np.int32), np.linspace(-2, 0, len(tokens), dtype=np.float32), reason, ())
        for tokens, reason in given_S
    ]
    prompt = draw.draw(st.none() | st.lists(st.none() | st.floats(-9, 0, width=32), min_size=1, max_size=4))
    read = deserialize_sample_response(encode_sample(SampleResponse(sequences, prompt)))
    assert [s.stop_reason for s in read.sequences] == [reason for _, reason in given_S]
    for mine, theirs in zip(sequences, read.sequences, strict=True):
        assert list(theirs.tokens) == mine.tokens.tolist()
        np.testing.assert_array_equal(np.array(theirs.logprobs, np.float32), mine.logprobs)
    assert (read.prompt_logprobs is None) == (prompt is None)
    if prompt is not None:
        assert list(read.prompt_logprobs or []) == prompt


def test_the_likeliest_tokens_of_a_prompt_keep_their_places() -> None:
    likeliest: Any = [None, [(7, -0.5), (3, -1.0)], [(4, -0.25)]]
    read = deserialize_sample_response(encode_sample(SampleResponse([], [None, -1.0, -0.25], likeliest), topk=2))
    table: Any = read.topk_prompt_logprobs_np
    np.testing.assert_array_equal(table.token_ids, [[0, 0], [7, 3], [4, 0]])
    np.testing.assert_array_equal(
        table.logprobs, np.array([[-99999, -99999], [-0.5, -1.0], [-0.25, -99999]], np.float32)
    )


def test_our_schema_is_a_part_of_the_clients() -> None:
    """Each field has the number, the type and the label that it has there."""
    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name
    count = 0
    for name, message in theirs.items():
        try:
            message_type = message_class(name).DESCRIPTOR
        except KeyError:
            continue
        for field in message_type.fields:
            other = message.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
            count += 1
    assert count == sum(line.startswith("  field {") for line in SCHEMA.read_text().splitlines())


def test_bfloat16_is_the_upper_half_of_a_float() -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].dense = np.array([2, 3], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = tinker_public_pb2.DTYPE_INT32
    weights = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    datum.loss_fn_inputs["weights"].dense = weights.astype(np.uint16).tobytes()
    datum.loss_fn_inputs["weights"].dtype = tinker_public_pb2.DTYPE_BFLOAT16
    assert tinker_public_pb2.DTYPE_BFLOAT16 == BFLOAT16
    (read,) = ForwardBackwardCall.of(message.SerializeToString()).data()
    assert read.loss_fn_inputs["weights"].tolist() == [1.5, -2.0]


def test_the_second_map_of_parameters_wins() -> None:
    body = encoded([], "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3})
    assert ForwardBackwardCall.of(body).parameters == {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
    with pytest.raises(RequestRefused, match="expected numbers"):
        _ = ForwardBackwardCall.of(encoded([], "ppo", {"clip_low_threshold": "low"})).parameters


@pytest.mark.parametrize(
    ("loss_fn", "config", "named"),
    [
        ("stable_reinforce", None, "importance_sampling"),
        ("custom", None, "forward_backward_custom"),
        ("dro", None, "beta"),
        ("ppo", {"clip_low_threshold": 2.0}, "low"),
    ],
)
def test_losses_that_are_not_there_are_refused(loss_fn: str, config: Any, named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        _ = ForwardBackwardCall.of(encoded([], loss_fn, config)).parameters


def test_weights_are_one_unless_they_are_given() -> None:
    (datum,) = ForwardBackwardCall.of(one(target_tokens=[2, 3])).data()
    assert datum.loss_fn_inputs["weights"].tolist() == [1.0, 1.0]


def test_a_sequence_mask_is_the_mask() -> None:
    inputs = {name: np.array([1.0, 0.0], np.float32) for name in ("logprobs", "advantages")}
    inputs |= {"target_tokens": np.array([1, 2]), "sequence_ratio_mask": np.array([1.0, 1.0], np.float32)}
    inputs["clip_low_threshold"] = inputs["clip_high_threshold"] = np.array([0.9, 0.9], np.float32)
    columns = columns_of("gspo", inputs)
    assert columns["mask"].tolist() == [1.0, 1.0]
    assert "clip_low_threshold" in columns
    assert "clip_low_threshold" not in columns_of("importance_sampling", inputs)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (one("ppo", target_tokens=[2, 3], logprobs=[0.0, 0.0]), "datum 0: the loss ppo reads advantages; "),
        (one(weights=[1.0, 1.0]), "no target_tokens"),
        (one(target_tokens=[2, 3, 4]), "column 'target_tokens' has shape"),
        (one(target_tokens=[2, 2**32 + 3]), "the number 4294967299"),
        (EMPTY, "no tokens in model_input"),
    ],
    ids=["advantages", "targets", "shape", "too large", "empty"],
)
def test_wrong_datums_are_named(body: bytes, named: str) -> None:
    with pytest.raises(RequestRefused, match=named):
        ForwardBackwardCall.of(body).data()


def test_several_targets_at_a_place_and_images_are_refused() -> None:
    two = types.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": two})
    with pytest.raises(RequestRefused, match="top-k distillation"):
        ForwardBackwardCall.of(encoded([datum], "cross_entropy")).data()
    message = tinker_public_pb2.ForwardBackwardRequest(loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(RequestRefused, match="images"):
        ForwardBackwardCall.of(message.SerializeToString()).data()


def test_a_body_that_is_no_message_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no ForwardBackwardRequest"):
        ForwardBackwardCall.of(b'{"model_id": "json"}')
