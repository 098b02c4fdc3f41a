"""The types of the verbs: what they accept, what they hold, their defaults."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trireme.core.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TensorData,
    TokenBatch,
)


def test_a_prompt_may_be_any_token_ids_and_an_array_of_them_is_not_copied() -> None:
    tokens = np.arange(3, dtype=np.int32)
    prompts: list[Any] = [tokens, [0, 1, 2], (0, 1, 2), np.arange(3), torch.arange(3)]
    requests = [SampleRequest("r", prompt, SamplingParams(), "r") for prompt in prompts]
    assert all(request.prompt.dtype == np.int32 for request in requests)
    assert all((request.prompt == tokens).all() for request in requests)
    assert requests[0].prompt is tokens
    wrong: list[Any] = [[0.5], [2**31], ["a"]]
    for prompt in wrong:
        with pytest.raises(ValueError, match="expected whole numbers from"):
            SampleRequest("r", prompt, SamplingParams(), "r")


def test_a_column_has_the_shape_and_dtype_that_it_is_given() -> None:
    column = TensorData(data=[1, 2, 3, 4], dtype="float32", shape=[2, 2])
    assert (column.tolist(), column.shape, column.dtype) == ([[1.0, 2.0], [3.0, 4.0]], (2, 2), "float32")
    assert TensorData(torch.ones(2)).tolist() == TensorData(np.ones(2)).tolist() == [1.0, 1.0]
    tensor = column.to_torch()
    tensor[0, 0] = 9
    assert column.tolist()[0][0] == 1, "a tensor is a copy"


def test_a_datum_holds_columns_of_its_dtypes_whatever_it_is_given() -> None:
    columns = {"target_tokens": [2, 3], "mask": [0, 1], "logprobs": [0, -0.5], "advantages": [0, 2]}
    datums = [
        Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={n: kind(c) for n, c in columns.items()})
        for kind in (list, np.array, torch.tensor, TensorData)
    ]
    for datum in datums:
        assert {name: column.tolist() for name, column in datum.loss_fn_inputs.items()} == columns
        assert [column.dtype for column in datum.loss_fn_inputs.values()] == ["int32", "float32", "float32", "float32"]
    batch = pickle.loads(pickle.dumps(TokenBatch.of(datums)))
    assert batch.columns["target_tokens"].tolist() == [2, 3] * 4
    assert TokenBatch.of(batch) is batch
    assert pickle.loads(pickle.dumps(datums[0])).loss_fn_inputs["mask"].tolist() == [0, 1]


def test_inputs_are_tokens_however_they_are_put_together() -> None:
    empty = ModelInput()
    chunks = ModelInput(chunks=[EncodedTextChunk([1, 2]), EncodedTextChunk(tokens=np.array([3]))])
    assert (empty.length, chunks.length, chunks.to_ints()) == (0, 3, [1, 2, 3])
    longer = chunks.append_int(5)
    assert (longer.to_ints(), longer.tokens.dtype, chunks.length) == ([1, 2, 3, 5], np.int32, 3)
    assert empty.append_int(7).to_ints() == [7]


@pytest.mark.parametrize("token", [1.9, 2**31, -(2**31) - 1, 2**70, float("nan"), float("inf"), "a", None])
def test_what_is_no_token_is_refused_and_never_made_one(token: Any) -> None:
    for make in (ModelInput.from_ints, lambda tokens: Datum(ModelInput([1, 2]), {"target_tokens": tokens})):
        with pytest.raises(ValueError, match="expected whole numbers from -2147483648 to 2147483647"):
            make([1, token])
    assert ModelInput([1.0, 2**31 - 1]).to_ints() == [1, 2**31 - 1]
    assert ModelInput(np.array([7], np.uint64)).to_ints() == [7]


def test_a_number_beyond_the_range_of_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1e\+39; expected numbers within the range of float32"):
        TensorData([0.5, 1e39], "float32")
    assert TensorData([float("-inf"), 0.1], "float32").tolist() == [-np.inf, np.float32(0.1)]
    with pytest.raises(ValueError, match=r"0\.5; expected whole numbers"):
        TensorData([0.5], "int64")


@pytest.mark.parametrize("temperature", [float("inf"), float("nan"), -1.0, 0.0])
def test_a_temperature_is_a_finite_number_above_0(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature {temperature:g}"):
        Datum(ModelInput([1]), {"target_tokens": [1]}, temperature)


@pytest.mark.parametrize("kind", ["image", "image_asset_pointer"])
def test_images_are_refused(kind: str) -> None:
    image: Any = SimpleNamespace(type=kind, data=b"", format="png")
    with pytest.raises(ValueError, match=rf"a chunk of type '{kind}'.*images are not supported"):
        ModelInput(chunks=[EncodedTextChunk([1]), image])


def test_logprobs_come_back_datum_by_datum() -> None:
    output = ForwardBackwardOutput(np.array([-1, -2, -3], np.float32), np.array([0, 1, 3]), {"loss:sum": 0.0})
    assert [item["logprobs"].tolist() for item in output.loss_fn_outputs] == [[-1.0], [-2.0, -3.0]]


def test_stop_tokens() -> None:
    assert SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop=[np.int64(3), 5]).stop_token_ids == (3, 5)
    for stop, ids, strings in (("ab", (), ("ab",)), (["a", 3, "b"], (3,), ("a", "b"))):
        params = SamplingParams(stop=stop)
        assert (params.stop_token_ids, params.stop_strings) == (ids, strings)
