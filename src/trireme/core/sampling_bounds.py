"""The bounds on sampling in a request, for the service, the configuration and `SamplingParams`.

The bounds lie within vLLM 0.32's, which refuses anything beyond its own; a test walks the fields of vLLM's
`SamplingParams` and compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field


@dataclass(frozen=True)
class Bound:
    """The least and the largest value that a number in a request may have."""

    least: float
    largest: float
    above: bool = False
    """True: a value must be larger than the least one; False: it may be equal."""

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.largest

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.least:g}, at most {self.largest:g}"

    @property
    def field(self) -> object:
        """The bound as a pydantic `Field`, for use in `Annotated`."""
        if self.above:
            return Field(gt=self.least, le=self.largest)
        return Field(ge=self.least, le=self.largest)


BOUNDS: Mapping[str, Bound] = {
    "temperature": Bound(0, 2),
    "top_p": Bound(0, 1, above=True),
    "top_k": Bound(-1, 10**9),
    "min_p": Bound(0, 1),
    # Logits are divided by it: at 1e-40 they are infinite in float32, and log-probabilities NaN.
    "repetition_penalty": Bound(0.01, 100),
}
"""The bounds of the numbers of `SamplingParams` that change the distribution."""
MOST_ANSWERS = 128
MOST_SAMPLES = 1024
"""The most answers to one prompt: MOST_ANSWERS in a request by OpenAI's or Anthropic's clients, MOST_SAMPLES in a
request by Tinker's. Each answer is a request of its own for vLLM."""
MOST_PROMPT_LOGPROBS = 20
"""The most tokens, of the likeliest ones, that a request may get for each place of a prompt: the default of vLLM's
`max_logprobs`."""
MOST_STOPS = 64
LONGEST_STOP = 256
MOST_STOP_IDS = 1024
"""The most stop strings of a request, the most characters of each string, and the most stop token ids. A replica
searches the text of each new token for all stop strings."""
