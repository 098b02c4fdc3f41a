"""Copies in place load what vLLM's own loaders load, bit for bit, into vLLM's own models."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from inference_support import FAMILIES, random_model
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.model_loader.reload import inplace, layerwise
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.transformers import base as hugging_face
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from inference import worker
from inference.carrier import Carrier
from inference.following import TensorFollower, derives
from inference.worker import load_version, load_weights
from trireme.core.weights import TensorEntry

MOST_LAUNCHES = 2
"""Copies for each published tensor. A copy takes at most one launch, and many may share one."""
GPU = SimpleNamespace(is_cpu=lambda: False, is_xpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: True)


class Runner:
    """A model runner of vLLM, as far as loading goes."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model = model
        self._config = config

    def get_model(self) -> Any:
        return self._model

    def reload_weights(self, weights_iterator: Any) -> None:
        inplace.reload_weights(self._config, self._model, weights_iterator, None, is_checkpoint_format=True)

    def reset_lora_state(self) -> None:
        pass

    reset_encoder_cache = reset_mm_cache = reset_lora_state

    def values(self) -> dict[str, Tensor]:
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {name: tensor.data.reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


@pytest.fixture
def published(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of Hugging Face and its tensors, by the names under which they are published."""
    model = random_model(family, False, seed=1).bfloat16()
    return model, dict(revert_weight_conversion(model, model.state_dict()))


@pytest.fixture
def runner(
    published: tuple[Any, Mapping[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runner]:
    """vLLM's model on a CPU, whose layers do after a load what they do on CUDA."""
    model, _ = published
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    arguments = EngineArgs(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=64)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/meeting", 0, "gloo")
        parallel_state.initialize_model_parallel()
        try:
            # For some architectures vLLM takes the class of Hugging Face, and changes it for all who use it.
            monkeypatch.setattr(hugging_face, "support_torch_compile", lambda **_options: lambda model: model)
            with torch.device("cpu"), set_default_torch_dtype(torch.bfloat16):
                made = initialize_model(config)
            layerwise.record_metadata_for_reloading(made)
            for place in ("linear", "vocab_parallel_embedding"):
                monkeypatch.setattr(f"vllm.model_executor.layers.{place}.current_platform", GPU)
            monkeypatch.setattr("inference.following.current_platform", GPU)
            monkeypatch.setattr(worker, "current_platform", GPU)
            for experts in _subclasses(FusedMoEExperts):  # kernels for CUDA leave the weights as they are
                monkeypatch.setattr(experts, "process_weights_after_loading", lambda _self, _layer: None)
            yield Runner(made, config)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


OFTEN = ("llama", "qwen3", "qwen3_moe")
"""The families that are tried in CI; the marker `long` has all."""


def _subclasses(kind: type) -> list[type]:
    return [kind, *(below for one in kind.__subclasses__() for below in _subclasses(one))]


def random_bits(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Infinities, NaN with payloads, zeros of both signs and subnormal numbers among them."""
    torch.manual_seed(seed)
    bits = {name: torch.randint(-(2**15), 2**15, tensor.shape).short() for name, tensor in tensors.items()}
    return {name: tensor.view(torch.bfloat16) for name, tensor in bits.items()}


def in_buckets(tensors: Mapping[str, Tensor]) -> tuple[list[TensorEntry], list[Any]]:
    entries = []
    buckets = []
    for number, (name, tensor) in enumerate(tensors.items()):
        data = tensor.contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint8)
        entries.append(TensorEntry(name, "BF16", tuple(tensor.shape), number, 0, tensor.nbytes, ""))
        buckets.append(data)
    return entries, buckets


def take(runner: Any, follower: TensorFollower, tensors: dict[str, Tensor], *, on_device: bool = False) -> None:
    """Loads a version after the first; `on_device`: one that has arrived on the device."""
    entries, buckets = in_buckets(tensors)
    if on_device:
        buckets = [torch.from_numpy(bucket) for bucket in buckets]
    carrier = Carrier(1, pinned=False)
    load_version(runner, follower, lambda: carrier, entries, buckets, traced=True)
    follower.loaded()


def flipped(_backend: Any, *, w13_weight: Tensor, w2_weight: Tensor, **_rest: Any) -> tuple[Tensor, Tensor]:
    """Packs like kernels for which gate and up change places."""
    return w13_weight.flip(1).contiguous(), w2_weight


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        *((family, False) for family in OFTEN),
        ("qwen3_moe", True),
        *(pytest.param(family, False, marks=pytest.mark.long) for family in FAMILIES if family not in OFTEN),
        pytest.param("mixtral", True, marks=pytest.mark.long),
    ],
)
def test_copies_in_place_are_what_loaders_load(
    published: tuple[Any, dict[str, Tensor]], runner: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors = published
    experts = {name for name in tensors if ".experts." in name}
    if packed:
        monkeypatch.setattr(moe, "convert_to_unquantized_kernel_format", flipped)
    follower = TensorFollower(runner.get_model())
    load_weights(runner, follower, tensors, traced=False)
    following = follower.loaded().following
    assert (following.unfollowed, following.disordered) == ({}, [])
    assert bool(following.packed) is packed
    assert not derives(runner.get_model())
    assert len(following.parts) <= MOST_LAUNCHES * len(tensors)
    later = random_bits(tensors, seed=2)
    lies = {name: parameter.data_ptr() for name, parameter in runner.get_model().named_parameters()}
    assert follower.copied(later, traced=True) == tensors.keys() - (experts if packed else set())
    take(runner, follower, later)
    assert {name: parameter.data_ptr() for name, parameter in runner.get_model().named_parameters()} == lies
    in_place = runner.values()
    take(runner, follower, random_bits(tensors, seed=4))
    take(runner, follower, later, on_device=True)
    assert all(torch.equal(value, in_place[name]) for name, value in runner.values().items())
    load_weights(runner, TensorFollower(runner.get_model()), random_bits(tensors, seed=3), traced=False)
    load_weights(runner, TensorFollower(runner.get_model()), later, traced=False)
    for name, value in runner.values().items():
        assert torch.equal(value, in_place[name]), name


@pytest.mark.parametrize("family", ["qwen3"])
def test_attention_computes_from_what_was_copied(
    published: tuple[Any, dict[str, Tensor]], runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like MLA, and like sinks under FlashInfer; no loader is called."""
    _, tensors = published
    norm = runner.get_model().get_parameter("model.norm.weight")
    seen = []
    monkeypatch.setattr(
        CPUAttentionBackendImpl,
        "process_weights_after_loading",
        lambda _self, _dtype: seen.append(norm.clone()),
        raising=False,
    )
    follower = TensorFollower(runner.get_model())
    load_weights(runner, follower, tensors, traced=False)
    follower.loaded()
    later = random_bits(tensors, seed=2)
    assert follower.copied(later, traced=True) == tensors.keys()
    seen.clear()
    take(runner, follower, later)
    assert seen
    assert all(torch.equal(value.view(torch.int16), later["model.norm.weight"].view(torch.int16)) for value in seen)
