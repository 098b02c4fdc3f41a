"""Requests to a Tinker server: as a client's bytes, one at a time, or by the real client."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types
from tinker_support import BASE_MODEL, DEADLINE_S, KEY, Served

from service.tinker.protobuf import message_class


def ask(url: str, method: str, path: str, body: Any = None, key: str = KEY, **headers: str) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers["x-api-key"] = key
    return httpx.request(method, f"{url}/api/v1/{path}", headers=headers, timeout=DEADLINE_S, **content)


def post(url: str, path: str, body: Any) -> httpx.Response:
    return ask(url, "POST", path, body)


def accepted(url: str, path: str, body: Any) -> str:
    answer = post(url, path, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def result(url: str, request_id: str) -> Any:
    answer = post(url, "retrieve_future", {"request_id": request_id})
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.content


def done(url: str, path: str, body: Any) -> Any:
    """Returns the result of a request, which is accepted."""
    return result(url, accepted(url, path, body))


def saving(model: str, seq_id: int, name: str) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq_id, "path": name}


def stepping(model: str, seq_id: int) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}


def begun(url: str) -> tuple[str, str]:
    """Begins a session with a model; returns their ids."""
    session = post(url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    return session, done(url, "create_model", request)["model_id"]


def sampler_of(url: str, session: str, number: int, **target: str) -> str:
    request = {"session_id": session, "sampling_session_seq_id": number, **target}
    return str(post(url, "create_sampling_session", request).json()["sampling_session_id"])


def sampling(sampler: str, seq_id: int) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    return {"prompt": prompt, "sampling_params": {"max_tokens": 2}, "sampling_session_id": sampler, "seq_id": seq_id}


def datum(targets: list[int], **columns: list[float]) -> types.Datum:
    """An input of ones with the columns of a loss."""
    inputs: Any = {name: types.TensorData(data=values, dtype="float32") for name, values in columns.items()}
    inputs["target_tokens"] = types.TensorData(data=targets, dtype="int64")
    return types.Datum(model_input=types.ModelInput.from_ints([1] * len(targets)), loss_fn_inputs=inputs)


def passing(model_id: str, seq_id: int) -> bytes:
    request = message_class("ForwardBackwardRequest")(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = np.array([2, 3], "<i8").tobytes(), 2
    return bytes(request.SerializeToString())


@contextmanager
def client_of(served: Served) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served.url, api_key=KEY) as client:
        yield client


def model_of(client: tinker.ServiceClient, rank: int = 8, **options: Any) -> Any:
    return client.create_lora_training_client(base_model=BASE_MODEL, rank=rank, **options).result(DEADLINE_S)
