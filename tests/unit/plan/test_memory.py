"""The plan of a shard's memory agrees with what models keep."""

from dataclasses import replace

import pytest
from model_support import FACTS

from memory import MODELS, PASS, STATE, Case, count_shard, planned
from trireme.config.trainer import TrainerConfig
from trireme.plan.memory import GIB, PLACE_BYTES, SHARD_BASE_GIB, ModelMemory, chunk_logits


def test_of_how_many_tokens_layers_are_kept() -> None:
    """Those whose activations fit into what is free."""
    memory = ModelMemory(FACTS, 2, on_gpus=True)
    limit = memory.kept_tokens("auto", 10**9)
    assert memory.activations(limit, False) <= 10**9 < memory.activations(limit + 1, False)
    assert memory.kept_tokens("auto", -1) == 0
    assert memory.kept_tokens(True, 10**9) == 0
    assert memory.kept_tokens(False, -1) is None


@pytest.mark.parametrize(("layers_in_room", "on_host"), [(6, 0), (5.9, 1), (4.1, 2), (2, 4), (0.5, 4)])
def test_activations_go_to_host_memory_of_as_many_layers_as_necessary(layers_in_room: float, on_host: int) -> None:
    """Two layers are on the device at least. By itself, auto computes layers twice."""
    memory, tokens = ModelMemory(replace(FACTS, num_layers=6), 2, on_gpus=True), 10_000
    options = TrainerConfig(checkpointing="offload", share_prefixes="off", reshard_after_forward=True)
    layer = tokens * memory.layer_bytes
    needed = int(SHARD_BASE_GIB * GIB) + memory.logits(tokens) + memory.gathered(options.lora, whole=False)
    room = needed + int(layers_in_room * layer) + tokens
    shard = memory.shard(options, tokens, 0, room)
    assert (shard.host_layers(tokens), shard.again) == (on_host, False)
    assert shard.activations == (6 - on_host) * layer
    assert shard.host_activations == int(4 / 3 * on_host * layer)
    assert ("to host memory" in shard.text) is (on_host > 0)
    assert shard.host_layers(1) == 0
    auto = memory.shard(options.model_copy(update={"checkpointing": "auto"}), tokens, 0, room)
    assert (auto.host_layers(10**9), auto.again) == (0, on_host > 0)


def test_activations_in_host_memory_are_what_the_code_holds() -> None:
    described = {**MODELS["Qwen3-8B"], "num_hidden_layers": 4}
    case = Case(described, shards=8, options={"checkpointing": "offload"})
    plan, counted = planned(case), count_shard(case)[PASS]
    assert plan.host_layers(case.tokens) == 2
    assert 0.85 < (plan.total - SHARD_BASE_GIB * GIB - plan.freed) / counted.device < 1.15
    assert 0.85 < plan.host_activations / (4 / 3 * counted.host) < 1.15


def test_the_room_goes_to_activations_first_and_then_to_the_whole_model() -> None:
    memory, tokens, state = ModelMemory(FACTS, 2, on_gpus=True), 10_000, 16 * FACTS.num_parameters
    options = TrainerConfig(shards=2, share_prefixes="off")
    layered, all_of_it = (memory.gathered(options.lora, whole=whole) for whole in (False, True))
    base = int(SHARD_BASE_GIB * GIB) + memory.logits(tokens)
    least, activations, whole = base + state // 2 + layered, memory.activations(tokens, False), all_of_it - layered
    assert activations > whole > 0

    def decided(room: int) -> tuple[bool, bool]:
        shard = memory.shard(options, tokens, state, room)
        assert shard.total <= max(room, least + memory.activations(tokens, True)), "no more than there is"
        return shard.again, shard.whole

    assert decided(0) == (True, False)
    assert decided(least + activations - 1)[0] is True
    assert decided(least + activations) == (False, False)
    assert decided(least + activations + whole - 1) == (False, False)
    assert decided(least + activations + whole) == (False, True)
    offload = TrainerConfig(shards=2, offload="cpu", share_prefixes="off")
    offloaded = memory.shard(offload, tokens, state, least + activations + whole - state // 2)
    assert (offloaded.again, offloaded.whole) == (False, True)


def test_with_shared_prefixes_columns_and_the_keys_of_a_layer_are_those_of_all_datums() -> None:
    """Keys and values and their gradients, for eight tokens of all datums for each distinct one. On GPUs gradients are
    made for each query head first, if several read a key."""
    memory = ModelMemory(FACTS, 2, on_gpus=True)
    keys = FACTS.num_kv_heads * FACTS.head_dim * 2
    assert FACTS.num_heads > FACTS.num_kv_heads
    on, off, dropout = (
        memory.shard(TrainerConfig.model_validate(options), 10, 0, 2**40)
        for options in ({}, {"share_prefixes": "off"}, {"lora": {"rank": 8, "dropout": 0.1}})
    )
    of_queries = 2 * FACTS.num_heads * FACTS.head_dim * 2
    assert on.flat == on.total - off.total == 8 * 10 * (4 * keys + of_queries + PLACE_BYTES)
    assert dropout.flat == 0
    each_its_own = replace(FACTS, num_kv_heads=FACTS.num_heads)
    for facts, on_gpus in ((FACTS, False), (each_its_own, True)):
        keys = facts.num_kv_heads * facts.head_dim * 2
        assert ModelMemory(facts, 2, on_gpus).flat(10) == 8 * 10 * (4 * keys + PLACE_BYTES)


def test_a_host_keeps_memory_of_freed_layers() -> None:
    layers = FACTS.num_parameters - FACTS.embedding_parameters
    on_host, on_gpu = (ModelMemory(FACTS, 4, on_gpus=on_gpus) for on_gpus in (False, True))
    assert on_host.freed == pytest.approx(2**26 + 17 * layers, abs=17 * FACTS.num_layers)
    large = replace(FACTS, num_parameters=FACTS.embedding_parameters + FACTS.num_layers * (2**23 + 1))
    assert ModelMemory(large, 4, on_gpus=False).freed == 3 * 2**26, "glibc gives larger ones back"
    assert on_gpu.freed == 0
    options = TrainerConfig(share_prefixes="off")
    planned_for = [memory.shard(options, 10, 0, 0) for memory in (on_host, on_gpu)]
    assert planned_for[0].base - planned_for[1].base == on_host.freed


LAYERS = 2
LORA = {"lora": {"rank": 32}}
CASES = {
    "0.6B-whole": Case(MODELS["Qwen3-0.6B"], shards=8, tokens=4096, whole=True, options={"checkpointing": False}),
    "8B": Case(MODELS["Qwen3-8B"], shards=8, options={"checkpointing": True}),
    "8B-kept": Case(MODELS["Qwen3-8B"], shards=8, options={"checkpointing": False}),
    "8B-few-tokens-alone": Case(MODELS["Qwen3-8B"], tokens=512, length=512, options={"checkpointing": True}),
    "8B-lora": Case(MODELS["Qwen3-8B"], shards=8, tokens=4096, options={"checkpointing": True, **LORA}),
    "30B-A3B": Case(MODELS["Qwen3-30B-A3B"], shards=8, options={"checkpointing": True}),
    "30B-A3B-kept": Case(MODELS["Qwen3-30B-A3B"], shards=8, options={"checkpointing": False}),
    "70B": Case(MODELS["Llama-3-70B"], shards=32, options={"checkpointing": True}),
    "8B-bf16-master": Case(MODELS["Qwen3-8B"], shards=8, options={"checkpointing": True, "master_dtype": "bfloat16"}),
    "4B-offloaded": Case(MODELS["Qwen3-4B"], options={"checkpointing": True, "offload": "cpu"}),
    "0.6B-on-cpus": Case(MODELS["Qwen3-0.6B"], 2, 4096, 1024, gpu=False, options={"checkpointing": True}),
}
OFTEN = ("0.6B-whole", "8B-lora", "30B-A3B-kept")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_the_plan_of_a_shard_is_what_its_code_holds(name: str) -> None:
    """Keeps only a few layers, as all are alike. Activations of experts are planned from above."""
    case = replace(CASES[name], described={**CASES[name].described, "num_hidden_layers": LAYERS})
    plan = planned(case)
    counted = count_shard(case)[PASS]
    state_bytes = counted.device - (sum(counted.kinds[kind] for kind in STATE) if plan.offloaded else 0)
    most = 1.25 if name == "30B-A3B-kept" else 1.15
    assert 0.85 < (plan.total - SHARD_BASE_GIB * GIB - plan.freed) / state_bytes < most


@pytest.mark.parametrize(("option", "just", "less"), [("auto", True, False), (False, True, True), (True, False, False)])
def test_weights_stay_gathered_where_they_fit_or_as_told(option: bool | str, just: bool, less: bool) -> None:
    """Beside the gradients of embeddings and a layer, and not if the whole model stays."""
    deep = replace(FACTS, num_layers=10, num_parameters=10 * 100_000 + FACTS.embedding_parameters)
    memory = ModelMemory(deep, 2, on_gpus=True)
    options = TrainerConfig(reshard_after_forward=option, share_prefixes="off")
    freed = memory.gathered(options.lora, whole=False)
    base = int(SHARD_BASE_GIB * GIB) + memory.logits(10)
    room = base + memory.activations(10, False) + freed + 2 * 8 * 100_000
    assert freed + 2 * 8 * 100_000 < memory.gathered(options.lora, whole=True)
    shards = [memory.shard(options, 10, 0, room - missing) for missing in (0, 1)]
    assert [shard.weights_stay for shard in shards] == [just, less]
    assert not any(shard.whole for shard in shards)
    message = "once a batch, their gradients summed layer by layer" if just else "layer by layer"
    assert shards[0].text.endswith(f"weights are gathered {message}")
    rich = memory.shard(options, 10, 0, 2**40)
    assert (rich.whole, rich.weights_stay) == ((False, False) if option is True else (True, True))
    for shards, whole in ((1, option is not True), (2, False)):
        coarse = options.model_copy(update={"reduce_dtype": "bfloat16", "shards": shards})
        assert memory.shard(coarse, 10, 0, 2**40).whole is whole


@pytest.mark.parametrize(
    ("free_gib", "logits"),
    [(None, 2**24), (0, 2**24), (1, 2**25), (6, 2**28), (12, 2**29), (23.9, 2**29), (24, 2**30), (140, 2**30)],
)
def test_logits_that_are_computed_at_the_same_time(free_gib: float | None, logits: int) -> None:
    """Half of what is free on a GPU, at 12 bytes each; on a CPU always as many."""
    assert chunk_logits(None if free_gib is None else int(free_gib * GIB)) == logits
