"""Merges a LoRA adapter into its base, file after file: the weight W of each layer with an adapter becomes W + (alpha /
rank) B A."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trireme.core.base_digest import INDEX, base_digest, weight_files
from trireme.core.errors import CheckpointInvalid
from trireme.core.refusals import Refusal

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
OF_THE_BASE = ("config.json", "generation_config.json", INDEX)
"""Files that a merged model takes from its base."""


def merged_files(
    read: Mapping[str, Callable[[], bytes]], on_file: Callable[[str], None], *, exact: bool
) -> Iterator[tuple[str, bytes]]:
    """Yields (name, contents) of each file of the merged model. `exact`: True yields merged weights in float32, False
    in the dtype of the base.

    `read`: {name of a file in the adapter's directory: a function that returns its contents}; `on_file`: called with
    the path of each weight file of the base. Raises BadInput if the base has moved or changed, CheckpointInvalid if the
    adapter has tensors for layers that the base lacks.
    """
    from safetensors.torch import load, save

    trained_on = json.loads(read[BASE]())
    base = str(trained_on["name"])
    is_gone = Path(base).is_absolute() and not Path(base).is_dir()
    digest = None if is_gone else base_digest(base)
    if digest != trained_on["digest"]:
        if is_gone:
            problem = "is no directory here"
        else:
            problem = f"now has weights with digest {digest}"
        raise Refusal(
            f"an adapter of {base}, which {problem}",
            f"the weights that it was trained on, with digest {trained_on['digest']}",
            "restore those weights, or export the adapter without --merge",
        )
    about = json.loads(read[ADAPTER]())
    adapter = {name.removeprefix("base_model.model."): t for name, t in load(read[ADAPTER_WEIGHTS]()).items()}
    scale = about["lora_alpha"] / about["r"]
    yield from ((name, get()) for name, get in read.items() if name not in (ADAPTER, ADAPTER_WEIGHTS, BASE))
    files = weight_files(base)
    beside = files[0].parent
    yield from ((name, (beside / name).read_bytes()) for name in OF_THE_BASE if (beside / name).is_file())
    for file in files:
        on_file(str(file))
        weights = load(file.read_bytes())
        for name, weight in weights.items():
            layer = name.removesuffix(".weight")
            a, b = (adapter.pop(f"{layer}.lora_{which}.weight", None) for which in "AB")
            if a is not None and b is not None:
                merged = weight.float() + scale * (b.float() @ a.float())
                weights[name] = merged if exact else merged.to(weight.dtype)
        yield file.name, save(weights, metadata={"format": "pt"})
    if adapter:
        raise CheckpointInvalid(f"{ADAPTER_WEIGHTS} has tensors for layers that {base} has not: {sorted(adapter)[:2]}")
