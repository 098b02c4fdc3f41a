"""Several clients train adapters on one base at once, with the real client, and sample from all of them."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker_posts import client_of, datum, model_of, post
from tinker_support import BASE_MODEL, DEADLINE_S, Served, UnigramTrainer, tinker_server

from service.requests import RequestRefused
from service.tinker.adapters import spec_of
from service.tinker.bodies import LoraBody
from trireme.config.trainer import ATTENTION, MLP, LoraConfig
from trireme.core.weights import AdapterSpec

LORA = LoraConfig(rank=16, alpha=32, seed=5)
ADAM = types.AdamParams(learning_rate=0.05, beta1=0.5)
PROMPT = types.ModelInput.from_ints([1, 2, 3])


def serving(root: Path, lora: LoraConfig | None = LORA, places: int = 4) -> AbstractContextManager[Served]:
    return tinker_server(root, lora=lora, places=places if lora else 1, slots=2 if lora else 0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as served:
        yield served


def learn(model: Any, token: int, steps: int = 3) -> list[float]:
    """Trains towards a token; returns the losses, in bits that can be compared."""
    losses = []
    for _ in range(steps):
        passed = model.forward_backward([datum([token, token])], "cross_entropy")
        model.optim_step(ADAM).result(DEADLINE_S)
        losses.append(passed.result(DEADLINE_S).metrics["loss:sum"])
    losses.append(model.forward([datum([token])], "cross_entropy").result(DEADLINE_S).metrics["loss:sum"])
    return losses


def trained(model: Any) -> np.ndarray:
    return np.asarray(
        model.forward([datum([2, 3])], "cross_entropy").result(DEADLINE_S).loss_fn_outputs[0]["logprobs"].data
    )


def test_two_clients_at_once_learn_what_each_alone_learns(tmp_path: Path) -> None:
    alone = []
    for number, token in enumerate((4, 7)):
        with serving(tmp_path / str(number)) as served, client_of(served) as client:
            alone.append(learn(model_of(client), token, steps=8))
    with serving(tmp_path / "both") as served, client_of(served) as one, client_of(served) as other:
        models = [model_of(one), model_of(other)]
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(lambda arguments: learn(*arguments, steps=8), zip(models, (4, 7), strict=True)))
        assert together == alone
        owners = [call.partition(":train:")[0] for call in served.trainer.calls if ":cross_entropy" in call]
        assert sum(a != b for a, b in itertools.pairwise(owners)) > 2, "in turn, and not one after the other"
    assert alone[0][-1] < alone[0][0]


def test_snapshots_of_two_adapters_and_the_base_are_sampled_side_by_side(served: Served) -> None:
    """More of them than replicas have slots: those that are idle make room, and come back on demand."""
    with client_of(served) as one, client_of(served) as other:
        samplers = [one.create_sampling_client(base_model=BASE_MODEL).result(DEADLINE_S)]
        expected = [UnigramTrainer().logprobs()[[2, 3]]]
        models = [model_of(one), model_of(other)]
        np.testing.assert_allclose(trained(models[1]), expected[0], rtol=1e-6)
        for step in range(2):
            for token, model in enumerate(models):
                learn(model, 5 + token, steps=1)
                named = model.save_weights_for_sampler(f"step-{step}").result(DEADLINE_S).path
                samplers.append(one.create_sampling_client(model_path=named).result(DEADLINE_S))
                expected.append(trained(model))
        served.sampler.seconds = 0.01
        futures = [(number, samplers[number].compute_logprobs(PROMPT)) for _ in range(4) for number in range(5)]
        for number, future in futures:
            np.testing.assert_allclose(np.asarray(future.result(DEADLINE_S)[1:]), expected[number], rtol=1e-6)
        assert served.sampler.updates == 1, "the base stays where it is"
        assert served.sampler.most_slots == 2
        assert not np.allclose(expected[1], expected[2], atol=1e-4)


def test_a_state_is_resumed_beside_its_own_model_with_what_it_is(served: Served) -> None:
    with client_of(served) as client:
        model = model_of(client, rank=4, seed=9, train_mlp=False)
        learn(model, 4)
        state = model.save_state("s").result(DEADLINE_S).path
        then = trained(model)
        learn(model, 6)
        again = client.create_training_client_from_state_with_optimizer(state).result(DEADLINE_S)
        np.testing.assert_array_equal(trained(again), then)
        assert not np.allclose(trained(model), then), "its own model goes its own way"
        expected = AdapterSpec(4, 32.0, ATTENTION, 9)
        assert list(served.trainer.specs.values()) == [expected, expected]
        info = again.get_info()
        assert (info.is_lora, info.lora_rank) == (True, 4)
        rest = client.create_rest_client()
        run: Any = rest.get_training_run_by_tinker_path(state).result(DEADLINE_S)
        assert (run.is_lora, run.lora_rank) == (True, 4)
        description: Any = rest.get_weights_info_by_tinker_path(state).result(DEADLINE_S)
        assert (description.is_lora, description.lora_rank, description.train_attn, description.train_mlp) == (
            True,
            4,
            True,
            False,
        )
        rest.delete_checkpoint_from_tinker_path(state).result(DEADLINE_S)
        with pytest.raises(tinker.RequestFailedError, match="nothing is saved"):
            client.create_training_client_from_state(state).result(DEADLINE_S)


def test_a_model_begins_with_weights_that_were_saved_for_samplers_or_for_download(tmp_path: Path) -> None:
    """They are those of its adapter, without the optimiser's state, also on a server with more rank."""
    with serving(tmp_path) as served, client_of(served) as client:
        model = model_of(client, rank=4, seed=9, train_mlp=False)
        learn(model, 4)
        then = trained(model)
        paths = [model.save_weights_for_sampler("w").result(DEADLINE_S).path]
        paths.append(model.save_weights_external("d").result(DEADLINE_S).path)
        learn(model, 6)
        for path in paths:
            again = client.create_training_client_from_state(path).result(DEADLINE_S)
            np.testing.assert_array_equal(trained(again), then)
            assert list(served.trainer.specs.values())[-1] == AdapterSpec(4, 32.0, ATTENTION, 9)
            assert not served.trainer.momentum.any()
            with pytest.raises(tinker.RequestFailedError, match="has no state of the optimiser"):
                client.create_training_client_from_state_with_optimizer(path).result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="expected tinker://<model>/weights/<name>"):
                again.load_state(path).result(DEADLINE_S)
    with serving(tmp_path, LORA.model_copy(update={"rank": 32})) as served, client_of(served) as client:
        again = client.create_training_client_from_state(paths[0]).result(DEADLINE_S)
        np.testing.assert_array_equal(trained(again), then)
    with serving(tmp_path, None) as served, client_of(served) as client:
        with pytest.raises(tinker.RequestFailedError, match="expected tinker://<model>/weights/<name>"):
            client.create_training_client_from_state(paths[0]).result(DEADLINE_S)
        whole = model_of(client).save_weights_for_sampler("w").result(DEADLINE_S).path
    refused = pytest.raises(tinker.RequestFailedError, match="the weights of a whole model; expected a state")
    with serving(tmp_path) as served, client_of(served) as client, refused:
        client.create_training_client_from_state(whole).result(DEADLINE_S)


def test_a_failed_part_drops_the_gradients_of_its_own_model_alone(served: Served) -> None:
    with client_of(served) as one, client_of(served) as other:
        broken, whole = model_of(one), model_of(other)
        for model in (broken, whole):
            model.forward_backward([datum([4])], "cross_entropy").result(DEADLINE_S)
        with pytest.raises(tinker.RequestFailedError, match="ppo reads advantages"):
            broken.forward_backward([datum([4])], "ppo").result(DEADLINE_S)
        with pytest.raises(tinker.RequestFailedError, match="a part of them is missing"):
            broken.optim_step(ADAM).result(DEADLINE_S)
        assert whole.optim_step(ADAM).result(DEADLINE_S).metrics["grad_norm"] > 0
        whole.forward_backward([datum([4])], "cross_entropy").result(DEADLINE_S)
        with pytest.raises(tinker.RequestFailedError, match="eps = 0 for an adapter"):
            whole.optim_step(types.AdamParams(eps=0.0)).result(DEADLINE_S)


def test_an_adapter_is_dropped_with_its_session_and_its_place_is_given_on(tmp_path: Path) -> None:
    with serving(tmp_path, places=2) as served, client_of(served) as third, client_of(served) as one:
        with client_of(served) as other:
            models = [model_of(adapter) for adapter in (one, other)]
            waiting = third.create_lora_training_client(base_model=BASE_MODEL, rank=8)
            learn(models[0], 4)
            assert len(served.trainer.specs) == 2
        model = waiting.result(DEADLINE_S)
        learn(model, 6)
        assert set(served.trainer.specs) == {models[0].model_id, model.model_id}


def test_what_cannot_be_an_adapter_here_is_refused(served: Served) -> None:
    with client_of(served) as client:
        with pytest.raises(tinker.RequestFailedError, match=r"rank = 32; expected 1 to 16.*larger trainer\.lora\.rank"):
            model_of(client, rank=32)
        assert served.trainer.specs == {}
        session = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()
        assert "adapters up to rank 16 for q_proj" in session["info_message"]
        assert "train_unembed has no effect" in session["info_message"]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (LoraBody(rank=8), AdapterSpec(8, 32.0, (*ATTENTION, *MLP), 5)),
        (LoraBody(rank=1, seed=3, train_attn=False), AdapterSpec(1, 32.0, MLP, 3)),
        (LoraBody(rank=8, train_attn=False, train_mlp=False), "expected some of q_proj"),
        (LoraBody(rank=0), "rank = 0; expected 1 to 16"),
        (None, "without a lora_config"),
    ],
)
def test_an_adapter_has_the_layers_that_both_sides_want(wish: LoraBody | None, expected: AdapterSpec | str) -> None:
    if isinstance(expected, AdapterSpec):
        assert spec_of(wish, LORA) == expected
    else:
        with pytest.raises(RequestRefused, match=expected):
            spec_of(wish, LORA)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (LORA, LoraConfig(rank=32, seed=5), r"trainer\.lora\.rank = 16"),
        (LORA, LoraConfig(rank=16, seed=5, train_mlp=False), "adapters for q_proj.*down_proj"),
        (LORA, None, r"trainer\.lora\.rank = 16"),
        (None, LORA, "a state of the whole model"),
    ],
)
def test_a_state_of_another_kind_of_server_is_refused(
    tmp_path: Path, before: LoraConfig | None, after: LoraConfig | None, message: str
) -> None:
    with serving(tmp_path, before) as served, client_of(served) as client:
        state = model_of(client).save_state("s").result(DEADLINE_S).path
    with serving(tmp_path, after) as served, client_of(served) as client:
        with pytest.raises(tinker.RequestFailedError, match=message):
            client.create_training_client_from_state(state).result(DEADLINE_S)
        assert trained(model_of(client)).shape == (2,)
