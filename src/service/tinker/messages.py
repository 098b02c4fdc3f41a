"""The protocol's messages in protobuf, as classes that are made from `tinker_public.proto` when this is imported.

protobuf's Python package has no compiler, so the few forms that the file uses are read here. The classes live in a pool
of their own: a process may also have those of the client.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "tinker_public"
SCHEMA = Path(__file__).with_name("tinker_public.proto")
BLOCK = re.compile(r"(message|enum) (\w+) \{(.*?)\}", re.DOTALL)
VALUE = re.compile(r"(\w+) = (\d+);")
FIELD = re.compile(r"(?:(repeated|optional) )?(map<string, (\w+)>|\w+) (\w+) = (\d+);")
SCALARS = {
    kind.removeprefix("TYPE_").lower(): number
    for kind, number in FieldDescriptorProto.Type.items()
    if kind not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


def _file(schema: str) -> FileDescriptorProto:
    """Reads a schema: enums first, then messages of scalars, messages, repeated ones and maps from strings."""
    file = FileDescriptorProto(name=SCHEMA.name, package=PACKAGE, syntax="proto3")
    blocks = BLOCK.findall(re.sub(r"//.*", "", schema))
    enums = {name for kind, name, _ in blocks if kind == "enum"}
    for kind, name, body in blocks:
        if kind == "enum":
            enum = file.enum_type.add(name=name)
            for label, number in VALUE.findall(body):
                enum.value.add(name=label, number=int(number))
        else:
            message = file.message_type.add(name=name)
            for found in FIELD.finditer(body):
                _add_field(message, enums, found)
    return file


def _add_field(message: DescriptorProto, enums: set[str], found: re.Match[str]) -> None:
    label, kind, value, name, number = found.groups()
    many = label == "repeated" or value is not None
    field = message.field.add(name=name, number=int(number))
    field.label = FieldDescriptorProto.LABEL_REPEATED if many else FieldDescriptorProto.LABEL_OPTIONAL
    if value:  # a map is a repeated message of key and value
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for part, number_of_part, its_kind in (("key", 1, "string"), ("value", 2, value)):
            of = entry.field.add(name=part, number=number_of_part, label=FieldDescriptorProto.LABEL_OPTIONAL)
            _set_kind(of, its_kind, enums)
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
        return
    _set_kind(field, kind, enums)
    if label == "optional":  # proto3 keeps whether it was given in a oneof of its own
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _set_kind(field: FieldDescriptorProto, kind: str, enums: set[str]) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_ENUM if kind in enums else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


_POOL = DescriptorPool()
_POOL.Add(_file(SCHEMA.read_text()))


def message_class(name: str) -> Any:
    """Returns the class of the message `name`. Its fields have no types that a checker could know."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
