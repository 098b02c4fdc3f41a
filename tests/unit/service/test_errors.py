"""The words that clients of each dialect know errors by."""

import pytest

from service.errors import error_body
from service.requests import RequestRefused


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "invalid_request_error", "authentication_error"),
        (403, "invalid_request_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "requests", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_types_of_errors_are_those_of_the_dialect(status: int, openai: str, anthropic: str) -> None:
    refused = RequestRefused("no", status=status)
    for path in ("/v1/chat/completions", "/v1/responses", "/sessions/s/v1/completions", "/api/v1/asample"):
        assert error_body(path, refused)["error"]["type"] == openai
    for path in ("/v1/messages", "/sessions/s/v1/messages"):
        assert error_body(path, refused)["error"]["type"] == anthropic
