"""A chat of several turns: the model must find a number, and gets a hint after each wrong guess."""

import random

from orchestrator.message_env import MessageEnv, MessageStep


class HigherLower(MessageEnv):
    def __init__(self, secret):
        self.secret, self.turns = secret, 0

    @staticmethod
    def problems(split, seed):
        rng = random.Random(f"{seed}/{split}")
        return [rng.randint(1, 20) for _ in range(1000)]

    async def initial_messages(self):
        return [{"role": "user", "content": "Guess my number, from 1 to 20. Answer with digits."}]

    async def step(self, message):
        self.turns += 1
        guess = message["content"].strip()
        if guess == str(self.secret):
            return MessageStep(reward=1 / self.turns, episode_done=True)
        if self.turns == 5 or guess not in map(str, range(1, 21)):
            return MessageStep(reward=0.0, episode_done=True, logs={"secret": self.secret, "guess": guess})
        hint = "Higher." if int(guess) < self.secret else "Lower."
        return MessageStep(reward=0.0, episode_done=False, next_messages=[{"role": "user", "content": hint}])
