"""The machine is started again under a server of Tinker's clients: what they get, and what they may continue from."""

from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_posts import accepted, begun, passing, post, result, sampler_of, sampling
from tinker_support import BASE_MODEL, Served, UnigramTrainer, tinker_server, wait_for

MACHINE = "the machine was started again"


def refused(served: Served, path: str, body: Any) -> None:
    """Asserts that a request is refused for ever, and by name."""
    answer = post(served.url, path, body)
    assert answer.status_code == 410, f"{path}: {answer.text}"
    assert MACHINE in answer.json()["error"]["message"]


@pytest.mark.parametrize("finished", [False, True])
def test_after_another_boot_sessions_end_by_name_and_states_stay(tmp_path: Path, finished: bool) -> None:
    """Also that of a client who had finished it, as its samplers may be used by others."""
    with suppress(CancelledError), tinker_server(tmp_path, boot="first") as served:
        session, model = begun(served.url)
        result(served.url, accepted(served.url, "forward_backward", passing(model, 1)))
        step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
        stepped = accepted(served.url, "optim_step", step)
        result(served.url, stepped)
        path = result(served.url, accepted(served.url, "save_weights", {"model_id": model, "seq_id": 3, "path": "s"}))
        sampler = sampler_of(served.url, session, 0, base_model=BASE_MODEL)
        served.working.cancel()  # nothing is done any more
        wait_for(lambda: not served.server.ready, "the end of the rooms")
        promised = [accepted(served.url, "asample", sampling(sampler, 0))]
        if finished:
            assert post(served.url, f"sessions/{session}/finish", {}).status_code == 204
        else:
            promised.append(accepted(served.url, "forward_backward", passing(model, 4)))
        theta = served.trainer.theta.copy()
    for _ in range(2):  # it stays so while that boot lasts
        with tinker_server(tmp_path, UnigramTrainer(), boot="second") as served:
            refused(served, "session_heartbeat", {"session_id": session})
            refused(served, "create_model", {"session_id": session, "model_seq_id": 1, "base_model": BASE_MODEL})
            refused(served, "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1})
            refused(served, "asample", sampling(sampler, 1))
            refused(served, "join_sampling_session", {"sampling_session_id": sampler})
            refused(served, "retrieve_futures", {"target": {"sampling_session_id": sampler}})
            for lost in (f"{model}/9", f"{sampler}/9"):  # it may have been accepted, and its row be missing
                refused(served, "retrieve_future", {"request_id": lost})
            for request in promised:
                told = result(served.url, request)
                assert (told["category"], MACHINE in told["error"]) == ("server", True)
                assert "continue from a saved state" in told["error"]
            assert result(served.url, stepped)["metrics"]["grad_norm"] > 0, "what it was told stays as it was told"
            assert served.trainer.calls == [], "nothing is done again"
            own = post(served.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
            loading = {"session_id": own, "model_seq_id": 0, "path": path["path"], "optimizer": True}
            assert result(served.url, accepted(served.url, "load_weights", loading))["path"] == path["path"]
            np.testing.assert_array_equal(served.trainer.theta, theta)
            again = sampler_of(served.url, own, 0, base_model=BASE_MODEL)
            assert isinstance(result(served.url, accepted(served.url, "asample", sampling(again, 0))), bytes)
            assert post(served.url, f"sessions/{own}/finish", {}).status_code == 204
