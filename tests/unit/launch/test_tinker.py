"""The server of Tinker's clients, as the command starts it, on small rooms."""

from pathlib import Path

import httpx
from tinker_posts import accepted, post, result, sampler_of, sampling
from tinker_process import server_starter
from tinker_support import BASE_MODEL, KEY


def test_clients_ask_for_the_model_by_each_of_its_names(tmp_path: Path) -> None:
    with server_starter() as starter:
        server = starter.start(tmp_path, environ={"FURTHER_NAMES": "Qwen/Qwen3-8B-Base"})
        try:
            capabilities = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers={"x-api-key": KEY}).json()
            names = [BASE_MODEL, "Qwen/Qwen3-8B-Base"]
            assert [model["model_name"] for model in capabilities["supported_models"]] == names
            session = post(server.url, "create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
            for number, name in enumerate(names):
                request = {"session_id": session, "model_seq_id": number, "base_model": name}
                created = result(server.url, accepted(server.url, "create_model", request))
                assert created["model_id"] == f"{session}:train:{number}"
                described = post(server.url, "get_info", {"model_id": created["model_id"]}).json()
                assert described["model_data"]["model_name"] == BASE_MODEL, "the first name stays its own"
                sampler = sampler_of(server.url, session, number, base_model=name)
                assert result(server.url, accepted(server.url, "asample", sampling(sampler, 0)))
            request = {"session_id": session, "model_seq_id": 2, "base_model": "Qwen/Qwen3-8B"}
            refused = result(server.url, accepted(server.url, "create_model", request))
            assert "expected tests/unigram or Qwen/Qwen3-8B-Base" in refused["error"]
        finally:
            server.kill()
