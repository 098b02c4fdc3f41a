"""The parts of bodies that all dialects share: strict models, neutral values, messages, and server-sent events."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    model_validator,
)

from service.requests import Delta, RequestRefused, ServiceAnswer, TurnRequest
from trireme.core.finite_json import JsonObject, to_json
from trireme.core.sampling_bounds import BOUNDS, LONGEST_STOP, MOST_ANSWERS, MOST_STOP_IDS, MOST_STOPS
from trireme.core.tokenizer import Tokenizer
from trireme.core.types import SamplingParams, VersionSpan
from trireme.renderers import Message, ToolCall, ToolSpec
from trireme.renderers.qwen_tags import read_json

T = TypeVar("T")
LONGEST_TEXT = 2**31
MOST_FIELDS = 100
"""The most fields of an object in a body: pydantic would make an error for each field that it refuses."""
Temperature = Annotated[float, BOUNDS["temperature"].field]
TopP = Annotated[float, BOUNDS["top_p"].field]
MinP = Annotated[float, BOUNDS["min_p"].field]
TopK = Annotated[int, BOUNDS["top_k"].field]
Penalty = Annotated[float, BOUNDS["repetition_penalty"].field]
Answers = Annotated[int, Field(ge=1, le=MOST_ANSWERS)]
Seed = Annotated[int, Field(ge=0, lt=2**63 - MOST_ANSWERS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[PositiveInt, Field(lt=2**31)]

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first wrong item: a million errors would take seconds, and a gigabyte."""
Stops = Annotated[Many[Stop], Field(max_length=MOST_STOPS)]
StopIds = Annotated[Many[TokenId], Field(max_length=MOST_STOP_IDS)]

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}
"""Fields of bodies with the names of fields of `SamplingParams`."""


def few(value: T) -> T:
    """Returns `value` unchanged. Raises ValueError if it is an object of more than MOST_FIELDS fields. Without this
    check, pydantic could make an error for each of the fields."""
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise ValueError(f"an object of {len(value):,} fields; expected at most {MOST_FIELDS}")
    return value


Few = BeforeValidator(few)
"""An object of few fields."""


NEUTRAL: Mapping[str, object] = {
    "annotations": [],
    "background": False,
    "best_of": 1,
    "citations": [],
    "disable_parallel_tool_use": False,
    "echo": False,
    "format": {"type": "text"},
    "frequency_penalty": 0,
    "include": [],
    "include_obfuscation": False,
    "logit_bias": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
    "strict": False,
    "thinking": {"type": "disabled"},
    "top_logprobs": 0,
    "truncation": "disabled",
    "type": "custom",
    "verbosity": "medium",
}
"""{field that is not supported: the value by which it requests nothing}."""


class Body(BaseModel):
    """A part of a request. A request with an unknown field is refused, with a message that names the field, so that no
    field is silently ignored."""

    # A limit of lengths makes pydantic read texts as UTF-8: it refuses half of a surrogate pair, which JSON can write.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), str_max_length=LONGEST_TEXT)

    @model_validator(mode="before")
    @classmethod
    def readable(cls, value: object) -> object:
        """Returns `value`, a body or a part of it as the client sent it, without unknown fields that are null or
        NEUTRAL. Raises ValueError if `value` has more than MOST_FIELDS fields."""
        few(value)
        if not isinstance(value, dict):
            return value
        return {
            name: part
            for name, part in value.items()
            if name in cls.model_fields or part not in (None, NEUTRAL.get(name))
        }


class SampledBody(Body):
    """The fields that request bodies of all dialects share."""

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None

    def sampling_params(self, max_tokens: int | None, stop: Sequence[int | str] = ()) -> SamplingParams:
        """Returns the sampling parameters of the request, with `max_tokens` and `stop`. A parameter that the request
        leaves out gets the value that does not change the model's distribution."""
        return SamplingParams(max_tokens, stop=stop, **self.model_dump(include=SAMPLING, exclude_none=True))

    @abstractmethod
    def turns(self) -> Sequence[TurnRequest]:
        """Returns the prompts to answer. Raises RequestRefused if the body asks for something that is not supported."""

    @abstractmethod
    def whole(self, answers: Sequence[ServiceAnswer], tokenizer: Tokenizer) -> JsonObject:
        """Returns the body of a reply with all answers, for a request without `stream`."""

    @abstractmethod
    def events(self, pieces: AsyncIterator[Delta], tokenizer: Tokenizer) -> AsyncIterator[str]:
        """Yields the answers as server-sent events."""


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> RequestRefused:
    """Returns one refusal for the errors of pydantic (`errors`); its message names each refused field."""
    lines = []
    fields = []
    for error in errors:
        no_json = error["type"] == "json_invalid"  # its place is that of a character
        if no_json:
            field = ""
        else:
            field = ".".join(str(part) for part in error["loc"] if part != "body")
        fields.append(field)
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] in ("extra_forbidden", "none_required"):
            message = "it is not supported here; leave it out"
        elif isinstance(error.get("input"), bytes):
            message = "the body was not read as JSON; send it with the header `Content-Type: application/json`"
        lines.append(f"`{field}`: {message}" if field else message)
    return RequestRefused("; ".join(dict.fromkeys(lines)), param=fields[0] if fields and fields[0] else None)


# ---------------------------------------------------------------------------------------------------- tools, messages


class FunctionTool(Body):
    """The description of a function."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None

    def spec(self) -> ToolSpec:
        """Returns the tool as renderers take it."""
        nothing: JsonObject = {"type": "object", "properties": {}}
        return ToolSpec(name=self.name, description=self.description or "", parameters=self.parameters or nothing)


class FunctionCall(Body):
    """A call of a function, with arguments as JSON in a string."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def call(self) -> ToolCall:
        """Returns the call as renderers take it. Raises RequestRefused if the arguments are no JSON object."""
        return ToolCall(name=self.name, arguments=arguments_of(self.arguments))


def arguments_of(text: str) -> JsonObject:
    """Returns the arguments of a tool call, which the model or a client wrote as `text`. Raises RequestRefused if the
    text is no JSON object."""
    arguments = read_json(text or "{}")
    if not isinstance(arguments, dict):
        raise RequestRefused(f"the arguments of a call, {text!r:.200}; expected a JSON object", param="arguments")
    return arguments


def check_tool_choice(choice: object, tools: Iterable[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Returns the tools that the model may call under the request's `tool_choice`: all for `auto`, none for `none`.
    Raises RequestRefused for any other choice, because a call cannot be forced."""
    if isinstance(choice, Mapping):
        name = choice.get("type")
    else:
        name = choice
    if name in (None, "auto"):
        return tuple(tools)
    if name == "none":
        return ()
    raise RequestRefused(
        f"tool_choice = {to_json(choice, default=str):.200}, which is not supported: a call cannot be forced; expected "
        "auto or none",
        param="tool_choice",
    )


def tool_answer(content: str | Sequence[HasText] | None, call: str, calls: Mapping[str, str]) -> Message:
    """Returns the message with a tool's answer (`content`) to the call with the id `call`. `calls`: the name of each
    tool called earlier, by the id of the call. Raises RequestRefused for an id that is not in `calls`."""
    if call not in calls:
        raise RequestRefused(f"an answer to the call `{call}`, which no message before it makes", param="messages")
    return {"role": "tool", "content": text_of(content), "name": calls[call]}


class TextPart(Body):
    """A text part of a message. Parts of other kinds, such as images, are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    logprobs: list[object] | None = None
    cache_control: object = None  # of Anthropic's prompt cache; replicas cache every prefix


Content = str | Many[TextPart]


class HasText(Protocol):
    """A part of a message's content."""

    text: str


def text_of(content: str | Sequence[HasText] | None) -> str:
    """Returns the text of a message's content: the string, its text parts joined, or "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


# ----------------------------------------------------------------------------------------------------------- answers


def new_id(kind: str) -> str:
    """Returns a new id that begins with `kind`, such as `chatcmpl-...`."""
    return f"{kind}{uuid.uuid4().hex}"


def now_s() -> int:
    """Returns the time in seconds since 1970."""
    return int(time.time())


def arguments_text(call: ToolCall) -> str:
    """Returns the arguments of a call as JSON."""
    return to_json(call["arguments"], ensure_ascii=False)


def spans_of(spans: Sequence[VersionSpan]) -> list[JsonObject]:
    """Returns the version spans of an answer as JSON objects. Each object has the fields of the span's WeightIdentity
    and three more: `start` (the index of the span's first token), `end` (the index after its last token) and `mixed`
    (True if the span was sampled with entries of the KV cache that older weights had computed)."""
    return [{**vars(span.identity), "start": span.start, "end": span.end, "mixed": span.mixed} for span in spans]


class Used:
    """Counts the tokens of `answers`, and finds their oldest and newest version. `n`: the number of answers to each
    prompt."""

    def __init__(self, answers: Sequence[ServiceAnswer] = (), n: int = 1) -> None:
        self.prompt = sum({answer.choice // n: len(answer.prompt) for answer in answers}.values())
        """Number of tokens of all prompts."""
        self.completion = sum(len(answer.sequence.tokens) for answer in answers)
        versions = [version for answer in answers for version in answer.versions] or [0]
        nodes = [answer.node for answer in answers if answer.node is not None]
        self.versions: dict[str, Any] = {"version": max(versions), "oldest_version": min(versions)}
        """Fields of `usage`: the newest and the oldest version, and, in a session, the numbers of the answers."""
        if nodes:
            self.versions["answers"] = nodes


def event(data: object, name: str | None = None) -> str:
    """Returns one server-sent event with `data` as JSON. `name`: the type of the event, if it has one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(data)}\n\n"
