"""Tiny twins of models: the same architecture with the same switches, a few narrow layers and a small vocabulary.

What a test shows of the twin's names, shapes and reloading holds for the model, at a thousandth of the cost. Switches
(flags, scales, soft caps, names of functions, kinds of layers) do not change; only sizes shrink. A size is recognised
by its key in the configuration (`SIZES`), and a layer's kind by what the configuration lists for the layer, so that one
layer of each kind stays. `EXCEPTIONS` has the sizes of architectures that cannot be built in this way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trireme.core.errors import BadInput

VOCABULARY = 128
"""Largest vocabulary of a twin. Token ids beyond it, such as image tokens, become the last ids of the twin."""
NOISE = 0.1
"""Standard deviation of the noise on every initial value, so that no two tensors are alike, none is zero, and logits
spread."""

Size = Callable[[int, Mapping[str, Any]], int]
"""Takes a size of the model, and the section of the model's configuration that has it. Returns the twin's size."""


def _at_most(limit: int) -> Size:
    return lambda value, _: min(value, limit)


def _key_heads(value: int, section: Mapping[str, object]) -> int:
    """Returns the twin's number of key heads. `value`: the model's number of key heads. If the model has as many query
    heads as key heads, so has the twin, which has at most 4 query heads; otherwise returns min(value, 2)."""
    heads = {
        size for key, size in section.items() if re.fullmatch(r"(num_attention_|n_|swa_num_attention_)heads?", key)
    }
    return min(value, 4 if value in heads else 2)


def _width(value: int, section: Mapping[str, Any]) -> int:
    """Returns a width of the twin. `value`: the same width in the model. Returns 64 if `value` is the model's hidden
    size, min(value, 96) if it is larger than the hidden size, and min(value, 48) if it is smaller. If `section` has no
    hidden size, returns 64."""
    hidden = next((section[key] for key in HIDDEN if isinstance(section.get(key), int)), value)
    if value == hidden:
        return 64
    return min(value, 96 if value > hidden else 48)


HIDDEN = ("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim")
SIZES: tuple[tuple[str, Size], ...] = (
    # With few keys to choose from, rounding would decide between keys whose scores are the same.
    (r"index_topk.*", lambda value, _: value),
    (r"type_vocab_size|.*position.*|.*_theta|.*(image|patch)_size|.*kernel.*", lambda value, _: value),
    (r".*vocab(_size.*)?|num_embeddings", _at_most(VOCABULARY)),
    (r"qk_head_dim", _at_most(32)),
    (r"rotary_dim", _at_most(8)),
    (r"mamba_(d_head|head_?dim)", lambda *_: 16),  # with the heads below twice the hidden size
    (r".*(head_?dim|d_head|dim_head|kv_channels|head_size)", _at_most(16)),
    (r".*(key_value|kv)_heads.*|.*query_groups", _key_heads),
    (r"linear_num_key_heads", _at_most(2)),
    (r".*mamba.*heads?", _at_most(8)),
    (r".*heads?(_per_layer)?", _at_most(4)),
    (r".*rank", _at_most(8)),
    (r".*(per_tok(en)?|top_?k|moe_k)|.*shared_experts|n_groups?", _at_most(2)),
    (r".*(experts|expert_num)", _at_most(4)),
    (r"topk_group", _at_most(1)),
    (r".*(window|window_size|attention_chunk_size)", _at_most(8)),
    (r".*(chunk_size|state_size|d_state)", _at_most(16)),
    (r"mamba_d_ssm", _at_most(128)),
    (r".*(hidden_size.*|intermediate_size.*|d_model|n_embd|.*_dim|dff|d_inner|ffn_.*size|n_inner|lru_width)", _width),
)
"""(pattern, size): the first pattern that matches the whole key of a value decides its size in the twin. A value whose
key no pattern matches does not change."""

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
BEFORE = r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index"
"""Matches keys whose value is the number of first layers that differ from later layers."""
PERIODS = r".*(period|interval|every_n_layers|sliding_window_pattern|sparse_step|moe_layer_step)"
SHARED = "num_kv_shared_layers"
PER_LAYER = "per_layer_config"
"""Two keys of a configuration. SHARED says how many last layers take the attention keys of earlier layers; PER_LAYER
has the sizes in which single layers differ from the common sizes.
"""
MOST_LAYERS = 8

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8}
    | {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
}
"""{model type: {key: value}} for sizes that depend on each other in a way that their keys do not show."""


def twin_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration of the twin; does not change `config`. Raises BadInput if the twin's sizes do not fit
    together."""
    small = _shrink(config.to_dict())
    try:
        return type(config).from_dict(small)
    except Exception as error:  # each configuration has checks of its own
        raise _no_twin(config, error) from error


def make_twin(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Builds the twin of the causal language model that `config` describes: float32, on the CPU, in evaluation mode,
    every parameter and persistent buffer with values of its own. Raises BadInput if it cannot be built."""
    small = twin_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, trust_remote_code=False
            )
        except Exception as error:  # each architecture fails in its own way
            raise _no_twin(config, error) from error
        saved = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in saved.values()}.values():
                if tensor.is_floating_point():
                    tensor.add_(NOISE * torch.randn_like(tensor))
    return model.eval()


def _no_twin(config: PretrainedConfig, error: Exception) -> BadInput:
    return BadInput(f"no small model of the kind {config.model_type} can be built ({type(error).__name__}: {error})")


def _shrink(section: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a section of a model's configuration with small sizes, also in the sections within it."""
    few = section
    for depth in DEPTHS:
        if type(section.get(depth)) is int:
            few = _shrink_layers(few, depth, section[depth])
    small = {key: _shrink_value(key, value, section) for key, value in few.items()}
    small |= _token_ids(section, small)
    return small | EXCEPTIONS.get(section.get("model_type", ""), {})


def _shrink_value(key: str, value: Any, section: Mapping[str, Any]) -> Any:
    if key == PER_LAYER:
        return value  # `_shrink_layers` has done it
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return _shrink(value)
        return value
    if isinstance(value, list | tuple) and not re.search("layer|idxs", key):
        return [_shrink_value(key, v, section) for v in value]
    if type(value) is not int or value <= 1:
        return value
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), None)
    if size is None:
        return value
    return size(value, section)


def _token_ids(section: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the token ids, such as `eos_token_id`, of a section of a model's configuration. An id beyond the
    vocabulary of `small`, the same section of the small model, becomes an id at the end of that vocabulary. Different
    ids stay different."""
    vocabulary = small.get("vocab_size", VOCABULARY)
    ids = {key: value for key, value in section.items() if re.fullmatch(r".*(token_id|token_index)", key)}
    flat = [v for value in ids.values() for v in (value if isinstance(value, list) else [value])]
    beyond = sorted({v for v in flat if type(v) is int and v >= vocabulary})
    places = {v: vocabulary - 1 - number for number, v in enumerate(beyond)}
    return {k: [places.get(i, i) for i in v] if isinstance(v, list) else places.get(v, v) for k, v in ids.items()}


def _shrink_layers(section: dict[str, Any], depth: str, count: int) -> dict[str, Any]:
    """Returns a section of a model's configuration, reduced to at most MOST_LAYERS layers: the first layer of each
    kind, and the last layer. If a key gives a period of layers, the first four layers are kept too, and the period
    becomes 2. Lists with an entry for each layer keep the entries of these layers. `depth`: the key that holds the
    number of layers. `count`: its present value."""
    if count <= 2:
        return section
    kinds = [_kind(section, layer, count) for layer in range(count)]
    periods = {key: min(v, 2) for key, v in section.items() if re.fullmatch(PERIODS, key) and type(v) is int and v > 1}
    first = sorted({kinds.index(kind) for kind in kinds} | (set(range(min(4, count))) if periods else {0}))
    layers = sorted({*first[: MOST_LAYERS - 1], count - 1})
    few = section | {depth: len(layers)}
    for key, value in section.items():
        if isinstance(value, list) and len(value) == count:
            few[key] = [value[layer] for layer in layers]
        elif _lists_layers(key, value, count):
            few[key] = [number for number, layer in enumerate(layers) if layer in value]
        elif re.fullmatch(BEFORE, key) and type(value) is int:
            few[key] = sum(layer < value for layer in layers)
        elif key == SHARED:
            few[key] = sum(layer >= count - value for layer in layers)
        elif key == PER_LAYER and value:
            few[key] = {
                str(n): _other_sizes(value[k], section) for n, at in enumerate(layers) for k in value if int(k) == at
            }
        elif key.endswith("_layer_offset"):
            few[key] = value % 2  # of a period that is now 2
    return few | periods


def _other_sizes(single: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the twin's values for `single`, the sizes of one layer that differ from the common sizes in `section`. A
    size that is larger than the common size is doubled after it is shrunk, so that it differs in the twin too."""
    small = {key: _shrink_value(key, value, section) for key, value in single.items()}
    larger = {k for k, v in single.items() if type(v) is int and type(section.get(k)) is int and v > section[k]}
    return {key: 2 * value if key in larger else value for key, value in small.items()}


def _kind(section: Mapping[str, Any], layer: int, count: int) -> str:
    """Returns, as text, everything that a section of a model's configuration says about one particular layer. Layers of
    one kind have equal texts. `layer`: the number of the layer; `count`: the number of layers."""
    parts: list[Any] = []
    for key, value in section.items():
        if isinstance(value, list) and len(value) == count:
            parts.append(value[layer])
        elif _lists_layers(key, value, count):
            parts.append(layer in value)
        elif re.fullmatch(BEFORE, key) and type(value) is int:
            parts.append(layer < value)
        elif key == SHARED:
            parts.append(layer >= count - value)
        elif key == PER_LAYER and value:
            parts.append([v for k, v in value.items() if int(k) == layer])
    return repr(parts)


def _lists_layers(key: str, value: object, count: int) -> bool:
    """Returns True if `value` is a list of layer numbers: all are below `count`, and `key` names layers or indices."""
    numbers = isinstance(value, list) and all(type(v) is int and v < count for v in value)
    return numbers and re.search("layer|idxs", key) is not None
