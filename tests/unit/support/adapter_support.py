"""A run whose one checkpoint holds LoRA adapters, and the model that they belong to."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from checkpoint_support import manifest
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from tools_support import BASE_MODEL, make_run, write_parts
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.export import companion_files, write_weights
from trainer.lora import adapter_files, peft_config
from trireme.checkpoint.store import CheckpointStore
from trireme.config.trainer import LoraConfig
from trireme.core.base_digest import base_digest
from trireme.core.weights import Adapter
from trireme.transports.packing import pack

LORA = LoraConfig(rank=8, alpha=12)
PROMPT = torch.tensor([[3, 5, 2, 7, 1, 4]])


def make_base(path: Path) -> Path:
    """A copy of the base, in several files, that may be spoilt."""
    AutoModelForCausalLM.from_pretrained(BASE_MODEL).save_pretrained(path, max_shard_size="400KB")
    AutoTokenizer.from_pretrained(BASE_MODEL).save_pretrained(path)
    return path


def make_adapter_run(root: Path, base: Path) -> CheckpointStore:
    """A run with one checkpoint, of step 2, whose adapters are random."""
    store = make_run(root)
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft_config(LORA))
    tensors = {name: torch.randn_like(t) / 20 for name, t in get_peft_model_state_dict(adapted).items()}
    entries, buckets = pack([[item] for item in tensors.items()], np.copy)
    head = store.head()
    draft = store.draft(2, head.attempt)
    about = Adapter(base_digest(str(base)), 8, LORA.alpha)
    companions = {**companion_files(str(base)), **adapter_files(LORA, about, str(base))}
    files = [record for record in write_parts(draft, 1.0) if not record.path.startswith("inference/")]
    shutil.rmtree(draft / "inference")
    files += write_weights(draft / "inference", entries, buckets, companions, adapter=True)
    store.publish(draft, replace(manifest(2, head.lineage, head.attempt, None), files=tuple(files)))
    return store


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def adapted_model(directory: Path, base: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
