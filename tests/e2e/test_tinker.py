"""The command `trireme serve` with the real client, on a real trainer and a real replica."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from served_tinker import Server, logprobs_of
from tinker import types
from transformers import AutoTokenizer

MODEL = "./assets/sort-base"
LIMIT_S = 120.0
ADAM = types.AdamParams(learning_rate=2e-4, beta2=0.99)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    server = Server(tmp_path_factory.mktemp("served"))
    with (
        pytest.MonkeyPatch.context() as environ,
        tinker.ServiceClient(base_url=server.url, api_key=server.key) as client,
    ):
        environ.setenv("TINKER_TELEMETRY", "0")
        yield client
    assert server.stop() == set()


def datum_of(prompt: list[int], sequence: Any, advantage: float) -> types.Datum:
    tokens = [*prompt, *sequence.tokens]
    before, sampled = [0.0] * (len(prompt) - 1), len(sequence.tokens)
    columns = {"logprobs": [*before, *sequence.logprobs], "advantages": [*before, *[advantage] * sampled]}
    inputs: Any = {name: types.TensorData(data=values, dtype="float32") for name, values in columns.items()}
    inputs["target_tokens"] = types.TensorData(data=tokens[1:], dtype="int64")
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_a_client_trains_samples_saves_and_resumes(client: Any, tmp_path: Path) -> None:
    model = client.create_lora_training_client(base_model=MODEL, rank=8).result(LIMIT_S)
    assert model.get_tokenizer().encode("Sort: 31\n") == AutoTokenizer.from_pretrained(MODEL).encode("Sort: 31\n")
    prompt = model.get_tokenizer().encode("Sort: 361695\n")

    # What the sampler says of its tokens is what the trainer says of them.
    sampler = model.save_weights_and_get_sampling_client().result(LIMIT_S)
    params = types.SamplingParams(max_tokens=8, seed=1)
    answers = sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result(LIMIT_S).sequences
    data = [datum_of(prompt, answer, 1.0 if n % 2 else -1.0) for n, answer in enumerate(answers)]
    before = model.forward(data, "importance_sampling").result(LIMIT_S)
    sampled = np.concatenate([item.loss_fn_inputs["logprobs"].data for item in data])
    counted = sampled != 0
    np.testing.assert_allclose(logprobs_of(before)[counted], sampled[counted], atol=1e-4)
    whole = sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *answers[0].tokens])).result(LIMIT_S)
    length = len(answers[0].tokens)
    np.testing.assert_allclose(whole[-length:], answers[0].logprobs, atol=1e-4)

    # Two parts are one batch, whatever is only computed in between: the norm of the gradient is the same.
    norms = []
    for parts in ([data], [data[:3], data[3:]]):
        for part in parts:
            model.forward_backward(part, "importance_sampling").result(LIMIT_S)
            model.forward(data, "importance_sampling").result(LIMIT_S)
        norms.append(model.optim_step(types.AdamParams(learning_rate=0.0)).result(LIMIT_S).metrics["grad_norm"])
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)

    # A state that is resumed computes what the model computed, and learns as it did.
    model.forward_backward(data, "ppo").result(LIMIT_S)
    model.optim_step(ADAM).result(LIMIT_S)
    state = model.save_state("first").result(LIMIT_S).path
    expected = []
    for again in (model, None):
        model = again or client.create_training_client_from_state_with_optimizer(state).result(LIMIT_S)
        passes = [logprobs_of(model.forward(data, "ppo").result(LIMIT_S))]
        model.forward_backward(data, "ppo").result(LIMIT_S)
        model.optim_step(ADAM).result(LIMIT_S)
        expected.append([*passes, logprobs_of(model.forward(data, "ppo").result(LIMIT_S))])
    for first, second in zip(*expected, strict=True):
        np.testing.assert_allclose(second, first, atol=1e-6)
    assert not np.allclose(expected[0][0], expected[0][1], atol=1e-5), "the update changed something"

    # A request that vLLM would refuse fails alone: the samplers of before answer below.
    with pytest.raises(tinker.BadRequestError, match="temperature"):
        sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(temperature=3.0)).result(LIMIT_S)

    # Named weights of now, the old snapshot and the base answer side by side, each by its own weights.
    path = model.save_weights_for_sampler("now").result(LIMIT_S).path
    fresh = client.create_sampling_client(model_path=path).result(LIMIT_S)
    base = client.create_sampling_client(base_model=MODEL).result(LIMIT_S)
    sequence = types.ModelInput.from_ints([*prompt, *answers[0].tokens])
    now, then, start = (item.compute_logprobs(sequence) for item in (fresh, sampler, base))
    np.testing.assert_allclose(then.result(LIMIT_S)[-length:], answers[0].logprobs, atol=1e-4)
    np.testing.assert_allclose(start.result(LIMIT_S)[-length:], answers[0].logprobs, atol=1e-4)
    np.testing.assert_allclose(now.result(LIMIT_S)[1:], expected[1][1][: sequence.length - 1], atol=1e-4)
