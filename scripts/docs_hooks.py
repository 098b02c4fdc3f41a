"""Hooks of mkdocs (mkdocs.yml): README, CONTRIBUTING, SECURITY and CHANGELOG are pages of the site, too.

Links are written for a reader of the repository. The site changes the ones that lead elsewhere there: a link to a page
leads to that page, and a link to another file leads into the repository at `repo_url`. Without `repo_url` it is text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
PAGES |= {"SECURITY.md": "SECURITY.md", "CHANGELOG.md": "CHANGELOG.md"}
"""The site's page for each page outside docs/, by its path in the repository."""
LINK = re.compile(r"(?<!`)\[((?:[^\]\n]|\n(?!\n))+)\]\(([^)\s]+)\)")
"""A link; its text may be broken over lines."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"^(?!\s*(?:[-*]|\d+\.) |\s)(.+)\n(?=(?:[-*]|1\.) )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the text of a page with the links of the site."""
    sources = {page: source for source, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    for number in range(0, len(parts), 2):
        text = LINK.sub(lambda link: _site_link(link, source, page.file.src_uri, config), parts[number])
        parts[number] = LIST.sub(r"\1\n\n", text)
    return "".join(parts)


def _site_link(link: re.Match[str], source: str, page: str, config: MkDocsConfig) -> str:
    """Returns a link of the page with path `source` in the repository, as the site's page `page` has it."""
    label = link[1]
    path, mark, anchor = link[2].partition("#")
    if not path or ":" in path:
        return link[0]
    target = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if not (ROOT / target).exists():
        return link[0]  # `mkdocs build --strict` refuses it
    if target in PAGES or target.startswith("docs/"):
        site_path = PAGES.get(target) or target.removeprefix("docs/")
        return f"[{label}]({os.path.relpath(site_path, os.path.dirname(page))}{mark}{anchor})"
    if config.repo_url:
        return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{target}{mark}{anchor})"
    return label
