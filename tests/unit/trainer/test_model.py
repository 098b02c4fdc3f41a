"""One gradient, however it is computed: shards, copies of shards, packed or in rows, with layers computed twice, state
offloaded; in dense models and in one with experts. All against the unsharded Hugging Face model, in float32."""

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks_support import run_alone, run_ranks
from shard_support import make_rank, published_tensors, save
from torch._dynamo.utils import counters
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_group
from torch.utils.checkpoint import checkpoint

# The tiny models and batches are the end-to-end tests' too.
from trainer_support import EXPERTS, make_batch, make_config, make_model
from transformers import AutoModelForCausalLM

from trainer.batching import ShardOutput, scatter_outputs
from trainer.logprobs import SelectedLogprobs
from trainer.losses import resolve_loss
from trainer.model import Sharding, fsdp_units
from trireme.config.trainer import CommonTrainer
from trireme.core.errors import BadInput
from trireme.core.prefixes import Forest
from trireme.core.types import AdamParams, TokenBatch
from trireme.plan import memory

LENGTHS = (30, 3, 3, 4, 5, 29, 7, 1)
BUDGET = 24  # less than the longest: shards have unequal numbers of micro-batches, some nothing but fillers
FAMILIES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Step:
    """The results of one step on a rank: its part of logprobs and metrics, the whole gradient, metrics of the update,
    and the weights that it published (rank 0)."""

    output: ShardOutput
    gradient: dict[str, torch.Tensor]
    update: dict[str, float]
    after: dict[str, torch.Tensor]


def make_shard(rank, world_size, store, model, options):
    """With `layer_by_layer` among the options nothing stays gathered between micro-batches, as with large models. When
    compiled, layers are traced, forward and backward, but no code is made of them: that takes half a minute."""
    shards = world_size // options.get("trainer__replicate", 1)
    options = {"trainer__micro_batch_tokens": BUDGET, "trainer__shards": shards, **options}
    with pytest.MonkeyPatch.context() as patch:
        if options.pop("layer_by_layer", False):
            options = {"trainer__reshard_after_forward": True, **options}
            patch.setattr(memory.ModelMemory, "stays_whole", lambda *_: False)
        patch.setattr(torch, "compile", partial(torch.compile, backend=options.pop("backend", "aot_eager")))
        return make_rank(make_config(model, **options), rank, world_size, store)


def one_step(rank, world_size, store, model, options, save_to=None):
    one = make_shard(rank, world_size, store, model, options)
    output = one.forward_backward(make_batch(LENGTHS), "ppo", {}, None)
    names = [name for name, p in one._model.named_parameters() if p.requires_grad]
    gradient = {name: p.grad.full_tensor().clone() for name, p in zip(names, one._parameters, strict=True)}
    update = one.optim_step(AdamParams(learning_rate=1e-2), 40.0).metrics
    after = published_tensors(one)
    if save_to:
        save(one, save_to)
    dist.destroy_process_group()
    return Step(output, gradient, dict(update), after)


def logprobs(steps):
    return scatter_outputs(make_batch(LENGTHS), [step.output for step in steps])


def assert_close_to_the_norm(got, references, bound=1e-5):
    """Each tensor within `bound` of the norm of what is wanted."""
    assert got.keys() == references.keys()
    for name, expected in references.items():
        difference = float((torch.as_tensor(got[name]) - torch.as_tensor(expected)).norm())
        assert difference <= bound * float(torch.as_tensor(expected).norm()) + 1e-9, name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: make_model(tmp_path_factory.mktemp("model"), family, True) for family in FAMILIES}


@pytest.fixture(scope="module")
def unsharded(models):
    """Logprobs [T] and gradients of the same loss by the Hugging Face model, each datum alone, without padding."""
    results = {}
    for family, model in models.items():
        policy, batch = AutoModelForCausalLM.from_pretrained(model), make_batch(LENGTHS)
        function, config = resolve_loss("ppo", {})
        rows = []
        for start, end in itertools.pairwise(batch.offsets):
            columns = {name: torch.from_numpy(column[start:end]) for name, column in batch.columns.items()}
            logits = policy(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / batch.temperatures[0]
            p = logits.log_softmax(-1).gather(-1, columns["target_tokens"].long()[:, None])[:, 0]
            function(p, columns, config)[0].backward()
            rows.append(p.detach())
        results[family] = torch.cat(rows).numpy(), {name: p.grad for name, p in policy.named_parameters()}
    return results


WAYS = {
    "rows": {},
    "packed": {"trainer__packing": "packed"},
    "checkpointing": {"trainer__checkpointing": True},
    "packed, checkpointing": {"trainer__packing": "packed", "trainer__checkpointing": True},
    "offload": {"trainer__offload": "cpu"},
    "compiled": {"trainer__compile": True},
    "compiled, packed, checkpointing": {
        "trainer__compile": True,
        "trainer__packing": "packed",
        "trainer__checkpointing": True,
    },
    "layer by layer": {"layer_by_layer": True},
    "layer by layer, checkpointing": {"layer_by_layer": True, "trainer__checkpointing": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "way",
    # Compiled layers: test_layers_are_compiled_at_the_start_for_all_lengths_and_shared_prefixes
    [pytest.param(way, marks=[pytest.mark.long] if "compiled" in way else []) for way in WAYS],
)
def test_one_process(models, unsharded, family, way):
    step = run_alone(one_step, models[family], WAYS[way])
    expected, gradient = unsharded[family]
    np.testing.assert_allclose(logprobs([step]), expected, atol=1e-5)
    assert_close_to_the_norm(step.gradient, gradient)


def test_layers_are_compiled_at_the_start_for_all_lengths_and_shared_prefixes(models, unsharded):
    """Layers are traced forward only, which is enough to count graphs; the long tests trace them backward too."""
    way = {**WAYS["compiled, packed, checkpointing"], "trainer__micro_batch_tokens": 99, "backend": "eager"}
    one = run_alone(make_shard, models["qwen3"], way)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs
    assert one.shown()[0].split("; ")[1] == "layers are compiled"
    expected, gradient = unsharded["qwen3"]
    output = one.forward_backward(make_batch(LENGTHS), "ppo", {}, None)
    np.testing.assert_allclose(scatter_outputs(make_batch(LENGTHS), [output]), expected, atol=1e-5)
    assert_close_to_the_norm({name: p.grad.full_tensor() for name, p in one._model.named_parameters()}, gradient)
    for longest in range(2, 22):
        one.forward_backward(make_batch([longest, *range(1, longest, 3)]), "ppo", {}, None)
    assert counters["stats"]["unique_graphs"] - graphs <= 1

    graphs = counters["stats"]["unique_graphs"]
    batch = make_batch([19, 25, 22, 17, 4])
    for offset in batch.offsets[:4]:
        batch.tokens[offset : offset + 16] = 7
    assert any(micro.shared for micro in one._micro_batches(batch.find_forest()))
    compiled = computed(one, batch)
    assert counters["stats"]["unique_graphs"] - graphs <= 1
    with torch.compiler.set_stance("force_eager"):
        expected = computed(one, batch)
    np.testing.assert_allclose(compiled[0], expected[0], atol=1e-5)
    assert_close_to_the_norm(compiled[1], expected[1])
    dist.destroy_process_group()


def computed(one, batch):
    """Returns the log-probabilities of a batch and its gradient by name; the shard forgets earlier gradients and this
    one."""
    one.drop_gradients()
    output = one.forward_backward(batch, "ppo", {}, None)
    gradient = {name: p.grad.full_tensor() for name, p in one._model.named_parameters() if p.requires_grad}
    one.drop_gradients()
    return output.logprobs, gradient


@pytest.mark.long
def test_layers_with_adapters_compile_as_one_graph(models, monkeypatch):
    monkeypatch.setattr(CommonTrainer, "compiles", lambda _, on_gpus: True)
    way = {"trainer__packing": "packed", "trainer__lora": {"rank": 4, "alpha": 8}}
    one = run_alone(make_shard, models["qwen3"], way)
    assert "layers are compiled" in one.shown()[0]
    batch = make_batch(LENGTHS)
    one.forward_backward(batch, "ppo", {}, None)
    one.optim_step(AdamParams(learning_rate=1e-2), 40.0)  # at first the gradients of half of the tensors are 0
    logprobs, gradient = computed(one, batch)
    with torch.compiler.set_stance("force_eager"):
        expected, expected_gradient = computed(one, batch)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert_close_to_the_norm(gradient, expected_gradient)
    dist.destroy_process_group()


def wrong_backend(graph, inputs):
    return lambda *args: [out * 2 if isinstance(out, torch.Tensor) else out for out in graph(*args)]


def failing_backend(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("backend", "reason"), [(wrong_backend, "log-probabilities differ by"), (failing_backend, "no compiler here")]
)
def test_layers_that_do_not_compile_right_are_not_compiled(models, monkeypatch, backend, reason):
    monkeypatch.setattr(CommonTrainer, "compiles", lambda _, on_gpus: True)
    try:
        one = run_alone(make_shard, models["qwen3"], {"backend": backend})
        output = one.forward_backward(make_batch(LENGTHS), "ppo", {}, None)
    finally:
        torch.compiler.set_stance("default")
        dist.destroy_process_group()
    message = one.shown()[0].split("; ")[1]
    assert message.startswith("layers are not compiled: ")
    assert reason in message
    monkeypatch.undo()
    np.testing.assert_array_equal(output.logprobs, run_alone(one_step, models["qwen3"], {}).output.logprobs)


def test_layers_that_must_be_compiled_and_cannot_be_are_refused(models):
    try:
        with pytest.raises(BadInput, match=r"trainer\.compile = true .*no compiler here"):
            run_alone(make_shard, models["qwen3"], {"trainer__compile": True, "backend": failing_backend})
    finally:
        torch.compiler.set_stance("default")
        dist.destroy_process_group()


# (shards, copies): which model, and how else
GROUPS = {
    (2, 1): ("qwen3_moe", WAYS["packed"]),
    (1, 2): ("qwen3", WAYS["rows"]),
    (3, 1): ("qwen3", {**WAYS["packed, checkpointing"], "layer_by_layer": True}),
    (2, 2): ("qwen3_moe", WAYS["layer by layer"]),
}


def gathers_both_ways(rank, world_size, store, model):
    """Returns what `gathers` does without and with `reshard_after_forward`."""
    return [gathers(rank, world_size, dist.PrefixStore(str(way), store), model, way) for way in (False, True)]


def gathers(rank, world_size, store, model, reshard):
    """Returns a step without `whole`, and how often the weights of a unit were gathered in its passes, and in a
    publication after it."""
    calls, gather = [], fsdp_group.foreach_all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_group, "foreach_all_gather", lambda *args: calls.append(args) or gather(*args))
        options = {"layer_by_layer": True, "trainer__reshard_after_forward": reshard}
        one = make_shard(rank, world_size, store, model, options)
        calls.clear()
        output = one.forward_backward(make_batch(LENGTHS), "ppo", {}, None)
        in_passes = len(calls)
        one.publish_weights(0)
    in_publication = len(calls) - in_passes
    gradient = {name: p.grad.full_tensor().clone() for name, p in one._model.named_parameters()}
    units, passes = len(fsdp_units(one._model)), len(one._micro_batches(Forest.flat(np.array(LENGTHS))))
    gathered = [not parameter.is_meta and type(parameter).__name__ == "DTensor" for parameter in one._parameters]
    dist.destroy_process_group()
    return output.logprobs, gradient, in_passes, in_publication, units, passes, all(gathered)


def test_weights_that_stay_gathered_change_no_bit_and_are_gathered_once(models):
    """ZeRO-2 and ZeRO-3 of two shards: gradients are summed after the same passes in the same order."""
    for gathered, (other_p, other, more_calls, more_in_publication, *_) in run_ranks(
        2, gathers_both_ways, models["qwen3"]
    ):
        p, gradient, calls, in_publication, units, passes, sharded = gathered
        np.testing.assert_array_equal(p, other_p)
        assert gradient.keys() == other.keys()
        assert all(torch.equal(gradient[name], other[name]) for name in gradient)
        assert passes > 1
        assert calls == units
        assert more_calls == passes * (2 * units - 2), "root and last layer stay from a forward pass to its backward"
        assert in_publication == units, "the canary is computed with the weights that were gathered to be sent"
        assert more_in_publication == 2 * units
        assert sharded, "nothing is left gathered"


@pytest.mark.parametrize("shape", GROUPS, ids=[f"{shards} shards x {copies}" for shards, copies in GROUPS])
def test_several_processes(models, unsharded, shape, tmp_path):
    shards, copies = shape
    family, options = GROUPS[shape]
    steps = run_ranks(
        shards * copies, one_step, models[family], {**options, "trainer__replicate": copies}, tmp_path / "trainer"
    )
    expected, gradient = unsharded[family]
    np.testing.assert_allclose(logprobs(steps), expected, atol=1e-5)
    single = run_alone(one_step, models[family], {})
    for step in steps:
        assert_close_to_the_norm(step.gradient, gradient)
        assert step.update == pytest.approx(single.update, rel=1e-5)
    assert [bool(step.after) for step in steps] == [True] + [False] * (len(steps) - 1)
    assert_close_to_the_norm(steps[0].after, single.after, 1e-4)

    # What they saved is whole, is there once, and one process goes on from it.
    states = 12 * sum(p.numel() for p in gradient.values())
    files = sum(file.stat().st_size for file in (tmp_path / "trainer").glob("*.distcp"))
    assert states < files < 1.3 * states + 500_000
    assert_close_to_the_norm(run_alone(load_and_publish, models[family], tmp_path / "trainer"), steps[0].after, 0.0)


def load_and_publish(rank, world_size, store, model, path):
    one = make_shard(rank, world_size, store, model, {})
    one.load_state(path, [])
    after = published_tensors(one)
    dist.destroy_process_group()
    return after


def low_precision_step(rank, world_size, store, model, options):
    one = make_shard(rank, world_size, store, model, options)
    output = one.forward_backward(make_batch(LENGTHS), "importance_sampling", {}, None)
    dtypes = {p.dtype for p in one._parameters}, {p.grad.dtype for p in one._parameters}
    gradient = torch.cat([p.grad.full_tensor().float().flatten() for p in one._parameters])
    one.optim_step(AdamParams(learning_rate=1e-2), 40.0)
    moved = sum(bool((p.full_tensor() != 0).any()) for p in one._parameters)
    dist.destroy_process_group()
    return output, dtypes, gradient, moved


@pytest.mark.parametrize(
    ("master", "dtype"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_master_weights_and_what_computes(models, master, dtype):
    """Two ranks: gradients in bfloat16 are summed in float32, and stored in the dtype of the master weights."""
    options = {"trainer__master_dtype": master, "model__dtype": dtype}
    ranks = run_ranks(2, low_precision_step, models["qwen3"], options)
    expected = run_alone(low_precision_step, models["qwen3"], {})[2]
    for _, dtypes, gradient, moved in ranks:
        assert dtypes == ({getattr(torch, master)},) * 2
        assert moved
        assert gradient.isfinite().all()
    assert torch.equal(ranks[0][2], ranks[1][2])
    assert torch.nn.functional.cosine_similarity(ranks[0][2], expected, dim=0) > 0.9


def test_gradients_that_are_summed_in_bfloat16_are_close_and_travel_after_each_micro_batch(models):
    reduced = run_ranks(2, one_step, models["qwen3"], {"trainer__reduce_dtype": "bfloat16"})
    exact = run_alone(one_step, models["qwen3"], {"trainer__reduce_dtype": "bfloat16"})
    for name, expected in exact.gradient.items():
        distance = float((reduced[0].gradient[name] - expected).norm() / expected.norm())
        assert 1e-4 < distance < 2**-7, (name, distance)
        assert reduced[0].gradient[name].dtype == torch.float32
    whole = run_alone(one_step, models["qwen3"], {}).gradient
    assert_close_to_the_norm(exact.gradient, whole)  # alone nothing is summed over shards


def temperatures_of_all_verbs(rank, world_size, store, model, options):
    """What reaches the softmax in every verb and loss."""
    one, temperatures = make_shard(rank, world_size, store, model, options), []
    plain = SelectedLogprobs.apply
    batch = make_batch(LENGTHS, temperature=0.7)
    weights = {"target_tokens": batch.columns["target_tokens"], "weights": batch.columns["mask"]}
    supervised = TokenBatch(batch.tokens, batch.offsets, weights, batch.temperatures)
    SelectedLogprobs.apply = lambda *args: temperatures.append(args[3]) or plain(*args)
    try:
        one.forward(batch)
        one.forward_backward(batch, "ppo", {}, None)
        one.forward_backward(supervised, "cross_entropy", {}, None)
    finally:
        SelectedLogprobs.apply = plain
    dist.destroy_process_group()
    assert len(temperatures) >= 3
    for temperature in temperatures:
        assert temperature.dtype == torch.float32
        assert set(temperature.tolist()) == {float(np.float32(0.7))}


@pytest.mark.parametrize("options", [{}, {"trainer__packing": "packed"}, {"trainer__lora": {"rank": 2}}], ids=str)
def test_temperatures_are_float32_in_every_verb_and_loss(models, options):
    run_alone(temperatures_of_all_verbs, models["qwen3"], {"model__dtype": "bfloat16", **options})


@pytest.mark.parametrize(("tokens", "times"), [(10, 1), (11, 2)])
def test_only_passes_over_many_tokens_are_computed_again(tokens, times):
    passes = []

    def forward(hidden):
        passes.append(hidden.shape)
        return hidden.sin()

    hidden = torch.ones(1, tokens, 4, requires_grad=True)
    again = partial(checkpoint, use_reentrant=False)
    Sharding.spare_if_large(forward, again, 10, hidden).sum().backward()
    assert len(passes) == times
    assert torch.equal(hidden.grad, hidden.cos())


def test_gate_and_up_of_an_expert_share_a_bucket(shard, models):
    place = {e.name: e.bucket for e in shard(models["qwen3_moe"]).publish_weights(0).manifest.entries}
    for layer, expert in itertools.product(range(2), range(EXPERTS["num_experts"])):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        assert place[prefix + "gate_proj.weight"] == place[prefix + "up_proj.weight"]
