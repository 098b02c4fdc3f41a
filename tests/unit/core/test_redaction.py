"""Secrets are left out of what a run writes, and nothing else is."""

import subprocess
from pathlib import Path

import pytest

from trireme.core.redaction import MASK, is_secret, redact, redact_values

# Written in parts, so that no scanner of this repository takes them for real.
SECRETS = {
    "hugging face": "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD2fG4h",
    "openai": "sk-" + "proj-aB3dE5gH7jK9mN1pQ3sT5vW7yZ9",
    "github": "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD2fG4hJ6",
    "slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "google": "AIza" + "SyA-aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bD2f",
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----",
    "open private key": "-----BEGIN " + "PRIVATE KEY-----\nMIIEow\nIBAAKC",
}
HEX = "0123456789abcdef" * 2 + "01234567"
ASSIGNED = [
    f"WANDB_API_KEY={HEX}",
    f'+    api_key = "{HEX}"',
    f"'aws_secret_access_key': '{HEX}'",
    f"password: {HEX}",
    f"export MY_TOKEN={HEX}",
]
INNOCENT = [
    "max_tokens = 1234567890123456789",
    "tokens = encoded_with_a_tokenizer_2(text)",
    "token = tokenizer.eos_token_id",
    f"checkpoint {HEX}",
    f"digest = {HEX}",
    "api_key = os.environ['MY_API_KEY']",
    "-- a key: value",
    "task-hf_small, sk-learn, xoxb",
    "monkey = 'a_long_name_of_1234567890'",
]


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_secret_in_a_known_format_is_left_out(secret: str) -> None:
    assert redact(f"before {secret}") == f"before {MASK}"
    assert redact_values({"args": ["x", {"anything": secret}]}) == {"args": ["x", {"anything": MASK}]}


@pytest.mark.parametrize("line", ASSIGNED)
def test_what_is_assigned_to_the_name_of_a_secret_is_left_out(line: str) -> None:
    assert HEX not in redact(line)
    assert redact(line).replace(MASK, HEX) == line


@pytest.mark.parametrize("line", INNOCENT)
def test_anything_else_stays(line: str) -> None:
    assert redact(line) == line


def test_a_value_with_the_name_of_a_secret_is_left_out() -> None:
    values = {
        "api_key": "correct horse",
        "hf_token": HEX,
        "eos_token": "<|endoftext|>",
        "max_tokens": 5,
        "key": "lookup",
    }
    assert redact_values(values) == values | {"api_key": MASK, "hf_token": MASK}


def test_values_of_variables_are_left_out_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWERER_API_KEY", "correct horse")
    monkeypatch.setenv("HOME_KEYBOARD", "qwertyuiop")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    text = "url = http://correct horse@host, qwertyuiop"
    assert redact(text) == f"url = http://{MASK}@host, qwertyuiop"


def test_this_repository_holds_no_secret() -> None:
    """And what it holds is taken for none: code.diff may show any of it."""
    root = Path(__file__).parents[3]
    listed = subprocess.run(["git", "ls-files", "src", "examples", "docs", "configs"], cwd=root, capture_output=True)
    for name in listed.stdout.decode().split():
        text = (root / name).read_text(errors="replace")
        assert redact(text) == text, name


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("JUDGE_APIKEY", "x", True),
        ("https_proxy", "http://me:word@proxy:80", True),
        ("X", SECRETS["openai"], True),
        ("TOKENIZERS_PARALLELISM", "true", False),
        ("HF_HOME", "/models", False),
        ("https_proxy", "http://proxy:80", False),
    ],
)
def test_variables_are_secrets_by_name_or_value(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret
