"""The protocol's protobuf messages, as classes made from `tinker_public.txtpb` on import.

The classes live in a descriptor pool of their own, because a process may also have the client's classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message_factory import GetMessages

SCHEMA = Path(__file__).with_name("tinker_public.txtpb")
_CLASSES = GetMessages([text_format.Parse(SCHEMA.read_text(), FileDescriptorProto())])


def message_class(name: str) -> Any:
    """Returns the class of the message `name`; type checkers do not know its fields. Raises KeyError for an unknown
    name."""
    return _CLASSES[f"tinker_public.{name}"]
