"""The server against the real client, on a port of this machine: the rooms are small, all else is what runs."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker_posts import begun, client_of, model_of, passing, post, result
from tinker_support import BASE_MODEL, DEADLINE_S, MAX_LEN, VOCABULARY, Served, tinker_server

TARGETS = [2, 3, 4]
ADAM = types.AdamParams(learning_rate=0.05, beta1=0.5)


def datum(targets: list[int], **columns: list[float]) -> types.Datum:
    inputs: Any = {name: types.TensorData(data=values, dtype="float32") for name, values in columns.items()}
    inputs["target_tokens"] = types.TensorData(data=targets, dtype="int64")
    return types.Datum(model_input=types.ModelInput.from_ints([1] * len(targets)), loss_fn_inputs=inputs)


class TestTheClient:
    def test_it_trains_samples_saves_and_resumes(self, served: Served) -> None:
        with client_of(served) as client:
            model = model_of(client)
            assert model.get_info().model_data.model_name == BASE_MODEL
            before = served.trainer.theta.copy()
            passed = model.forward_backward([datum(TARGETS)] * 3, "cross_entropy")
            updated = model.optim_step(ADAM)
            assert passed.result(DEADLINE_S).metrics["loss:sum"] > 0
            assert updated.result(DEADLINE_S).metrics["grad_norm"] > 0
            assert not np.array_equal(before, served.trainer.theta)

            state = model.save_state("first").result(DEADLINE_S).path
            expected = model.forward([datum(TARGETS)], "cross_entropy").result(DEADLINE_S)
            model.forward_backward([datum([7, 8])], "cross_entropy")
            model.optim_step(ADAM).result(DEADLINE_S)
            again = client.create_training_client_from_state_with_optimizer(state).result(DEADLINE_S)
            resumed = again.forward([datum(TARGETS)], "cross_entropy").result(DEADLINE_S)
            assert resumed.metrics == expected.metrics
            assert resumed.loss_fn_outputs[0]["logprobs"].data == expected.loss_fn_outputs[0]["logprobs"].data
            assert np.any(served.trainer.momentum)
            client.create_training_client_from_state(state).result(DEADLINE_S)
            assert not np.any(served.trainer.momentum), "without the optimiser's state"

    def test_samples_say_the_trainers_logprobs_and_end_where_they_are_told(self, served: Served) -> None:
        with client_of(served) as client:
            model = model_of(client)
            model.forward_backward([datum([5, 5])], "cross_entropy")
            model.optim_step(ADAM).result(DEADLINE_S)
            sampler = model.save_weights_and_get_sampling_client().result(DEADLINE_S)
            params = types.SamplingParams(max_tokens=8, seed=1, stop=[9])
            futures = [sampler.sample(types.ModelInput.from_ints([1, 2]), 3, params) for _ in range(4)]
            answers = [future.result(DEADLINE_S) for future in futures]
            for sequence in (sampled for answer in answers for sampled in answer.sequences):
                trained = model.forward([datum(list(sequence.tokens))], "cross_entropy").result(DEADLINE_S)
                np.testing.assert_array_equal(trained.loss_fn_outputs[0]["logprobs"].data, sequence.logprobs)
                assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] in (0, 9))
                assert len(sequence.tokens) <= 8
            logprobs = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(DEADLINE_S)
            table = served.trainer.logprobs()
            assert logprobs[0] is None
            np.testing.assert_allclose(logprobs[1:], table[[2, 3]], rtol=1e-6)

    def test_samplers_in_flight_follow_the_model_and_old_snapshots_are_let_go(self, tmp_path: Path) -> None:
        prompt = types.ModelInput.from_ints([1, 2, 3])
        with tinker_server(tmp_path, snapshots=1) as served, client_of(served) as client:
            model = model_of(client)
            following = model.save_weights_and_get_sampling_client(kind="inflight").result(DEADLINE_S)
            snapshots = []
            for _ in range(3):
                model.forward_backward([datum([5, 5])], "cross_entropy")
                model.optim_step(ADAM).result(DEADLINE_S)
                newest = model.save_weights_and_get_sampling_client(kind="inflight").result(DEADLINE_S)
                snapshots.append(model.save_weights_and_get_sampling_client().result(DEADLINE_S))
                expected = served.trainer.logprobs()[[2, 3]]
                for sampler in (following, newest, snapshots[-1]):
                    logprobs = sampler.compute_logprobs(prompt).result(DEADLINE_S)
                    np.testing.assert_allclose(logprobs[1:], expected, rtol=1e-6)
            with pytest.raises(tinker.BadRequestError, match="no longer in memory"):
                snapshots[0].compute_logprobs(prompt).result(DEADLINE_S)

    def test_a_custom_loss_is_the_built_in_one(self, served: Served) -> None:
        def cross_entropy(data: Any, logprobs: Any) -> Any:
            return -sum(values.sum() for values in logprobs), {"own": 1.0}

        gradients = []
        with client_of(served) as client:
            model = model_of(client)
            for custom in (True, False):
                if custom:
                    output = model.forward_backward_custom([datum(TARGETS), datum([7])], cross_entropy)
                else:
                    output = model.forward_backward([datum(TARGETS), datum([7])], "cross_entropy")
                assert output.result(DEADLINE_S).metrics["loss:sum"] > 0
                gradients.append(served.trainer.gradient.copy())
                served.trainer.drop_gradients()
        np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6)

    def test_parts_of_a_batch_in_any_order_are_one_batch(self, served: Served) -> None:
        """The client sends the first of its parts last."""
        data = [datum([1 + number % 9]) for number in range(9000)]
        with client_of(served) as client:
            model = model_of(client)
            output = model.forward_backward(data, "cross_entropy").result(DEADLINE_S)
            assert served.trainer.calls.count("cross_entropy") == 3
            expected = served.trainer.logprobs()[[1 + number % 9 for number in range(9000)]]
            logprobs = [float(loss_output["logprobs"].data[0]) for loss_output in output.loss_fn_outputs]
            np.testing.assert_allclose(logprobs, expected, rtol=1e-6)
            np.testing.assert_allclose(output.metrics["loss:sum"], -expected.sum(), rtol=1e-6)

    def test_failures_are_told_and_leave_the_server_usable(self, served: Served) -> None:
        with client_of(served) as client:
            model = model_of(client)
            for loss, named in (("stable_reinforce", "importance_sampling"), ("ppo", "ppo reads advantages")):
                with pytest.raises(tinker.RequestFailedError, match=named):
                    model.forward_backward([datum(TARGETS)], loss).result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="a part of them is missing"):
                model.optim_step(ADAM).result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="without a gradient"):
                model.optim_step(ADAM).result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="the model's context"):
                model.forward([datum([1] * (MAX_LEN + 1))], "cross_entropy").result(DEADLINE_S)
            threshold = {name: [1.0] for name in ("logprobs", "advantages", "clip_low_threshold")}
            mixed = [datum([1], logprobs=[0.0], advantages=[1.0]), datum([1], **threshold)]
            with pytest.raises(tinker.RequestFailedError, match="the columns of datum 0"):
                model.forward_backward(mixed, "ppo").result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="a part of them is missing"):
                model.optim_step(ADAM).result(DEADLINE_S)
            infinite = datum([1], advantages=[1.0], logprobs=[float("-inf")])
            model.forward_backward([infinite], "importance_sampling").result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="not finite"):
                model.optim_step(ADAM).result(DEADLINE_S)
            model.save_state("name").result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="is there already"):
                model.save_state("name").result(DEADLINE_S)
            with pytest.raises(tinker.RequestFailedError, match="nothing is saved"):
                client.create_training_client_from_state("tinker://abc:train:0/weights/none").result(DEADLINE_S)
        with client_of(served) as client, pytest.raises(tinker.RequestFailedError, match="expected tests/unigram"):
            client.create_lora_training_client(base_model="other/model", rank=8).result(DEADLINE_S)


class TestTheProtocol:
    def test_a_second_client_waits_and_is_told_so(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.tinker.serving.HOLD_S", 0.1)
        session, model = begun(served.url)
        second = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
        request_body = {"session_id": second, "model_seq_id": 0, "base_model": BASE_MODEL}
        request = post(served.url, "create_model", request_body).json()["request_id"]
        answer = post(served.url, "retrieve_future", {"request_id": request})
        assert answer.status_code == 408
        assert answer.json()["queue_state"] == "paused_capacity"
        assert model in answer.json()["queue_state_reason"]
        assert post(served.url, f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 204
        assert result(served.url, request)["model_id"] == f"{second}:train:0"
        late = post(served.url, "save_weights", {"model_id": model, "seq_id": 1, "path": "s"}).json()["request_id"]
        assert "its session has ended" in result(served.url, late)["error"]
        assert post(served.url, "session_heartbeat", {"session_id": session}).status_code == 410

    def test_a_question_is_held_until_the_answer_is_there(self, served: Served) -> None:
        _, model = begun(served.url)
        served.trainer.hold = threading.Event()
        datum_free = {"model_id": model, "seq_id": 1, "adam_params": {}}
        request = post(served.url, "optim_step", datum_free).json()["request_id"]
        assert "without a gradient" in result(served.url, request)["error"], "nothing is held that fails"
        passed = post(served.url, "forward_backward", passing(model, 2)).json()["request_id"]
        step = post(served.url, "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}).json()["request_id"]
        threading.Timer(0.2, served.trainer.hold.set).start()
        assert result(served.url, step)["metrics"]["grad_norm"] > 0
        size = post(served.url, "retrieve_future", {"request_id": passed, "allow_metadata_only": True}).json()
        whole = post(served.url, "retrieve_future", {"request_id": passed})
        assert whole.headers["content-type"] == "application/x-protobuf"
        assert size == {"status": "complete_metadata", "response_payload_size": len(whole.content)}

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            ("retrieve_future", {"request_id": "x"}, 404),
            ("session_heartbeat", {"session_id": "x"}, 410),
            ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": BASE_MODEL}, 404),
            ("optim_step", {"model_id": "x", "seq_id": 1, "optimizer_params": {"type": "dimuon"}}, 400),
            ("forward_backward", b'{"model_id": "x"}', 400),
            ("asample", {"prompt": {}}, 400),
            ("create_custom_loss", {}, 404),
            ("weights_info", {}, 400),
        ],
    )
    def test_no_refusal_has_the_client_try_for_ever(self, served: Served, path: str, body: Any, status: int) -> None:
        answer = post(served.url, path, body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]

    def test_an_untested_client_is_warned(self, served: Served) -> None:
        for untested in ("0.99.0", "0.24.1", "1.30.0", "0.3", ""):
            response = post(served.url, "create_session", {"sdk_version": untested}).json()
            assert "0.25 to 0.38" in response["warning_message"], untested
        for tested in ("0.25.0", "0.31.0", tinker.__version__):
            assert "warning_message" not in post(served.url, "create_session", {"sdk_version": tested}).json()

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"sampling_params": {"stop": []}}, "end-of-sequence"),
            ({"sampling_params": {"stop": ["a", ""]}}, "stop"),
            ({"sampling_params": {"stop": [0, VOCABULARY]}}, f"stop = {VOCABULARY}; expected ids below"),
            ({"sampling_params": {"seed": 2**64}}, "seed"),
            ({"record_stability_info": True}, "record_stability_info"),
            ({"topk_sample_logprobs": 2}, "topk_sample_logprobs"),
            ({"prompt": {"chunks": [{"type": "image"}]}}, "image"),
            ({"prompt": {"chunks": [{"tokens": [VOCABULARY]}]}}, "all below"),
            ({"prompt": {"chunks": [{"tokens": [1] * MAX_LEN}]}}, "the context of the model"),
            ({"unheard_of": 1}, "unheard_of"),
        ],
    )
    def test_samples_that_cannot_be_made_are_refused(self, served: Served, changed: Any, named: str) -> None:
        session = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
        response = post(
            served.url,
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
        )
        body = {
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 2},
            "sampling_session_id": response.json()["sampling_session_id"],
            "seq_id": 0,
        }
        refused = post(served.url, "asample", body | changed)
        assert refused.status_code == 400
        assert named in refused.text
        accepted = post(served.url, "asample", body)
        assert accepted.json()["sample_sequence_ids"] == [f"{body['sampling_session_id']}/0/0"]
