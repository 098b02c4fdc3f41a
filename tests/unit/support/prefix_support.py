"""Batches with common prefixes, and checks of what a shard computes for them."""

import math

import numpy as np
import torch
from trainer_support import VOCAB

from trireme.core.types import Datum, ModelInput, TokenBatch


def datum(rng, tokens, temperature):
    n = len(tokens)
    mask = (rng.random(n) < 0.4).astype(np.float32)
    columns = {
        "target_tokens": rng.integers(0, VOCAB, n),  # they need not be the next tokens
        "mask": mask,
        "logprobs": -4 - rng.random(n),
        "advantages": rng.normal(size=n) * mask,
    }
    return Datum(ModelInput(np.asarray(tokens, np.int32)), columns, temperature)


def make_forest(seed=0):
    """Returns a batch with a tree of depth 4, a datum that is another's prefix, equal datums, an empty answer, two
    temperatures, a sequence that shares nothing, and a datum whose tokens do not count."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, VOCAB, 20).tolist()
    sequences = [stem + rng.integers(0, VOCAB, n).tolist() for n in (9, 4, 0, 7)]
    sequences += [sequences[0][:26] + rng.integers(0, VOCAB, n).tolist() for n in (6, 3)]
    sequences += [[*sequences[4][:30], 7, 8], sequences[4], sequences[4][:28]]
    sequences += [rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 1).tolist()]
    data = [datum(rng, tokens, (0.7, 1.0)[d % 3 == 0]) for d, tokens in enumerate(sequences)]
    data[3].loss_fn_inputs["mask"].data[:] = 0
    data[3].loss_fn_inputs["advantages"].data[:] = 0
    order = rng.permutation(len(data))
    return TokenBatch.from_datums([data[d] for d in order])


@torch.no_grad()
def fill(one, seed):
    """Gives the parameters of a shard values that are none of a beginning, where an adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in one._parameters:
        local = parameter.to_local()
        local.copy_(torch.randn(local.shape, generator=generator) * 0.1)


def margin_of_experts(one, batch):
    """Returns by how much, at least, the logit of the last chosen expert exceeds that of the next one, over all tokens
    and layers; infinite for a model without experts."""
    margins = [math.inf]

    def note(router, _, outputs):
        logits = outputs[0].topk(router.top_k + 1).values
        margins.append(float((logits[:, -2] - logits[:, -1]).min()))

    routers = [module for module in one._model.modules() if hasattr(module, "top_k")]
    hooks = [router.register_forward_hook(note) for router in routers]
    one.forward(batch)
    for hook in hooks:
        hook.remove()
    return min(margins)


def gradients_of(one):
    gradients = [parameter.grad.to_local().clone() for parameter in one._parameters]
    one.drop_gradients()
    return gradients


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def check_same_gradients(shared, flat):
    differences = [a - b for a, b in zip(shared, flat, strict=True)]
    assert norm_of(differences) <= 1e-5 * norm_of(flat)
    assert norm_of(flat) > 0
