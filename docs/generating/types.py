"""A msgspec type as text for a table: JSON types, bounds, choices. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import inspect as mi

_WORDS: dict[type, str] = {
    mi.StrType: "text",
    mi.BoolType: "true or false",
    mi.IntType: "whole number",
    mi.FloatType: "number",
    mi.AnyType: "anything",
    mi.DictType: "object",
}


def type_text(hint: Any) -> str:
    return _described(mi.type_info(hint))


def _described(kind: mi.Type) -> str:
    if isinstance(kind, mi.UnionType):
        parts = [_described(one) for one in kind.types if not isinstance(one, mi.NoneType)]
        return " or ".join(dict.fromkeys(parts))
    if isinstance(kind, mi.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, mi.ListType | mi.VarTupleType):
        most = f", at most {kind.max_length:,}" if kind.max_length is not None else ""
        return f"list of {_described(kind.item_type)}{most}"
    if isinstance(kind, mi.TupleType):
        return "pair of " + " and ".join(map(_described, kind.item_types))
    if isinstance(kind, mi.StructType):
        return f"object {_fields(kind)}" if kind.tag is None else f"`{kind.tag}` block"
    if isinstance(kind, mi.IntType | mi.FloatType):
        return _WORDS[type(kind)] + _bounds(kind)
    if isinstance(kind, mi.StrType) and kind.max_length is not None:
        return f"text, at most {kind.max_length:,} characters"
    return _WORDS.get(type(kind), type(kind).__name__)


def _fields(kind: mi.StructType) -> str:
    return "{" + ", ".join(f"`{field.encode_name}`" for field in kind.fields) + "}"


def _bounds(kind: mi.IntType | mi.FloatType) -> str:
    low, high = (kind.ge if kind.ge is not None else kind.gt), kind.le
    above = "above " if kind.gt is not None else ""
    if low is None and high is None:
        return ""
    if high is None:
        return f", {above}{_number(low)} or more"
    return f", {above}{_number(low)} to {_number(high)}"


def _number(value: float | None) -> str:
    if value is None:
        return "any"
    whole = int(value)
    for power in (63, 32, 31):
        if whole in (1 << power, (1 << power) - 1):
            return f"2^{power}" + ("" if whole == 1 << power else "−1")
    return f"{whole:,}" if whole == value and abs(whole) < 10**10 else f"{value:g}"
