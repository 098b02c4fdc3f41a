"""Compares the tensors in a model's files with the tensors that the model's class saves.

If the files lack a tensor, the model opens with initial values for it, and at most logs this. So the trainer, exports
and evaluations compare names and shapes before they use the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trireme.core.base_digest import stored_shapes
from trireme.core.refusals import Refusal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

NAMED = 3
"""The most tensors that an error names for each kind of fault."""


@dataclass(frozen=True)
class Differences:
    """The differences between the tensors in a model's files and the tensors that the model's class saves. Each tensor
    has the name under which the class saves it."""

    lacking: Sequence[str]
    """Tensors that the class saves but the files lack."""
    reshaped: Sequence[str]
    """Tensors that the files have in another shape."""


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns {name: buffer} of the buffers that `module` saves with its parameters."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns {name: tensor} of the module's parameters and persistent buffers; tied tensors appear once."""
    return {**dict(module.named_parameters()), **persistent_buffers(module)}


def differences(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> Differences:
    """Returns the differences between the tensors that `model` saves and `stored`, {name: shape} of the tensors in its
    files.

    If tensors are tied to each other, it is enough that the files have one of them. Names in the files may lack the
    prefix of the base model. Tensors in the files that the class leaves out knowingly, such as layers for speculative
    decoding, are not compared.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    def published(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, empty).items()}

    def short(name: str) -> str:
        return name.removeprefix(f"{model.base_model_prefix}.")

    stored_by_name = {short(name): shape for name, shape in stored.items()}
    tied: dict[int, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), {})[name] = parameter
    for group in tied.values():
        if len(group) > 1:
            aliases = {short(name): shape for name, shape in published(group).items()}
        else:
            aliases = {}
        if aliases.keys() & stored_by_name.keys():
            stored_by_name |= aliases
    shapes = published(saved_tensors(model))
    return Differences(
        lacking=[name for name in shapes if short(name) not in stored_by_name],
        reshaped=[name for name, shape in shapes.items() if stored_by_name.get(short(name), shape) != shape],
    )


def refuse_kinds(label: str, model: PreTrainedModel, kinds: Mapping[str, Collection[str]], advice: str) -> None:
    """Raises BadInput if any tensor of a model has a fault. `kinds` maps each kind of fault, as a verb phrase for the
    message (such as "lacks"), to the names of the tensors with this fault. The error begins with `label`, which names
    the model, then names the class of `model` and the tensors, and ends with `advice`, which says what to do."""
    wrong = [f"{kind} {len(names)}: {', '.join(sorted(names)[:NAMED])}" for kind, names in kinds.items() if names]
    if wrong:
        raise Refusal(
            f"{label}, whose files do not match the tensors of its class {type(model).__name__}: "
            f"it {'; it '.join(wrong)}",
            "the names and shapes of the class's tensors; a missing tensor would keep its initial values",
            advice,
        )


def refuse_other_tensors(name: str, label: str, advice: str) -> None:
    """Raises BadInput unless the files of the model `name` (a directory or a name on the hub) have the tensors of the
    model's class, by name and shape. Accepts a model without safetensors files. The error begins with `label` and ends
    with `advice`, which says what to do."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = stored_shapes(name)
    if stored is None:
        return
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    difference = differences(model, stored)
    refuse_kinds(label, model, {"lacks": difference.lacking, "has in another shape": difference.reshaped}, advice)
