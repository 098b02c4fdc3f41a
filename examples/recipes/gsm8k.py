"""The reward of GSM8K: the last number of an answer is the one behind #### in the data.

env.id = "reward:examples/recipes/gsm8k.py:correct", for the data's own columns `question` and `answer`
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text):
    """Returns the last number of a text, or None. Commas of thousands do not count."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    return float(numbers[-1].replace(",", ""))


def correct(completion, answer, finished):
    """Returns 1.0 for a right answer that ended by itself, and 0.0 for any other one."""
    number = last_number(completion)
    return float(finished and number is not None and number == last_number(answer))
