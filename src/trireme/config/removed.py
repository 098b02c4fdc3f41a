"""Keys of the configuration and commands that no longer exist, and their replacements."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.core.refusals import Refusal

REMOVED: dict[str, str] = {
    "trireme distill": "run `python examples/recipes/distill.py` with the same options, a recipe of docs/supervised.md",
    "trireme launch": "edit scripts/slurm.sbatch or scripts/rayjob.yaml, which start a run on Slurm and on KubeRay",
    "trireme sweep --knob": "give the key of the horizontal axis in the first --grid",
    "orchestrator.groups_per_batch": "set orchestrator.batch_size",
    "orchestrator.rollouts_per_example": "set orchestrator.group_size",
    "orchestrator.max_requeues": "leave it out: orchestrator.stale_policy = wait, the default, samples nothing again",
    "inference.max_model_len": "set model.max_seq_len, the longest sequence in the trainer and in the replicas",
    "inference.max_updating": "leave it out: all replicas take new weights at the same time, while they sample",
    "inference.spare": "leave it out: a new process succeeds a replica whose actor is lost",
    "cluster.model_cache": "give model.name as an id of the hub, which each node fetches, or as a path that all have",
    "model.attn": "leave it out: the trainer takes sdpa, or eager attention for a model that has no other",
    "trainer.micro_batch_size": "set trainer.micro_batch_tokens, the tokens that a shard computes at the same time",
    "trainer.reference_batch_size": "scale trainer.learning_rate itself, by the root of the ratio of the batch sizes",
    "trainer.kl.kl_penalty_coef": "set trainer.kl.coef",
    "trainer.kl.kl_discount_factor": "set trainer.kl.discount",
    "trainer.lora.lora_rank": "set trainer.lora.rank",
    "trainer.lora.lora_alpha": "set trainer.lora.alpha",
    "trainer.lora.lora_dropout": "set trainer.lora.dropout",
    "trainer.lora.lora_target_modules": "set trainer.lora.targets",
    "trainer_gpus": "set trainer.shards",
    "inference_gpus": "set inference.replicas",
    "trainer.lora.together": "leave it out: adapters take turns in the trainer, each computes what it would alone",
    "eval.replicas": "leave it out: all replicas evaluate, and the next update waits; fewer eval.problems shorten that",
    "renderer.compact_every": "leave it out, or set renderer.strip_thinking_from_history = false: thinking then stays",
    "trireme report --steps": "leave it out for the newest 50 steps; `--trace FILE` writes all, for ui.perfetto.dev",
    "trireme watch --plain": "leave it out: `trireme watch RUN` prints where the run stands, without a terminal too",
}
"""The replacement of a removed key (`section.key`, or a whole `section`), command (`trireme foo`) or option of a
command (`trireme foo --bar`)."""


def removed_key(path: Sequence[str], shown: str) -> Refusal | None:
    """Returns the refusal of a key that was removed, alone or with its section; None if the key was not removed.

    `path`: the parts of the key, without the number of an entry. `shown`: the key and its place, for a person.
    """
    names = (".".join(path[:end]) for end in range(len(path), 0, -1))
    advice = next((REMOVED[name] for name in names if name in REMOVED), None)
    if advice:
        return Refusal(shown, "a key that exists; this one was removed", advice)
    return None


def refuse_removed_command(argv: Sequence[str]) -> None:
    """Raises BadInput if `argv`, the arguments of `trireme`, begins with a removed command, or has an option that was
    removed from its command."""
    command = " ".join(["trireme", *argv[:1]])
    options = [f"{command} {word.partition('=')[0]}" for word in argv[1:]]
    for name in [command, *options]:
        if name in REMOVED:
            kind = "an option" if name in options else "a command"
            raise Refusal(f"`{name}`", f"{kind} that exists; this one was removed", REMOVED[name])
