"""One browser for the tests of a file."""

from collections.abc import Iterator

import pytest
from browser_support import Tab, browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab
