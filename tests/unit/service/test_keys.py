"""Keys: made once, read from files that only their owner can read, found by their value alone."""

from pathlib import Path

import pytest

from service.keys import ServiceKey, ServiceKeys, generate, read
from trireme.core.errors import BadInput


def test_made_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "service.keys"
    keys = generate(file)
    assert [key.role for key in keys] == ["client", "admin"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert read(file) == keys
    assert len({key.value for key in keys} | {key.value for key in generate(tmp_path / "other")}) == 4
    with pytest.raises(BadInput, match="which already exists"):
        generate(file)


def test_a_key_is_found_by_its_value() -> None:
    client, admin = ServiceKey("client", "c" * 20), ServiceKey("admin", "a" * 20)
    keys = ServiceKeys([client, admin])
    assert [keys.find(value) for value in ("c" * 20, "a" * 20)] == [client, admin]
    assert [keys.find(value) for value in (None, "", "c" * 19, "c" * 21, "\udcff", client.name)] == [None] * 6
    assert client.value not in client.name


def test_the_key_of_a_session_says_whose_it_is_and_is_signed() -> None:
    keys = ServiceKeys([ServiceKey("client", "c" * 20), ServiceKey("admin", "a" * 20)])
    value = keys.of_session("s-1")
    key = keys.find(value)
    assert key is not None
    assert (key.role, key.session) == ("session", "s-1")
    assert "s-1" not in key.name
    for forged in (value[:-1], value.replace("s-1", "s-2"), value.upper(), "tr-session-", "tr-session-\udcff-0"):
        assert keys.find(forged) is None, forged
    assert ServiceKeys([ServiceKey("admin", "b" * 20)]).find(value) is None
    assert ServiceKeys([ServiceKey("client", "c" * 20)]).find(value) is None


def test_without_an_admin_key_no_session_has_a_key() -> None:
    with pytest.raises(BadInput, match="no admin key in the file of keys"):
        ServiceKeys([ServiceKey("client", "c" * 20)]).of_session("s-1")


def test_keys_have_owners(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    text = (
        "admin 0123456789abcdef\n"
        "client 1123456789abcdef== owner=alice@lab\n"
        "client 2123456789abcdef owner=alice@lab\n"
        "client 3123456789abcdef\n"
    )
    file.write_text(text)
    file.chmod(0o600)
    admin, first, second, alone = read(file)
    assert [key.owner for key in (admin, first, second, alone)] == [admin.name, "alice@lab", "alice@lab", alone.name]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("client 0123456789abcdef", 0o644, "chmod 600"),
        ("client short", 0o600, "key number 1"),
        ("admin 0123456789abcdea\nclient 0123456789abcdef models", 0o600, "key number 2"),
        ("client 0123456789abcdef owner=a models=4", 0o600, "key number 1 has another form"),
        ("client 0123456789abcdef owner=a/b", 0o600, "key number 1 has another form"),
        ("client 0123456789abcdef models=4", 0o600, "key number 1 has another form"),
        ("client 0123456789abcdef owner=", 0o600, "key number 1 has another form"),
        ("client 0123456789abcdef\nclient 0123456789abcdef", 0o600, "a key twice"),
        ("# a comment\n\nclient 0123456789abcdef\nroot 0123456789abcdef", 0o600, "key number 2"),
        ("", 0o600, "has no key"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(BadInput, match=message) as refused:
        read(file)
    assert "0123456789abcdef" not in str(refused.value)
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "none")


def test_a_key_does_not_show_its_secret() -> None:
    assert "0123456789abcdef" not in repr(ServiceKey("client", "0123456789abcdef"))
