"""protobuf as an oracle for Examples, with messages built at run time, and messages made byte by byte.

The descriptors live in a pool of their own: nothing generated, and no clash with TensorFlow's.
"""

from __future__ import annotations

import struct

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError as ProtobufError

IMPLEMENTATION = api_implementation.Type()
"""What protobuf ran as: "upb", or the much slower and laxer "python"."""

_ONE, _MANY = 1, 3  # labels
_BYTES, _FLOAT, _INT64, _STRING, _MESSAGE = 12, 2, 3, 9, 11  # types


def _classes(syntax):
    file = descriptor_pb2.FileDescriptorProto(name="examples.proto", package="examples", syntax=syntax)

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for number, (field, label, kind, of) in enumerate(fields, 1):
            made.field.add(name=field, number=number, label=label, type=kind, type_name=of and f".examples.{of}")
        return made

    def mapping(name, field, value):
        entry = f"{''.join(part.capitalize() for part in field.split('_'))}Entry"
        made = message(name, (field, _MANY, _MESSAGE, f"{name}.{entry}"))
        inner = made.nested_type.add(name=entry)
        inner.options.map_entry = True
        inner.field.add(name="key", number=1, label=_ONE, type=_STRING)
        inner.field.add(name="value", number=2, label=_ONE, type=_MESSAGE, type_name=f".examples.{value}")

    for name, kind in (("BytesList", _BYTES), ("FloatList", _FLOAT), ("Int64List", _INT64)):
        message(name, ("value", _MANY, kind, None))
        if syntax == "proto2" and kind != _BYTES:
            file.message_type[-1].field[0].options.packed = True
    kinds = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    feature = message("Feature", *((name, _ONE, _MESSAGE, of) for name, of in kinds))
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    mapping("Features", "feature", "Feature")
    message("FeatureList", ("feature", _MANY, _MESSAGE, "Feature"))
    mapping("FeatureLists", "feature_list", "FeatureList")
    message("Example", ("features", _ONE, _MESSAGE, "Features"))
    message(
        "SequenceExample", ("context", _ONE, _MESSAGE, "Features"), ("feature_lists", _ONE, _MESSAGE, "FeatureLists")
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"examples.{name}"))
        for name in ("Example", "SequenceExample")
    }


_STRICT = _classes("proto3")
_LAX = _classes("proto2")  # the same without the rule that names are UTF-8
Example, SequenceExample = _STRICT["Example"], _STRICT["SequenceExample"]


def decode(raw, name="Example"):
    """Return protobuf's message, None where it refuses the bytes, "not UTF-8" where it does for a name alone."""
    try:
        return _STRICT[name].FromString(raw)
    except ProtobufError:
        try:
            _LAX[name].FromString(raw)
        except ProtobufError:
            return None
        return "not UTF-8"


def feature_of(message):
    """Return the kind and values of protobuf's Feature; floats as bytes, with one NaN for all."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    values = list(getattr(message, kind).value)
    if kind == "float_list":
        return kind, _float_bytes(np.array(values, np.float64).astype(np.float32))
    return kind, values


def features_of(mapping):
    return {name: feature_of(message) for name, message in mapping.items()}


def as_protobuf(value):
    """Return one of our values as `feature_of` gives protobuf's."""
    if value is None:
        return None
    if isinstance(value, list):
        return "bytes_list", [bytes(item) for item in value]
    if value.dtype == np.float32:
        return "float_list", _float_bytes(value)
    assert value.dtype == np.int64
    return "int64_list", value.tolist()


def all_as_protobuf(features):
    return {name: as_protobuf(value) for name, value in features.items()}


def _float_bytes(array):
    # A NaN that is not quiet becomes quiet on its way through a Python float.
    return np.where(np.isnan(array), np.float32(np.nan), array).astype("<f4").tobytes()


# --- the wire, byte by byte ---


def varint(value, padding=0):
    """Return a varint, with so many bytes more than it needs."""
    parts = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    if padding:
        parts[-1] |= 0x80
        parts += b"\x80" * (padding - 1) + b"\0"
    return bytes(parts)


def delimited(number, body, padding=0):
    """Return a field with a length."""
    return varint(number << 3 | 2, padding) + varint(len(body), padding) + body


def number_field(number, value):
    """Return a field with a varint."""
    return varint(number << 3) + varint(value)


def int64_list(*bodies):
    """Return the field of a Feature whose list is made of these pieces."""
    return delimited(3, b"".join(bodies))


def float_list(*bodies):
    return delimited(2, b"".join(bodies))


def bytes_list(*values):
    return delimited(1, b"".join(delimited(1, value) for value in values))


def packed(*values):
    """Return a packed list of whole numbers, or of floats if there are any."""
    if any(isinstance(value, float) for value in values):
        return delimited(1, struct.pack(f"<{len(values)}f", *values))
    return delimited(1, b"".join(map(varint, values)))


def entry(*parts):
    """Return an entry of Features or FeatureLists, made of these fields."""
    return delimited(1, b"".join(parts))


def key(name):
    return delimited(1, name)


def value(*parts):
    return delimited(2, b"".join(parts))


def example(*entries):
    return delimited(1, b"".join(entries))


def feature(*parts, name=b"a"):
    """Return an Example with one feature."""
    return example(entry(key(name), value(*parts)))
