"""`trireme serve` with adapters and the real client: what samplers and downloads have is the model that was trained."""

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
TEXT = "Sort: 213\n321"
"""What the client trains towards."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    server = Server(tmp_path / "served", "--trainer.lora.rank", "8")
    yield server
    assert server.stop() == set()


def datum_of(tokens: list[int]) -> types.Datum:
    target: Any = {"target_tokens": types.TensorData(data=tokens[1:], dtype="int64")}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=target)


def test_what_is_sampled_and_downloaded_is_of_the_model(server: Server, tmp_path: Path) -> None:
    """The adapter has less than the server's rank. Peft opens what the addresses lead to that the client gets."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    model: Any = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result(LIMIT_S)
    tokens = model.get_tokenizer().encode(TEXT)
    data = [datum_of(tokens)] * 4
    for _ in range(UPDATES):
        model.forward_backward(data, "cross_entropy").result(LIMIT_S)
        model.optim_step(types.AdamParams(learning_rate=5e-3)).result(LIMIT_S)
    expected = logprobs_of(model.forward(data, "cross_entropy").result(LIMIT_S))

    sampler = model.save_weights_and_get_sampling_client().result(LIMIT_S)
    prompt = tokens[: tokens.index(*model.get_tokenizer().encode("\n")) + 1]
    with pytest.raises(tinker.BadRequestError, match="temperature"):
        sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(temperature=3.0)).result(LIMIT_S)
    params = types.SamplingParams(max_tokens=8, seed=1)
    (answer,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(LIMIT_S).sequences
    said = logprobs_of(model.forward([datum_of([*prompt, *answer.tokens])], "cross_entropy").result(LIMIT_S))
    np.testing.assert_allclose(said[-len(answer.tokens) :], answer.logprobs, atol=1e-4)

    path = model.save_weights_external("adapter").result(LIMIT_S).path
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, url in client.create_rest_client().get_external_weights_urls(path).result(LIMIT_S).urls.items():
        (adapter / name).write_bytes(httpx.get(url).raise_for_status().content)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), adapter)
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logprobs = opened(ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert opened.peft_config["default"].r == 4
    np.testing.assert_allclose(np.tile(logprobs.numpy(), 4), expected, atol=1e-5)
    again: Any = client.create_training_client_from_state(path).result(LIMIT_S)
    said = logprobs_of(again.forward(data, "cross_entropy").result(LIMIT_S))
    np.testing.assert_allclose(said, expected, atol=1e-5)
