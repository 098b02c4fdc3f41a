"""An agent that searches a corpus before it answers, which a run trains. Only `run` in it knows of training.

env.id = "agent:search_agent:play" with env.path = "examples/recipes" and env.args.corpus, a directory that
examples/recipes/search_corpus.py has written
"""

import json
import math
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from openai import AsyncOpenAI

TURNS = 6
SHOWN = 3
"""Documents that a search returns."""
INSTRUCTION = "Search until you know the answer. Then answer with the name alone."
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"name": "search", "description": "Returns the documents that have most of these words.", "parameters": QUERY}


def rows(file):
    """Returns the values of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def words(text):
    """Returns the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


class Index:
    """Documents by their words. A rare word counts more."""

    def __init__(self, texts):
        self.texts = texts
        self.places = defaultdict(set)
        for place, text in enumerate(texts):
            for word in words(text):
                self.places[word].add(place)

    def search(self, query):
        """Returns the best documents, one in each line."""
        scores = Counter()
        for word in set(words(query)):
            places = self.places.get(word, ())
            for place in places:
                scores[place] += math.log(1 + len(self.texts) / len(places))
        best = sorted(scores, key=lambda place: (-scores[place], place))[:SHOWN]
        return "\n".join(self.texts[place] for place in best) or "nothing was found"


@cache
def index(corpus):
    """Returns the index of a corpus, which all rollouts share."""
    return Index([row["text"] for row in rows(Path(corpus, "corpus.jsonl"))])


@cache
def shared():
    """Returns a client whose connections all rollouts share."""
    return AsyncOpenAI(api_key="each rollout has its own")


def problems(split, seed, corpus):
    """Returns the questions of a corpus, and where it is."""
    index(corpus)
    return [{**row, "corpus": corpus} for row in rows(Path(corpus, f"{split}.jsonl"))]


def answer_to(call, corpus):
    """Returns the answer to a call of the tool; a wrong call is answered by its error."""
    try:
        return index(corpus).search(json.loads(call.function.arguments)["query"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"error: {error!r}; expected an argument `query`, a text"


async def play(run):
    """Answers one question in at most TURNS turns. Returns 1 for the right name, else 0, and the number of searches."""
    client = shared().with_options(base_url=run.base_url, api_key=run.api_key)
    messages = [{"role": "user", "content": f"{run.problem['question']} {INSTRUCTION}"}]
    tools = [{"type": "function", "function": TOOL}]
    searches = 0
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model=run.model, messages=messages, tools=tools)
        choice = answer.choices[0]
        text = choice.message.content or ""
        if not choice.message.tool_calls:
            right = float(choice.finish_reason == "stop" and words(text) == words(run.problem["answer"]))
            return right, {"searches": searches, "success": right}
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            searches += 1
            documents = answer_to(call, run.problem["corpus"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": documents})
    return 0.0, {"searches": searches, "success": 0.0}
