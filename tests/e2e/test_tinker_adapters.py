"""`trireme serve` with adapters and the real client: several clients at once, and processes that are killed.

A model that is trained on the same parts with the same seed is the same model, so each test compares with one that was
trained alone and undisturbed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from served_tinker import Server, logprobs_of
from tinker import types

MODEL = "./assets/sort-base"
LIMIT_S = 240.0
UPDATES = 3
STEP = types.AdamParams(learning_rate=5e-3)
TEXTS = ("Sort: 213\n321", "Sort: 90817\n98710")
"""What each of two clients trains towards."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("TINKER_TELEMETRY", "0")
        server = Server(tmp_path_factory.mktemp("served"), "--trainer.lora.rank", "8")
        yield server
        server.stop()


def client_of(server: Server) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=server.key)


def datum_of(tokens: list[int]) -> Any:
    target: Any = {"target_tokens": types.TensorData(data=tokens[1:], dtype="int64")}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=target)


def data_of(model: Any, text: str) -> list[Any]:
    return [datum_of(model.get_tokenizer().encode(text))] * 4


def said_of(model: Any, data: list[Any]) -> np.ndarray:
    return logprobs_of(model.forward(data, "cross_entropy").result(LIMIT_S))


def begun(server: Server, number: int) -> Any:
    """Begins the adapter of client `number`, in a session of its own."""
    client = client_of(server)
    return client.create_lora_training_client(base_model=MODEL, rank=4 + 4 * number, seed=number).result(LIMIT_S)


def trained(model: Any, number: int) -> np.ndarray:
    """Trains towards the text of client `number`; returns what the model says of it then."""
    data = data_of(model, TEXTS[number])
    for _ in range(UPDATES):
        passed, updated = model.forward_backward(data, "cross_entropy"), model.optim_step(STEP)
        passed.result(LIMIT_S)
        updated.result(LIMIT_S)
    return said_of(model, data)


@pytest.fixture(scope="module")
def alone(server: Server) -> list[np.ndarray]:
    """What the models of both clients say, each trained alone."""
    return [trained(begun(server, number), number) for number in range(len(TEXTS))]


def sampled_alike(model: Any, text: str, sampler: Any = None) -> Any:
    """Asserts that what a sampler says of its tokens is what the trainer says of them. Returns the sampler."""
    sampler = sampler or model.save_weights_and_get_sampling_client().result(LIMIT_S)
    prompt = model.get_tokenizer().encode(text.partition("\n")[0] + "\n")
    params = types.SamplingParams(max_tokens=8, seed=1)
    (answer,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(LIMIT_S).sequences
    datum = datum_of([*prompt, *answer.tokens])
    np.testing.assert_allclose(said_of(model, [datum])[-len(answer.tokens) :], answer.logprobs, atol=1e-4)
    return sampler


def test_what_is_downloaded_opens_with_peft_and_is_the_model(server: Server, tmp_path: Path) -> None:
    """By the addresses that the client gets, which need no key; the adapter has less than the server's rank."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client = client_of(server)
    model = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result(LIMIT_S)
    expected = trained(model, 0)
    path = model.save_weights_external("adapter").result(LIMIT_S).path
    for name, url in client.create_rest_client().get_external_weights_urls(path).result(LIMIT_S).urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path)
    tokens = torch.tensor(model.get_tokenizer().encode(TEXTS[0]))
    with torch.no_grad():
        logprobs = opened(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    assert opened.peft_config["default"].r == 4
    np.testing.assert_allclose(np.tile(logprobs.numpy(), 4), expected, atol=1e-5)
    again = client.create_training_client_from_state(path).result(LIMIT_S)
    np.testing.assert_allclose(said_of(again, data_of(again, TEXTS[0])), expected, atol=1e-5)


@pytest.mark.long
def test_a_shard_is_killed_and_the_client_sees_a_delay(server: Server, alone: list[np.ndarray]) -> None:
    model = begun(server, 0)
    data = data_of(model, TEXTS[0])
    promised = []
    for number in range(UPDATES):
        promised += [model.forward_backward(data, "cross_entropy"), model.optim_step(STEP)]
        if number == 0:
            promised[0].result(LIMIT_S)  # its gradient is held by the shard that is killed
            server.kill("ray::ShardActor")
    for future in promised:
        future.result(LIMIT_S)
    np.testing.assert_allclose(said_of(model, data), alone[0], atol=1e-5)
    assert any(line.startswith("!") for line in server.lines), "the loss is told"
    sampled_alike(model, TEXTS[0])


@pytest.mark.long
def test_the_server_is_killed_and_started_again(server: Server, alone: list[np.ndarray]) -> None:
    model = begun(server, 0)
    data = data_of(model, TEXTS[0])
    promised = [model.forward_backward(data, "cross_entropy"), model.optim_step(STEP)]
    promised[1].result(LIMIT_S)
    path = model.save_state("before").result(LIMIT_S).path
    promised += [model.forward_backward(data, "cross_entropy"), model.optim_step(STEP)]
    server.kill_all()
    promised += [model.forward_backward(data, "cross_entropy"), model.optim_step(STEP)]
    server.start()
    for future in promised:
        future.result(LIMIT_S)
    np.testing.assert_allclose(said_of(model, data), alone[0], atol=1e-5)
    resumed = client_of(server).create_training_client_from_state_with_optimizer(path).result(LIMIT_S)
    for _ in range(UPDATES - 1):
        resumed.forward_backward(data, "cross_entropy").result(LIMIT_S)
        resumed.optim_step(STEP).result(LIMIT_S)
    np.testing.assert_allclose(said_of(resumed, data), alone[0], atol=1e-5)
