"""What an engine has loaded, part by part: seen as loaders copy it, summed, and held against what was published."""

import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensor_parts import part_tensor_sums
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from inference.following import AFTER, COMPUTED, CopyWatch, TensorFollower, derives, disordered
from inference.loaded import Elements, Following, HeldPart, LoadedProof, LoadedSums
from trireme.core.digest import Sums
from trireme.core.errors import WeightsRefused
from trireme.core.types import WeightIdentity
from trireme.core.weights import EXACT, Canary, TensorEntry, WeightsManifest
from trireme.transports.tensor_sums import part_sums, to_sums

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def manifest_of(tensors: dict[str, Tensor], version: int = 1) -> WeightsManifest:
    entries = [
        TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), 0, 0, tensor.nbytes, str(sums(tensor)))
        for name, tensor in tensors.items()
    ]
    canary = Canary(np.zeros(2, np.int32), np.zeros(1, np.float32), EXACT)
    return WeightsManifest(WeightIdentity(1, version, "d"), tuple(entries), canary)


def sums(tensor: Tensor) -> Sums:
    return to_sums(part_tensor_sums(tensor)[None])[0]


# ------------------------------------------------------------------------------------------ the ranks' answers together

WHOLE = {"norm": torch.randn(6), "up": torch.randn(4, 6), "keys": torch.randn(4, 6)}


def rank(parts: dict[str, list[slice]], values: dict[str, Tensor] = WHOLE, **following: Any) -> bytes:
    """The answer of a rank that holds these rows."""
    held_parts, rows = [], []
    for name, slices in parts.items():
        for part in slices:
            tensor = values[name][part]
            first = part.start * (values[name].numel() // len(values[name]))
            held_parts.append(HeldPart(name, Elements(first, (tensor.numel(),), (1,))))
            rows.append(to_sums(part_tensor_sums(tensor, first)[None])[0])
    array = np.array([(part.first, part.second) for part in rows], np.uint64).reshape(-1, 2)
    following_sums = Following(tuple(held_parts), **{"packed": 0, "unfollowed": {}, "disordered": [], **following})
    return pickle.dumps(LoadedSums(array, following_sums))


FIRST = {"norm": [slice(0, 6)], "up": [slice(0, 2)], "keys": [slice(0, 4)]}
SECOND = {"norm": [slice(0, 6)], "up": [slice(2, 4)], "keys": [slice(0, 4)]}


def test_what_ranks_share_counts_once_and_their_own_parts_add_up(caplog: pytest.LogCaptureFixture) -> None:
    proof = LoadedProof("a replica")
    assert not proof.traced
    proof.check(manifest_of(WHOLE), [rank(FIRST), rank(SECOND)])
    assert proof.traced
    published = WHOLE | {f"layers.{i}.bias": torch.ones(2) for i in range(3)}
    computed = {f"layers.{i}.bias": COMPUTED for i in range(3)}
    proof = LoadedProof("inference replica 3")
    proof.check(manifest_of(published), [rank(FIRST, unfollowed=computed), rank(SECOND)])
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("inference replica 3: 3 of 6 published tensors cannot be followed")
    assert message.endswith(f"layers.*.bias (3: {COMPUTED})")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_value_of_one_rank_is_refused_by_tensor_and_rank(name: str, wrong: int) -> None:
    values = {key: tensor.clone() for key, tensor in WHOLE.items()}
    values[name].view(-1)[2 if wrong == 0 else -1] += 1
    answers = [rank(FIRST), rank(SECOND)]
    answers[wrong] = rank((FIRST, SECOND)[wrong], values)
    by_whom = "0, 1" if name == "up" else str(wrong)  # of parts that a rank holds alone nobody knows whose is wrong
    with pytest.raises(WeightsRefused, match=rf"version 1: .* values that differ .*: {name} \(rank {by_whom}\)$"):
        LoadedProof("a replica").check(manifest_of(WHOLE), answers)


def test_wrong_values_of_all_ranks_and_what_none_has_loaded_are_refused() -> None:
    values = WHOLE | {"norm": WHOLE["norm"] + 1}
    with pytest.raises(WeightsRefused, match=r": norm \(rank 0, 1\)$"):
        LoadedProof("a replica").check(manifest_of(WHOLE), [rank(FIRST, values), rank(SECOND, values)])
    published = WHOLE | {f"extra {i}": torch.ones(2) for i in range(5)}
    proof = LoadedProof("a replica")
    with pytest.raises(WeightsRefused, match=r"nothing, of extra 0 \(0 of 2 values\), .* and 1 more"):
        proof.check(manifest_of(published), [rank(FIRST), rank(SECOND)])
    assert not proof.traced, "the next update looks again"
    with pytest.raises(WeightsRefused, match=r"only a part, or nothing, of up \(12 of 24 values\)"):
        proof.check(manifest_of(WHOLE), [rank(FIRST), rank(FIRST)])


# ---------------------------------------------------------------------------------------------- a rank and its loaders


class Packed(UnquantizedLinearMethod):
    """Leaves nothing of a weight, like vLLM on CPUs, or turns it in place, like some kernels."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        if self.in_place:
            weight.copy_(weight.flip(0).clone())
        else:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


Loader = Callable[[str, Tensor, dict[str, Tensor]], None]


def reload(model: nn.Module, load: Loader, traced_tensors: Any) -> None:
    """Reloads all layers with one loader, which is called twice for each tensor. Layers that get none keep theirs."""
    permanent = {name: parameter.data for name, parameter in model.named_parameters()}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in SHAPES.items()}
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in SHAPES}
    for name, owner in owners.items():
        setattr(owner, name.rpartition(".")[2], nn.Parameter(empty[name], requires_grad=False))
    parameters = dict(model.named_parameters())
    tensors = []
    for name, tensor in traced_tensors:
        tensors.append((name, tensor))
        load(name, tensor, {key: parameter.data for key, parameter in parameters.items()})
    full = {name: torch.full_like(SHAPES[name], float("nan")) for name in SHAPES}
    for name, tensor in tensors:
        load(name, tensor, full)
    arrived = {name for name in SHAPES if not full[name].isnan().all()}
    for name, owner in owners.items():
        new = full[name] if name in arrived else permanent[name]
        setattr(owner, name.rpartition(".")[2], nn.Parameter(new, requires_grad=False))
    for name, owner in owners.items():
        if hasattr(owner, "quant_method") and name in arrived:
            owner.quant_method.process_weights_after_loading(owner)


SHAPES = {"qkv.weight": torch.zeros(8, 6), "norm.weight": torch.zeros(6), "down.weight": torch.zeros(6, 4)}
PUBLISHED = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "norm": (6,), "down": (6, 8)}


def model_of(in_place: bool = False) -> nn.Module:
    model = nn.Module()
    for name, tensor in SHAPES.items():
        model.add_module(name.partition(".")[0], layer := nn.Module())
        layer.register_parameter("weight", nn.Parameter(tensor.clone(), requires_grad=False))
    model.qkv.quant_method = Packed(in_place)
    return model


def fused(name: str, tensor: Tensor, parameters: dict[str, Tensor]) -> None:
    """A rank's half of `down`, and all of the others."""
    rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
    if name in rows:
        parameters["qkv.weight"].narrow(0, *rows[name]).copy_(tensor)
    elif name == "down":
        parameters["down.weight"].copy_(tensor.narrow(1, 4, 4))
    else:
        parameters["norm.weight"].copy_(tensor)


def fresh(**overrides: Tensor) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in PUBLISHED.items()} | overrides


def update(
    follower: TensorFollower, model: nn.Module, tensors: dict[str, Tensor], load: Loader = fused, traced: bool = True
) -> LoadedSums:
    with follower.following(tensors, traced=traced) as traced_tensors:
        reload(model, load, traced_tensors)
    return follower.loaded()


def expected(tensors: dict[str, Tensor], following: Following) -> list[Sums]:
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    places = [(part.name, part.slice) for part in following.parts]
    views = [(flat[name].as_strided(place.shape, place.stride, place.offset), place) for name, place in places]
    return [to_sums(part_tensor_sums(view, place.offset, place.stride)[None])[0] for view, place in views]


def sums_of(loaded: LoadedSums) -> list[Sums]:
    return [Sums(int(first), int(second)) for first, second in loaded.sums]


@pytest.mark.parametrize("in_place", [True, False])
def test_parts_of_fused_and_cut_parameters_are_summed_before_what_packs_them(in_place: bool) -> None:
    model = model_of(in_place)
    follower, tensors = TensorFollower(model), fresh()
    first = update(follower, model, tensors, traced=False)
    parts = {part.name: part.slice for part in first.following.parts}
    assert parts == {
        "q": Elements(0, (24,), (1,)),
        "k": Elements(0, (12,), (1,)),
        "v": Elements(0, (12,), (1,)),
        "norm": Elements(0, (6,), (1,)),
        "down": Elements(4, (6, 4), (8, 1)),
    }
    assert first.following.packed == 3
    assert (first.following.unfollowed, first.following.disordered) == ({}, [])
    assert sums_of(first) == expected(tensors, first.following)
    assert "process_weights_after_loading" not in vars(model.qkv.quant_method), "the class's own is in use again"
    later = fresh()
    second = update(follower, model, later)
    assert second.following is None
    assert sums_of(second) == expected(later, first.following)


def test_a_parameter_that_keeps_its_old_values_has_other_sums() -> None:
    model, tensors = model_of(), fresh()
    follower = TensorFollower(model)
    following = update(follower, model, tensors, traced=False).following
    original = model.norm.weight

    def forgets(name: str, tensor: Tensor, parameters: dict[str, Tensor]) -> None:
        if name != "norm":
            fused(name, tensor, parameters)
        elif not parameters["norm.weight"].is_meta:
            parameters["norm.weight"].copy_(original)

    later = fresh()
    wrong = [
        a != b
        for a, b in zip(sums_of(update(follower, model, later, forgets)), expected(later, following), strict=True)
    ]
    assert wrong == [part.name == "norm" for part in following.parts]


def test_what_is_changed_after_the_reload_is_seen_and_packing_then_is_not_taken_for_a_change() -> None:
    model, tensors = model_of(in_place=True), fresh()
    follower = TensorFollower(model)
    following: Following | None = None
    for traced in (False, True):
        with follower.following(tensors, traced=traced) as traced_tensors:
            reload(model, fused, traced_tensors)
        follower.pack(AFTER, lambda layer: layer.get_parameter("weight").mul_(2), model.down)
        model.norm.weight.data[0] += traced
        loaded = follower.loaded()
        following = following or loaded.following
        wrong = [a != b for a, b in zip(sums_of(loaded), expected(tensors, following), strict=True)]
        assert wrong == [traced and part.name == "norm" for part in following.parts]
        assert following.packed == 4


class Derived(nn.Module, AttentionLayerBase):
    """Computes something from the weights of another layer after each load, like MLA."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        raise AssertionError

    get_attn_backend = get_kv_cache_spec = process_weights_after_loading


def computing(name: str, tensor: Tensor, parameters: dict[str, Tensor]) -> None:
    fused(name, tensor + 1 if name == "norm" else tensor, parameters)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.following.current_platform", SimpleNamespace(is_cuda=lambda: True))


def unpacked_model() -> nn.Module:
    model = model_of()
    del model.qkv.quant_method
    return model


def take(follower: TensorFollower, model: nn.Module, tensors: dict[str, Tensor]) -> LoadedSums:
    """An update as the worker does it: copies first, and loaders for the rest."""
    copied = follower.copied(tensors, traced=True)
    assert copied
    follower.copy([{"q": tensors["q"]} if "q" in copied else {}, {n: tensors[n] for n in copied - {"q"}}])
    if len(copied) < len(tensors):
        with follower.following(tensors, traced=True, copied=copied) as followed:
            reload(model, fused, followed)
    return follower.loaded()


@pytest.mark.usefixtures("on_cuda")
def test_tensors_are_copied_only_where_they_lie_as_they_were_loaded_before() -> None:
    """Bit for bit, and in vLLM's own models: test_following.py."""
    model = model_of(in_place=True)
    follower = TensorFollower(model)
    assert not follower.copied(fresh(), traced=True), "nothing is known before the first update"
    following = update(follower, model, fresh(), traced=False).following
    later = fresh()
    assert follower.copied(later, traced=True) == {"norm", "down"}
    assert sums_of(take(follower, model, later)) == expected(later, following)
    assert not follower.copied(later, traced=False)
    assert not follower.copied({name: tensor.bfloat16() for name, tensor in later.items()}, traced=True)
    model.norm.weight = nn.Parameter(torch.zeros(12)[::2], requires_grad=False)
    assert not follower.copied(later, traced=True), "it lies otherwise now"


@pytest.mark.usefixtures("on_cuda")
def test_what_loaders_compute_with_leaves_all_to_them() -> None:
    model = unpacked_model()
    follower = TensorFollower(model)
    update(follower, model, fresh(), computing, traced=False)
    assert not follower.copied(fresh(), traced=True)


def test_what_is_left_to_loaders() -> None:
    model = unpacked_model()
    follower = TensorFollower(model)
    update(follower, model, fresh(), traced=False)
    assert not follower.copied(fresh(), traced=True)
    assert not derives(model)
    model.add_module("attention", Derived())
    assert derives(model)


class Computing(UnquantizedLinearMethod):
    """Computes something else from a weight, which it does not change."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.total = layer.weight.sum()


@pytest.mark.usefixtures("on_cuda")
def test_a_layer_that_loaders_load_is_loaded_whole_and_so_are_layers_that_share_a_tensor_with_it() -> None:
    """`norm` is loaded to two layers: that of `q`, `k` and `v` comes from loaders too."""

    def sharing(name: str, tensor: Tensor, parameters: dict[str, Tensor]) -> None:
        if name == "norm":
            parameters["qkv.weight"][0].copy_(tensor)
        fused(name, tensor, parameters)

    for shared in (False, True):
        model = unpacked_model()
        model.norm.quant_method = Computing()
        follower = TensorFollower(model)
        update(follower, model, fresh(), sharing if shared else fused, traced=False)
        assert follower.copied(fresh(), traced=True) == ({"down"} if shared else {"q", "k", "v", "down"})


def test_no_sum_is_taken_under_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []

    def noted(parts: Any) -> Tensor:
        depths.append(len(_get_current_dispatch_mode_stack()))
        return part_sums(parts)

    monkeypatch.setattr("inference.following.part_sums", noted)
    model = model_of()
    update(TensorFollower(model), model, fresh(), traced=False)
    assert depths
    assert set(depths) == {0}


def watched(tensor: Tensor, load: Callable[[Tensor, Tensor], None], parameter: Tensor) -> CopyWatch:
    watch = CopyWatch({"t": tensor})
    with watch:
        watch.begin({"p": parameter})
        load(parameter, tensor)
    return watch


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, t: p.copy_(t.double()), COMPUTED),
        (lambda p, t: p.copy_(t.t().contiguous().t()), COMPUTED),
        (lambda p, t: p.copy_(-torch.exp(t)), COMPUTED),
        (lambda p, t: p.copy_(t).copy_(p + 1), COMPUTED),
        (lambda p, t: p.copy_(t).add_(1), COMPUTED),
        (lambda p, t: p.copy_(torch.empty_like(t).copy_(t)), COMPUTED),
        (lambda p, t: p.add_(t), COMPUTED),
        (lambda p, t: p.copy_(t[:1]), "loaders repeat it"),
        (lambda p, t: p.copy_(t.view(torch.int32)), "float32 as int32 held in float32"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_loader_computes_is_not_followed(
    load: Callable[[Tensor, Tensor], None], reason: str, device: str
) -> None:
    watch = watched(torch.randn(4, 6), load, torch.zeros(4, 6, device=device))
    assert watch.unfollowed == {"t": reason}


def test_values_that_are_held_in_fewer_bits_are_not_followed() -> None:
    watch = watched(torch.randn(4, 6), lambda p, t: p.copy_(t), torch.zeros(4, 6, dtype=torch.bfloat16))
    assert watch.unfollowed == {"t": "float32 as float32 held in bfloat16"}
    assert not watch.copies


def test_experts_that_change_places_at_the_first_update_are_out_of_order() -> None:
    tensors = {f"layers.{layer}.experts.{expert}.up": torch.randn(2) for layer in range(2) for expert in range(11)}

    def copies(swap: bool) -> list[str]:
        watch = CopyWatch(tensors)
        parameters = {f"layers.{layer}.w13": torch.zeros(11, 4, device="meta") for layer in range(2)}
        with watch:
            watch.begin(parameters)
            for name, tensor in tensors.items():
                _, layer, _, expert, _ = name.split(".")
                at = {"9": 10, "10": 9}.get(expert, int(expert)) if swap and layer == "1" else int(expert)
                parameters[f"layers.{layer}.w13"][at, :2].copy_(tensor)
        return disordered([copy for copies_of_tensor in watch.copies.values() for copy in copies_of_tensor])

    assert copies(swap=False) == []
    assert copies(swap=True) == ["layers.1.experts.9.up", "layers.1.experts.10.up"]
