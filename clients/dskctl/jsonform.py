"""Protocol messages as JSON values: the field names of the protocol, short words for enums, numbers for numbers."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dskctl.words import enum_word

_WIDE_INTEGERS = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}


def to_json(message: Message) -> dict[str, Any]:
    """`message` as json_format gives it, except that enums are short words (null when unspecified), 64-bit integers are
    numbers and NaN is null. Fields without presence are always there, so that the keys are stable."""
    document = json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        use_integers_for_enums=True,
    )
    simplified: dict[str, Any] = _simplified(document, message.DESCRIPTOR)
    return simplified


def _simplified(document: Any, descriptor: Any) -> Any:
    """Our own messages field by field; those of Google (timestamps, structs) have a JSON form of their own."""
    if not descriptor.full_name.startswith("dskapi."):
        return document
    return {name: _field_value(value, descriptor.fields_by_name[name]) for name, value in document.items()}


def _field_value(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_scalar(item, field) for item in value]
    return _scalar(value, field)


def _scalar(value: Any, field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return enum_word(field.enum_type, value)
    if field.message_type is not None and not field.message_type.GetOptions().map_entry:
        return _simplified(value, field.message_type)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return None if value == "NaN" else value
    return int(value) if field.type in _WIDE_INTEGERS else value
