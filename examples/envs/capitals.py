"""A taskset of the package verifiers: `--env.id verifiers:capitals`."""

import verifiers.v1 as vf

__all__ = ["Capitals"]


class City(vf.TaskData):
    answer: str


class Named(vf.Task[City]):
    @vf.reward(weight=0.9)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(trace.num_output_tokens < 20)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Capitals(vf.Taskset[Named]):
    def load(self):
        for country, city in {"France": "Paris", "Chile": "Santiago", "Kenya": "Nairobi"}.items():
            yield Named(City(prompt=f"What is the capital of {country}?", answer=city), self.config.task)
