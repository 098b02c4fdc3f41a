"""The protocol's messages in protobuf, as classes made from `tinker_public.txtpb` on import.

The classes live in a pool of their own: a process may also have the client's.
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
    """Returns the class of the message `name`. Its fields have no types that a checker could know. Raises KeyError."""
    return _CLASSES[f"tinker_public.{name}"]
