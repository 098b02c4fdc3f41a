"""Reinforcement learning in one file: a policy learns to sort digits, on the verbs of trainer and sampler alone.

    uv run python examples/rl_loop.py
    uv run python examples/rl_loop.py --run.name longer --max-steps 200 --trainer.shards 2 --inference.replicas 2

No environment classes and no orchestrator: the data, the rollouts and the advantages are all here, to be changed. It is
synchronous: each batch is sampled from the newest weights, while the trainer waits. `uv run rl` does the same faster,
with rollouts and training side by side. Options are those of `rl`, defaults in examples/sort.toml; docs/own-loop.md.
"""

import json
import random
import sys
from pathlib import Path

from transformers import AutoTokenizer

from trireme.api import (
    AdamParams,
    BadInput,
    Datum,
    ModelInput,
    SampledSequence,
    SamplingParams,
    loop_config,
    new_directory,
    open_rooms,
    scale_lr,
)

LEARNING_RATE, REFERENCE_BATCH = 2e-4, 16  # what suits 16 problems a step; for others it is scaled
SAVE_S = 600.0


def problem(step: int, number: int) -> str:
    """The digits of one problem: the same in every run."""
    chosen = random.Random(f"{step}/{number}")
    return "".join(chosen.choices("0123456789", k=chosen.randint(3, 8)))


def reward(digits: str, answer: str) -> float:
    """Half for the share of right places, half for an answer without a fault."""
    target = "".join(sorted(digits))
    right = sum(a == b for a, b in zip(answer, target, strict=False))
    return 0.5 * right / max(len(answer), len(target)) + 0.5 * (answer == target)


def to_datum(prompt: ModelInput, sampled: SampledSequence, advantage: float) -> Datum:
    """Inputs are all tokens but the last, targets all but the first. Only what was sampled is trained on, compared with
    the log-probabilities that it was sampled with."""
    tokens = prompt.to_ints() + sampled.tokens.tolist()
    observed, answered = prompt.length - 1, len(sampled.tokens)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "mask": [0.0] * observed + [1.0] * answered,
            "logprobs": [0.0] * observed + sampled.logprobs.tolist(),
            "advantages": [0.0] * observed + [advantage] * answered,
        },
    )


def main() -> None:
    config = loop_config(["@", "examples/sort.toml", *sys.argv[1:]])
    batch_size, group_size = config.orchestrator.batch_size, config.orchestrator.group_size
    out = new_directory(Path(config.run.output_dir, config.run.name or "rl-loop"))
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name)
    params = SamplingParams(max_tokens=config.inference.sampling.max_tokens)
    adam = AdamParams(learning_rate=scale_lr(LEARNING_RATE, batch_size, REFERENCE_BATCH), beta2=0.99)

    with open_rooms(config, out / "logs") as (trainer, sampler), (out / "metrics.jsonl").open("w") as metrics:
        weights = trainer.publish_weights(0)
        for step in range(config.max_steps):
            sampler.update_weights(weights)

            # All prompts are requested before the first answer, so that the replicas sample side by side.
            problems = [problem(step, number) for number in range(batch_size)]
            prompts = [ModelInput.from_ints(tokenizer.encode(f"Sort: {digits}\n")) for digits in problems]
            futures = [sampler.sample(prompt, group_size, params) for prompt in prompts]

            data: list[Datum] = []
            rewards: list[float] = []
            for digits, prompt, future in zip(problems, prompts, futures, strict=True):
                answers = future.result().sequences
                texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
                rewards_G = [reward(digits, text) for text in texts]
                mean = sum(rewards_G) / group_size
                data += [to_datum(prompt, answer, r - mean) for answer, r in zip(answers, rewards_G, strict=True)]
                rewards += rewards_G

            # Gradients are of sums; the update divides by the number of sampled tokens.
            output = trainer.forward_backward(data, "importance_sampling")
            num_tokens = output.metrics["loss_tokens:sum"]
            update = trainer.optim_step(adam, normalizer=num_tokens)
            weights = trainer.publish_weights(step + 1)

            row = {
                "step": step,
                "reward/total": sum(rewards) / len(rewards),
                "kl_sample_train_v2": output.metrics["kl_sample_train_v2:sum"] / num_tokens,
                **update.metrics,
            }
            print(json.dumps(row), file=metrics, flush=True)
            print(f"step {step + 1}/{config.max_steps}  reward {row['reward/total']:.3f}", flush=True)

        trainer.save_weights(out / "model", weights).wait(SAVE_S)  # opens with from_pretrained and with vLLM
        trainer.save_state(out / "state").wait(SAVE_S)  # to go on from: trainer.load_state(out / "state", [])
    print(f"the trained model is in {out / 'model'}")


if __name__ == "__main__":
    try:
        main()
    except BadInput as refused:
        sys.exit(str(refused))
