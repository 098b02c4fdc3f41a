"""How the source reads (scripts/style.py), and the lists of pages and benchmarks that the script goes by."""

import re

import pytest

import style

PER_10_000_TOKENS = {"tuples": 3.0, "walruses": 2.0, "conditionals": 16.0, "Any": 11.0}
EVERYDAY_PERCENT = 0.3
STIFF_PER_1_000_WORDS = 3.0


@pytest.mark.parametrize("tree", ["src", "scripts"])
def test_the_source_is_not_packed_and_its_words_are_plain(tree: str) -> None:
    counted = style.style_of(style.ROOT / tree)
    densities = {mark: counted.density(mark) for mark in PER_10_000_TOKENS}
    assert {mark: value for mark, value in densities.items() if value > PER_10_000_TOKENS[mark]} == {}
    assert min(densities.values()) > 0, "the counter sees these marks"
    assert counted.everyday_percent() <= EVERYDAY_PERCENT
    assert counted.stiffness() <= STIFF_PER_1_000_WORDS


def test_pages_are_plain_and_these_are_generated() -> None:
    pages = " ".join(style.hand_written_pages(style.ROOT).values())
    assert 1000 * len(style.STIFF.findall(pages)) / len(pages.split()) <= STIFF_PER_1_000_WORDS
    paths = {str(path.relative_to(style.ROOT)) for path in style.ROOT.glob("docs/**/*.md")}
    generated = {
        *("configuration", "models", "reasoning-gym"),
        *("internals/conformance", "internals/memory", "internals/wire"),
    }
    assert paths - style.hand_written_pages(style.ROOT).keys() == {f"docs/{name}.md" for name in generated}


def test_each_benchmark_has_a_section_on_its_page() -> None:
    scripts = (style.ROOT / "scripts" / "bench").glob("[!_]*.py")
    benchmarks = {path.stem for path in scripts if re.search(r"(?<!Step)Result\(", path.read_text())}
    headings = (style.ROOT / "docs" / "internals" / "benchmarks.md").read_text().splitlines()
    assert {name for name in benchmarks if f"## {name}" not in headings} == set()
    assert "whole_job" in benchmarks
