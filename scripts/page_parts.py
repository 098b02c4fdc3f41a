"""Parts of pages that scripts write: what stands between `<!-- NAME -->` and `<!-- end -->`. People write the rest."""

from __future__ import annotations


def with_part(page: str, name: str, text: str) -> str:
    """Returns the page with another text as its part `name`. Raises ValueError for a page without it."""
    begin = f"<!-- {name} -->\n"
    before, _, rest = page.partition(begin)
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"the page has no place for a table between {begin.strip()} and <!-- end -->")
    return f"{before}{begin}{text.rstrip()}\n{end}{after}"
