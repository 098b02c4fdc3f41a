"""The lists of pages and benchmarks that scripts/style.py goes by."""

import re

import style


def test_these_pages_are_generated() -> None:
    pages = {str(path.relative_to(style.ROOT)) for path in style.ROOT.glob("docs/*.md")}
    generated = {"configuration", "conformance", "memory", "models", "reasoning-gym", "wire"}
    assert pages - style.hand_written_pages(style.ROOT).keys() == {f"docs/{name}.md" for name in generated}


def test_each_benchmark_has_a_section_on_its_page() -> None:
    scripts = (style.ROOT / "scripts" / "bench").glob("[!_]*.py")
    benchmarks = {path.stem for path in scripts if re.search(r"(?<!Step)Result\(", path.read_text())}
    headings = (style.ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    assert {name for name in benchmarks if f"## {name}" not in headings} == set()
    assert "whole_job" in benchmarks
