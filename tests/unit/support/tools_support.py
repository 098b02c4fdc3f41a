"""Runs with checkpoints of real parts: a model in Hugging Face layout, an orchestrator's state, bytes for the
trainer."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from checkpoint_support import manifest
from transformers import AutoModelForCausalLM

from orchestrator.state import OrchestratorState
from trainer.export import companion_files, write_weights
from trireme.checkpoint.files import FileRecord, write_bytes
from trireme.checkpoint.manifest import CheckpointRef
from trireme.checkpoint.store import CheckpointStore, Head
from trireme.transports.packing import pack

BASE_MODEL = Path(__file__).parents[3] / "assets" / "sort-base"
TENSOR_FILE_BYTES = 400_000
"""The model's 1.2 MB come in several files."""


@cache
def base_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE_MODEL)


@cache
def companions() -> dict[str, bytes]:
    return companion_files(str(BASE_MODEL), base_model(), torch.float32)


def write_parts(draft: Path, scale: float) -> tuple[FileRecord, ...]:
    """All rooms' parts, as the rooms write them: the model's weights are those of the base model times `scale`."""
    weights = {name: p.detach() * scale for name, p in base_model().named_parameters()}
    entries, buckets = pack([[item] for item in weights.items()], np.copy)
    groups = [
        {"index": i, "problem": f"p{i}", "floor": 1, "finished": finished} for i, finished in enumerate([1, 1, 0])
    ]
    state = OrchestratorState({}, {"groups": groups}, {}, (), (), {}, {}, {}, {})
    return (
        write_bytes(draft / "trainer", "__0_0.distcp", b"\0" * 3000),
        *state.write(draft / "orchestrator"),
        *write_weights(draft / "inference", entries, buckets, companions(), file_bytes=TENSOR_FILE_BYTES),
    )


def make_run(root: Path, *steps: int) -> CheckpointStore:
    """A run with a checkpoint of each step; the weights of step s are those of the base model times s."""
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "logs" / "attempt_1").mkdir(parents=True)
    store = CheckpointStore(root)
    store.write_head(Head.new())
    for step in steps:
        checkpoint(store, step)
    return store


def checkpoint(store: CheckpointStore, step: int) -> Path:
    head = store.head()
    draft = store.draft(step, head.attempt)
    parent = CheckpointRef(head.lineage, step - 2) if step > 2 else None
    about = manifest(step, head.lineage, head.attempt, parent)
    return store.publish(draft, replace(about, files=write_parts(draft, scale=float(step))))
