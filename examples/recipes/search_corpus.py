"""Makes a corpus of documents about companies, people and towns that do not exist, and questions on them.

    python examples/recipes/search_corpus.py DIRECTORY [--companies 1000] [--seed 0]

Writes corpus.jsonl, train.jsonl and eval.jsonl, which asks about an eighth of the companies. No model knows the
answers: they have to be searched for, some of them in three steps.
"""

import argparse
import json
import random
from pathlib import Path

SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
HELD_OUT_EVERY = 8
QUESTIONS = (
    ("Who founded the company {company}?", "person"),
    ("In which town was the founder of the company {company} born?", "town"),
    ("On which river lies the town in which the founder of the company {company} was born?", "river"),
)


def names(rng, count, syllables):
    """Returns that many different names."""
    drawn = {}
    while len(drawn) < count:
        drawn["".join(rng.choices(SYLLABLES, k=syllables)).capitalize()] = None
    return list(drawn)


def write(file, rows):
    """Writes a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(directory, companies, seed):
    """Writes the corpus and its questions."""
    rng = random.Random(seed)
    rivers = names(rng, max(2, companies // 20), 2)
    towns = {town: rng.choice(rivers) for town in names(rng, max(2, companies // 4), 3)}
    first_names = names(rng, 100, 2)
    people = {f"{rng.choice(first_names)} {family}": rng.choice(list(towns)) for family in names(rng, companies, 3)}
    documents = [{"title": town, "text": f"{town} is a town on the river {river}."} for town, river in towns.items()]
    questions = {"train": [], "eval": []}
    for number, (company, (person, town)) in enumerate(zip(names(rng, companies, 4), people.items(), strict=True)):
        year = rng.randrange(1850, 2000)
        documents.append({"title": person, "text": f"{person} was born in {town}, and became known as a founder."})
        documents.append({"title": company, "text": f"{company} is a company that {person} founded in {year}."})
        facts = {"person": person, "town": town, "river": towns[town]}
        split = "eval" if number % HELD_OUT_EVERY == 0 else "train"
        questions[split] += [
            {"question": question.format(company=company), "answer": facts[wanted]} for question, wanted in QUESTIONS
        ]
    rng.shuffle(documents)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "corpus.jsonl", documents)
    for split, rows in questions.items():
        write(directory / f"{split}.jsonl", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--companies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.directory, options.companies, options.seed)
