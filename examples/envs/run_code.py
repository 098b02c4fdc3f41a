"""Runs the program that a model writes in a session of examples/envs/code_service.py."""

import asyncio
import json
import urllib.request
import uuid
from functools import partial

from orchestrator.env import RLDataset
from orchestrator.message_env import MessageEnv, MessageEnvGroup, MessageStep

TASKS = {"the sum of the whole numbers from 1 to 100": "5050", "2 to the power of 20": "1048576"}


def call(method, url, text=""):
    request = urllib.request.Request(url, text.encode(), method=method)
    with urllib.request.urlopen(request, timeout=25) as answer:
        return json.load(answer)


class RunCode(MessageEnv):
    def __init__(self, service, goal, output):
        self.goal, self.output = goal, output
        self.url, self.start = f"{service}/{uuid.uuid4().hex}", None

    async def initial_messages(self):
        self.start = asyncio.create_task(asyncio.to_thread(call, "PUT", self.url))
        await asyncio.shield(self.start)
        return [{"role": "user", "content": f"Write a Python program that prints {self.goal}. Only the program."}]

    async def step(self, message):
        printed = await asyncio.to_thread(call, "POST", self.url, message["content"])
        right = float(printed.strip() == self.output)
        return MessageStep(right, True, metrics={"success": right}, logs={"printed": printed})

    async def close(self):
        if self.start:
            # Its thread continues when a rollout is cancelled, and would start a session later.
            await asyncio.wait([self.start])
            await asyncio.to_thread(call, "DELETE", self.url)


class Programs(RLDataset):
    def __init__(self, context, service="http://127.0.0.1:8700"):
        self.context, self.service = context, service

    def get_batch(self, index):
        make = [partial(RunCode, self.service, goal, output) for goal, output in TASKS.items()]
        return [MessageEnvGroup(m, self.context.renderer, self.context.group_size) for m in make]

    def __len__(self):
        return 1000
