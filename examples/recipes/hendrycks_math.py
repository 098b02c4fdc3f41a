r"""The reward of MATH: what the last \boxed{} of an answer holds equals that of the data's solution.

env.id = "reward:examples/recipes/hendrycks_math.py:correct", for the data's own columns `problem` and `solution`

math-verify compares them, for which 1/2 is 0.5. Qwen3 puts results into \boxed{} without being asked to. Where a model
does not, give prompts that ask for it: a column of messages.
"""

import re

from math_verify import parse, verify

BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def boxed(text):
    r"""Returns what the last \boxed{...} of a text holds, or None. Some solutions write \fbox{2} or `\boxed 2$`."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index].strip()
    return None


def correct(completion, solution, finished):
    """Returns 1.0 for a right answer that ended by itself, and 0.0 for any other one."""
    target = boxed(solution)
    answer = boxed(completion)
    if not finished or answer is None:
        return 0.0
    if answer == target:
        return 1.0
    gold = parse(f"${target}$", parsing_timeout=None)  # the run's own time limit ends both (env.args.limit_s)
    return float(verify(gold, parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None))
