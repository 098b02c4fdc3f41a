"""The counts of scripts/style.py, on files whose counts are known."""

import re
from pathlib import Path

import style

SOURCE = '''"""A docstring
of two lines."""

# A comment.
a, b = 1, 2
told = a if b else None


def f(x: Any) -> None:
    """Does nothing."""
    if (y := x) is None:
        print("""two
lines""")
'''


def test_lines_code_and_tokens(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("x = 1  # one\n")
    counts = style.style_of(tmp_path)
    assert (counts.files, counts.lines, counts.code) == (2, 14, 7)
    # 7 + 7 of the assignments, 10 of the head of f, 9 of `if`, 3 of the call without its string, 3 of b.py
    assert counts.tokens == 39


def test_five_pages_are_generated() -> None:
    pages = {str(path.relative_to(style.ROOT)) for path in style.ROOT.glob("docs/*.md")}
    generated = {"configuration", "conformance", "memory", "models", "wire"}
    assert pages - style.hand_written_pages(style.ROOT).keys() == {f"docs/{name}.md" for name in generated}


def test_each_benchmark_has_a_section_on_its_page() -> None:
    scripts = (style.ROOT / "scripts" / "bench").glob("[!_]*.py")
    benchmarks = {path.stem for path in scripts if re.search(r"(?<!Step)Result\(", path.read_text())}
    headings = (style.ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    assert {name for name in benchmarks if f"## {name}" not in headings} == set()
    assert "whole_job" in benchmarks
