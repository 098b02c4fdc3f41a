"""The fenced samples of README and docs.

A fence that is not run has `<!-- not run here: REASON -->` on the line before it; only what needs GPUs or an account
may have that. One without a language is a picture or a listing. A sample whose first line is `# NAME.toml` is that file
for the commands.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- not run here: (\S.*) -->")
PREPARED = (["pip", "install", "uv"], ["export"])
"""What a command line begins with, and needs no trial."""


@dataclass(frozen=True)
class Fence:
    place: str
    language: str
    text: str
    mark: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        """Its commands, one each, with the files that it writes in place of its documents."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        joined = re.sub(
            r"<<'END'\n(.*?)\nEND$", lambda match: shlex.quote(match[1].replace("\n", "\0")), joined, flags=re.S | re.M
        )
        return list(re.split(r"\n+(?=\S)", joined.strip()))


def fences(page: Path) -> list[Fence]:
    """Returns the samples of a page in their order."""
    blocks, lines = [], page.read_text().splitlines()
    opened: int | None = None
    for n, line in enumerate(lines):
        if line.startswith("```") and opened is None:
            opened = n
        elif line.startswith("```") and opened is not None:
            marked = MARK.fullmatch(lines[opened - 1])
            text = "\n".join(lines[opened + 1 : n]) + "\n"
            place = f"{page.name}:{opened + 1}"
            blocks.append(Fence(place, lines[opened].removeprefix("```"), text, marked[1] if marked else ""))
            opened = None
    return blocks


ALL = [fence for page in PAGES for fence in fences(page)]


def calls_of(program: str, text: str) -> list[list[str]]:
    """Returns the words of each call of `program`, for which the text has an alias, as a shell expands them."""
    without_alias = re.sub(rf"^alias {program}=.*$", "", text, flags=re.M)
    script = f"{program}() {{ printf '%s\\n' \"$*\"; }}\n{without_alias}"
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=10).stdout
    return [line.split() for line in printed.splitlines()]


def words_of(command: str) -> list[list[str]]:
    """Returns the words of each part of a command line that `&&` separates, without variables and `uv run`."""
    parts = []
    for ends, group in groupby(shlex.split(command, comments=True), lambda word: word == "&&"):
        words = [] if ends else list(group)
        while words and re.match(r"[A-Z]\w*=", words[0]):
            words = words[1:]
        if words[:2] == ["uv", "run"]:
            words = words[3:] if words[2] == "--no-sync" else words[2:]
        if words and words not in PREPARED and words[0] != "export":
            parts.append(words)
    return parts
