"""Names in the source that others rely on are the stored ones; `formats` says how to store them anew."""

import formats
import pytest
from formats import source_formats, stored_formats


@pytest.mark.parametrize("kind", sorted(source_formats()))
def test_a_renaming_changes_no_name_that_others_rely_on(kind: str) -> None:
    stored = stored_formats()["source"][kind]
    assert source_formats()[kind] == stored, "if that is on purpose: PYTHONPATH=src uv run python " + formats.__file__
