"""The engine's arguments, requests and answers."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import vllm
from config_support import small
from vllm import envs
from vllm.config import SchedulerConfig
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer
from vllm.engine import arg_utils
from vllm.logprobs import (
    FlatLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from inference import engine
from inference.engine import RESERVED, check_tokens, engine_args, sampled_sequence, vllm_params
from trireme.config import Config
from trireme.config.schema import SamplingConfig
from trireme.core.errors import BadInput, RoomFailed
from trireme.core.types import SampledSequence, SampleRequest, SamplingParams, WeightIdentity
from trireme.plan.rl import QUEUE_BYTES

VLLM = Path(vllm.__file__).parent


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    check_tokens(np.asarray([0, 63], np.int32), 64)
    for token in (-1, 64, 2**31 - 1):
        with pytest.raises(ValueError, match=f"the token {token}; expected tokens of the vocabulary, below 64"):
            check_tokens(np.asarray([5, token], np.int32), 64)


def config(deterministic: bool = False, **inference: Any) -> Config:
    return small(
        deterministic=deterministic, orchestrator={"batch_size": 2, "max_steps_off_policy": 0}, inference=inference
    )


def test_a_replica_that_is_to_compute_on_a_gpu_computes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.NVML_CHECK, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(BadInput, match=r"in inference replica 0 on .*CUDA_VISIBLE_DEVICES is '3'; torch\.cuda says"):
        engine.start_engine(small(cluster={"device": "gpu"}), "inference replica 0")


def test_each_start_of_an_engine_draws_numbers_of_its_own_but_in_deterministic_mode() -> None:
    starts = ["inference replica 0/1", "inference replica 0/2", "inference replica 1/1"]
    seeds = [engine_args(config(), on_cpu=True, start=start)["seed"] for start in starts]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**32 for seed in seeds), "as numpy takes them"
    other = config().model_copy(update={"seed": 1})
    assert engine_args(other, on_cpu=True, start=starts[0])["seed"] != seeds[0]
    repeated = config(deterministic=True).model_copy(update={"seed": 7})
    assert [engine_args(repeated, on_cpu=True, start=start)["seed"] for start in starts] == [7, 7, 7]


def test_a_kv_cache_on_a_gpu_is_measured_unless_it_is_given() -> None:
    measured, fixed = (engine_args(config(gpu_cache_gb=cache), on_cpu=False) for cache in (None, 1.5))
    assert "kv_cache_memory_bytes" not in measured
    assert fixed["kv_cache_memory_bytes"] == 3 * 2**29
    assert measured["gpu_memory_utilization"] == fixed["gpu_memory_utilization"], "vLLM checks at first that it is free"
    # In the worker that CUDA selects, vLLM returns before it profiles memory, which the trainer may be taking.
    worker = ast.parse((VLLM / "v1" / "worker" / "gpu_worker.py").read_text())
    defined = [node for node in ast.walk(worker) if isinstance(node, ast.FunctionDef)]
    (measuring,) = (node for node in defined if node.name == "determine_available_memory")
    text = ast.unparse(measuring)
    position = text.index("if (kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes):")
    assert text.index("return reserve_mm_ipc_gpu_memory(kv_cache_memory_bytes", position) < text.index(
        "memory_profiling("
    )


@pytest.mark.parametrize(("trainer", "leave"), [({}, True), ({"lora": {"rank": 8}}, False)])
def test_cuda_graphs_leave_with_the_weights_where_rooms_take_turns(trainer: dict[str, Any], leave: bool) -> None:
    options: dict[str, Any] = {"orchestrator": {"max_steps_off_policy": 0}, "trainer": trainer}
    colocated = engine_args(small(placement="colocated", **options), on_cpu=False)
    assert (colocated["enable_sleep_mode"], colocated["sleep_mode_offload_cudagraph"]) == (True, leave)
    sleeps = {"enable_sleep_mode", "sleep_mode_offload_cudagraph"}
    assert not sleeps & engine_args(small(placement="split", **options), on_cpu=False).keys()
    assert not sleeps & engine_args(small(placement="colocated", **options), on_cpu=True).keys()


def test_engine_args_must_not_undo_what_the_replica_decides() -> None:
    with pytest.raises(BadInput, match="enable_chunked_prefill, logprobs_mode"):
        engine_args(config(engine_args={"logprobs_mode": "raw_logprobs", "enable_chunked_prefill": True}), on_cpu=True)
    assert engine_args(config(deterministic=True), on_cpu=True)["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in engine_args(config(), on_cpu=True)
    with pytest.raises(BadInput, match="enable_prefix_caching"):
        engine_args(config(deterministic=True, engine_args={"enable_prefix_caching": True}), on_cpu=True)


def test_both_rooms_compute_logits_in_the_same_dtype() -> None:
    assert engine_args(config(), on_cpu=True)["hf_overrides"] == {"head_dtype": "float32"}
    base = config(engine_args={"hf_overrides": {"rope_theta": 1e6}})
    base = base.model_copy(update={"model": base.model.model_copy(update={"head_dtype": "model"})})
    assert engine_args(base, on_cpu=True)["hf_overrides"] == {"rope_theta": 1e6, "head_dtype": "model"}
    with pytest.raises(BadInput, match=r"arguments that Trireme sets itself: hf_overrides\.head_dtype\. Remove"):
        engine_args(config(engine_args={"hf_overrides": {"head_dtype": "model"}}), on_cpu=True)


def test_vllm_still_does_not_ask_for_the_tiles_that_its_attention_uses() -> None:
    """Fails when it does: then `_init_amx` in `inference.worker` can go."""
    uses = VLLM / "v1" / "attention" / "backends" / "cpu_attn.py"
    starts = [VLLM / "platforms" / "cpu.py", *(VLLM / "v1" / "worker").glob("*cpu*.py")]
    assert "_is_amx_tile_supported" in uses.read_text()
    assert not [path for path in (uses, *starts) if "_init_amx" in path.read_text()]


def test_on_gpus_vllm_decides_as_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run on a GPU: vLLM's own table is asked for one that is made up."""
    created: dict[str, Any] = {}

    def arguments(**options: Any) -> SimpleNamespace:
        def create_engine_config(context: UsageContext) -> SimpleNamespace:
            created.update(arguments=options, context=context)
            return SimpleNamespace(scheduler_config=SchedulerConfig.default_factory())

        return SimpleNamespace(create_engine_config=create_engine_config, disable_log_stats=True)

    monkeypatch.setattr(engine, "find_device", lambda *_: "gpu")
    monkeypatch.setattr(engine, "import_engine", lambda **_: None)
    monkeypatch.setattr(engine, "prepare_start", lambda *_: None)
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", arguments)
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda _config, **_options: None)
    engine.start_engine(config(), "a test")
    assert created["arguments"]["max_num_seqs"] is None
    assert "max_num_batched_tokens" not in created["arguments"]
    for name, gib, defaults in (("NVIDIA H200", 140, [8192, 1024]), ("NVIDIA L40S", 45, [2048, 256])):
        gpu = Mock(**{"is_tpu.return_value": False, "is_cpu.return_value": False})
        gpu.get_device_total_memory.return_value = gib * 2**30
        gpu.get_device_name.return_value = name
        monkeypatch.setattr(arg_utils, "current_platform", gpu)
        assert [table[created["context"]] for table in arg_utils.EngineArgs.get_batch_defaults(1)] == defaults
    engine.start_engine(config(max_num_seqs=8), "a test")
    assert created["arguments"]["max_num_seqs"] == 8 + RESERVED


def test_ranks_are_processes_of_vllms_own_and_share_the_kv_cache_of_a_replica() -> None:
    keys = ("tensor_parallel_size", "distributed_executor_backend", "kv_cache_memory_bytes")
    for ranks, executor in ((1, "uni"), (2, "mp")):
        args = engine_args(config(tensor_parallel=ranks, memory_gb=0.5), on_cpu=True)
        assert [args[key] for key in keys] == [ranks, executor, 2**29 // ranks]
    with pytest.raises(BadInput, match="tensor_parallel_size"):
        engine_args(config(engine_args={"tensor_parallel_size": 2}), on_cpu=True)


def test_a_plan_knows_what_vllm_asks_to_be_free_for_the_answers_of_a_rank() -> None:
    parameters = inspect.signature(MessageQueue.__init__).parameters
    chunk, chunks = parameters["max_chunk_bytes"].default, parameters["max_chunks"].default
    assert ShmRingBuffer(1, chunk, chunks).total_bytes_of_buffer == QUEUE_BYTES, "with one reader"
    questions, group = chunks * envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 2**20, 6 * 2**22
    assert max(questions, group) < QUEUE_BYTES, "the other queues are smaller"


def test_every_sampling_parameter_of_the_configuration_reaches_the_engine() -> None:
    sampling = SamplingConfig(
        max_tokens=9, temperature=0.7, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.2, stop=("a",)
    )
    request = SampleRequest("r", (1,), sampling.params(seed=4, stop=(3, 6), room=100), "r")
    params = vllm_params(request, end_ids=[2])
    reached = {name: getattr(params, name) for name in SamplingConfig.model_fields if name != "stop"}
    assert reached == {name: value for name, value in sampling.model_dump().items() if name != "stop"}
    assert (params.seed, params.stop_token_ids, params.detokenize) == (4, [2, 3, 6], False)
    assert vllm_params(replace(request, params=sampling.params(seed=4, stop=(), room=7)), []).max_tokens == 7
    stopping = vllm_params(replace(request, params=sampling.params(seed=4, stop=(3, "ab", "c"), room=7)), [])
    assert (stopping.stop, stopping.stop_token_ids, stopping.detokenize) == (["ab", "c"], [3], True)
    assert stopping.include_stop_str_in_output, "what ended an answer is part of it"


def sampled(*tokens: int) -> SampleLogprobs:
    """What vLLM's own code makes of the requests of `vllm_params`, where token t was sampled with logprob -t."""
    params = vllm_params(SampleRequest("r", (5,), SamplingParams(), "r"), [])
    logprobs = create_sample_logprobs(params.flat_logprobs)
    for token in tokens:
        append_logprobs_for_next_position(logprobs, [token], [-float(token)], [None], 1, params.logprobs)
    return logprobs


def final_output(num_tokens: int, *edges: tuple[int, int], prompt_logprobs: Any = None) -> Any:
    """Stands for vLLM's RequestOutput with spans between these edges."""
    spans = [
        SimpleNamespace(version=str(WeightIdentity(1, i, "d")), start=start, end=end)
        for i, (start, end) in enumerate(edges)
    ]
    completion = SimpleNamespace(
        token_ids=list(range(num_tokens)),
        logprobs=sampled(*range(num_tokens)),
        weight_versions=spans,
        finish_reason="stop",
    )
    return SimpleNamespace(outputs=[completion], prompt_logprobs=prompt_logprobs)


def test_logprobs_are_those_of_the_sampled_tokens_and_spans_cover_every_token() -> None:
    """vLLM keeps them in flat lists: no object for each token."""
    request, output = SampleRequest("r", (5,), SamplingParams(), "r"), final_output(3, (0, 3))
    assert isinstance(output.outputs[0].logprobs, FlatLogprobs)
    answer = sampled_sequence(request, output, None)
    assert (answer.logprobs.dtype, answer.logprobs.tolist()) == (np.float32, [0, -1, -2])
    output.outputs[0].token_ids[1] = 9
    with pytest.raises(RoomFailed, match=r"sampled the tokens \[0, 9, 2\], but gave logprobs of \[0, 1, 2\]"):
        sampled_sequence(request, output, None)
    spans = sampled_sequence(request, final_output(5, (0, 2), (2, 5)), None).spans
    assert [(span.identity.version, span.start, span.end) for span in spans] == [(0, 0, 2), (1, 2, 5)]
    for wrong in (((0, 2), (3, 5)), ((0, 3), (2, 5)), ((0, 4),), ((1, 5),), ()):
        with pytest.raises(RoomFailed, match="do not cover"):
            sampled_sequence(request, final_output(5, *wrong), None)


def test_prompt_logprobs_of_vllm() -> None:
    """A table has the k likeliest tokens, and the one that is there, which may be the k + 1st entry."""
    tables = create_prompt_logprobs(flat_logprobs=True)  # an entry for the first token too, which has no logprob
    append_logprobs_for_next_position(tables, [6, 2, 3], [-4.0, -0.5, -1.5], [None] * 3, 9, 2)
    append_logprobs_for_next_position(tables, [7, 7, 1], [-0.2, -0.2, -1.0], [None] * 3, 1, 2)
    output = final_output(1, (0, 1), prompt_logprobs=tables)

    def sequence_of(**options: Any) -> SampledSequence:
        return sampled_sequence(SampleRequest("a", (5, 6, 7), SamplingParams(), "a", **options), output, None)

    both = sequence_of(prompt_logprobs=True, topk_prompt_logprobs=2)
    assert both.prompt_logprobs == [None, -4.0, -0.2]
    assert both.topk_prompt_logprobs == [None, [(2, -0.5), (3, -1.5)], [(7, -0.2), (1, -1.0)]]
    assert sequence_of(prompt_logprobs=True).topk_prompt_logprobs is None
    assert sequence_of(topk_prompt_logprobs=1).topk_prompt_logprobs == [None, [(2, -0.5)], [(7, -0.2)]]
    assert sequence_of(topk_prompt_logprobs=1).prompt_logprobs is None
