"""Bodies of requests against the packages `openai` and `anthropic`, field by field: what a client of theirs can send is
known here, or refused by name because it is listed below, and plain values have the types of theirs."""

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import (
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    message_create_params,
)
from anthropic.types.assistant_message_param import AssistantMessageParam
from anthropic.types.user_message_param import UserMessageParam
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseReasoningItemParam,
    response_create_params,
)
from openai.types.responses.response_input_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition
from pydantic import TypeAdapter, ValidationError

from service.dialects import chat, completions, messages, responses, wire
from service.dialects.wire import Body

VLLM = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "return_token_ids"}
CACHES = {"prompt_cache_options", "prompt_cache_retention"}
PENALTIES = {"frequency_penalty", "presence_penalty", "logit_bias"}
CHAT = {"audio", "function_call", "functions", "modalities", "parallel_tool_calls", "prediction", "reasoning_effort"}
CHAT |= {"response_format", "store", "top_logprobs", "verbosity", "web_search_options"}
RESPONSES = {"background", "conversation", "include", "max_tool_calls", "parallel_tool_calls", "previous_response_id"}
RESPONSES |= {"prompt", "reasoning", "store", "stream_options", "top_logprobs", "truncation"}
CHAT_MESSAGES = (
    ChatCompletionAssistantMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
OLDER_MESSAGES = {"temperature", "top_k", "top_p"}
"""Fields that this version of `anthropic` has no more, or only in beta."""
NEWER_MESSAGES = {"cache_control", "container", "diagnostics", "inference_geo", "output_config", "speed", "thinking"}
NEWER_MESSAGES |= {"user_profile_id", "workspace_id"}
BODIES: list[tuple[type[Body], tuple[Any, ...], set[str], set[str]]] = [
    (
        chat.ChatRequest,
        (chat_create_params.CompletionCreateParamsStreaming,),
        VLLM,
        {"moderation"} | CACHES | PENALTIES | CHAT,
    ),
    (
        chat.ChatMessage,
        CHAT_MESSAGES,
        {"reasoning_content", "token_ids", "prompt_token_ids"},
        {"audio", "function_call", "refusal"},
    ),
    (chat.ChatToolCall, (ChatCompletionMessageFunctionToolCallParam,), {"index"}, set()),
    (wire.FunctionTool, (FunctionDefinition,), set(), {"strict"}),
    (
        completions.CompletionRequest,
        (completion_create_params.CompletionCreateParamsStreaming,),
        VLLM,
        {"best_of", "echo", "suffix"} | PENALTIES,
    ),
    (
        responses.ResponseRequest,
        (response_create_params.ResponseCreateParamsStreaming,),
        set(),
        {"context_management", "moderation"} | CACHES | RESPONSES,
    ),
    (responses.InputMessage, (EasyInputMessageParam,), {"id", "status"}, set()),
    (responses.InputCall, (ResponseFunctionToolCallParam,), set(), {"caller", "namespace"}),
    (responses.InputResult, (FunctionCallOutput,), set(), {"caller", "name", "namespace"}),
    (responses.InputReasoning, (ResponseReasoningItemParam,), set(), {"encrypted_content"}),
    (
        responses.ResponseTool,
        (FunctionToolParam,),
        set(),
        {"allowed_callers", "defer_loading", "output_schema", "strict"},
    ),
    (
        messages.MessagesRequest,
        (message_create_params.MessageCreateParamsStreaming,),
        OLDER_MESSAGES,
        NEWER_MESSAGES,
    ),
    (messages.AnthropicMessage, (UserMessageParam, AssistantMessageParam), set(), set()),
    (messages.TextBlock, (TextBlockParam,), set(), {"citations"}),
    (messages.ThinkingBlock, (ThinkingBlockParam,), set(), set()),
    (messages.ToolUseBlock, (ToolUseBlockParam,), set(), {"caller", "toolset_name"}),
    (messages.ToolResultBlock, (ToolResultBlockParam,), set(), {"toolset_name"}),
    (
        messages.AnthropicTool,
        (ToolParam,),
        set(),
        {"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "strict", "type"},
    ),
]
"""Each body with the types of the package, the fields that it has beyond them, and those that it refuses by name."""
VALUES = {"value_error", "literal_error", "none_required", "less_than_equal"}
"""Errors of pydantic about the value of a field, not its type."""
PLAIN: Mapping[Any, Any] = {bool: True, int: 1, float: 0.5, str: "auto"}


def hints_of(theirs: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the fields of types of a package, with the type of each."""
    return {name: hint for type_ in theirs for name, hint in get_type_hints(type_).items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "beyond", "refused"), BODIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_body_has_its_fields(ours: type[Body], theirs: tuple[Any, ...], beyond: set[str], refused: set[str]) -> None:
    hints = hints_of(theirs)
    assert set(ours.model_fields) - set(hints) == beyond
    assert set(hints) - set(ours.model_fields) == refused
    for name in refused:
        with pytest.raises(ValidationError) as error:
            ours.model_validate({name: 7})
        assert "extra_forbidden" in {error_["type"] for error_ in error.value.errors() if error_["loc"] == (name,)}
        with pytest.raises(ValidationError) as error:
            ours.model_validate({name: None, "other": 7})
        assert name not in {error_["loc"][0] for error_ in error.value.errors()}, "null requests nothing"


@pytest.mark.parametrize(
    ("ours", "field"),
    [(chat.ChatRequest, "parallel_tool_calls"), (responses.ResponseRequest, "store"), (wire.FunctionTool, "strict")],
)
def test_a_neutral_value_of_a_field_requests_nothing(ours: type[Body], field: str) -> None:
    with pytest.raises(ValidationError) as error:
        ours.model_validate({field: wire.NEUTRAL[field]})
    assert field not in {error_["loc"][0] for error_ in error.value.errors()}


@pytest.mark.parametrize(
    ("ours", "theirs", "beyond", "refused"), BODIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_plain_value_of_the_package_has_the_type_that_is_read_here(
    ours: type[Body], theirs: tuple[Any, ...], beyond: set[str], refused: set[str]
) -> None:
    """It may be refused for its value, as what is not supported here is, but not for its type."""
    for name, hint in hints_of(theirs).items():
        if name in refused:
            continue
        field = ours.model_fields[name]
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, *field.metadata, None])
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for kind in [kind for kind in kinds if kind in PLAIN]:
            kinds_of_errors = set()
            try:
                adapter.validate_python(PLAIN[kind], strict=True)
            except ValidationError as error:
                kinds_of_errors = {problem["type"] for problem in error.errors()}
            assert kinds_of_errors <= VALUES, (name, kind)
