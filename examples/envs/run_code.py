"""Runs the program that a model writes, with limits, without a network and without the files of the run.

PYTHONPATH=examples/envs uv run rl --env.id run_code:Programs --model.name Qwen/Qwen3-0.6B ...

user       Write a Python program that prints the sum of the whole numbers from 1 to 100. Only the program.
assistant  print(sum(range(101)))                                                                        reward 1
"""

from functools import partial

from orchestrator.env import RLDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep
from trireme.api import CodeLimits, run_code

TASKS = {"the sum of the whole numbers from 1 to 100": "5050", "2 to the power of 20": "1048576"}


class RunCode(MessageEnv):
    def __init__(self, goal, output, limits):
        self.goal, self.output, self.limits = goal, output, limits

    async def initial_messages(self):
        return [{"role": "user", "content": f"Write a Python program that prints {self.goal}. Only the program."}]

    async def step(self, message):
        result = await run_code(message["content"], limits=self.limits)
        right = float(result.exit_code == 0 and result.output.strip() == self.output)
        metrics = {"success": right, "over_a_limit": float(result.limit is not None)}
        logs = {"printed": result.output, "errors": result.errors, "limit": result.limit}
        return MessageStep(right, True, metrics=metrics, logs=logs)


class Programs(RLDataset):
    """`limit_processes = false` lets programs run where the machine cannot limit their number of processes."""

    def __init__(self, context, limit_s=10.0, limit_processes=True):
        self.context = context
        self.limits = CodeLimits(wall_s=limit_s, limit_processes=limit_processes)

    def get_batch(self, index):
        make = [partial(RunCode, goal, output, self.limits) for goal, output in TASKS.items()]
        return [MessageEnvGroup(m, self.context.renderer, self.context.group_size) for m in make]

    def __len__(self):
        return 1000
