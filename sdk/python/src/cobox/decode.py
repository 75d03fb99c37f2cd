"""Decodes untrusted JSON into typed values: a missing field or a wrong type is an error, unknown fields are ignored."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar, Union

from . import errors
from .responses import Page
from .secret import Secret

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]


def decode(kind: type[T], body: bytes, url: str) -> T:
    """Decodes a JSON response as `kind`; raises `NotCobox`, which names the field but does not quote the untrusted content."""
    try:
        value: T = decoder_for(kind)(json.loads(body), "the response")
        return value
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, UnexpectedShape) else "it is not JSON"
        raise errors.NotCobox(f"{url} sent a response that can't be read: {why}") from None


def decode_page(kind: type[T], body: bytes, url: str) -> Page[T]:
    """Decodes one page of a list."""
    page = decode(_RawPage, body, url)
    try:
        items = [decoder_for(kind)(item, "an item") for item in page.items]
    except UnexpectedShape as error:
        raise errors.NotCobox(f"{url} sent a response that can't be read: {error}") from None
    return Page(items, page.next_cursor)


@dataclasses.dataclass(frozen=True)
class _RawPage:
    items: list[Any]
    next_cursor: str | None = None


class UnexpectedShape(ValueError):
    """A value does not have the type that the protocol defines."""


def decoder_for(kind: Any) -> Decoder:
    """Returns the decoder for a type; built once per type."""
    return _decoder_for(kind)


@functools.cache
def _decoder_for(kind: Any) -> Decoder:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if kind is datetime:
        return _datetime
    if kind is Secret:
        return lambda value, where: Secret(_plain(str)(value, where))
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin in (Union, types.UnionType):
        inner = [decoder_for(arg) for arg in args if arg is not type(None)]
        return _optional(inner[0]) if len(inner) == 1 and type(None) in args else _any_of(inner, type(None) in args)
    if origin in (list, tuple):
        return _list(decoder_for(args[0]), tuple if origin is tuple else list)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return _mapping(decoder_for(args[1]) if args else None)
    return _plain(kind)


def _plain(kind: type) -> Decoder:
    def read(value: Any, where: str) -> Any:
        # In JSON, true is not a number; in Python, bool is an int.
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise UnexpectedShape(f"{where} is not {kind.__name__}")

    return read


def _datetime(value: Any, where: str) -> datetime:
    try:
        when = datetime.fromisoformat(value.replace("Z", "+00:00")) if len(value) < 64 else None
    except (AttributeError, TypeError, ValueError):
        when = None
    if when is None or when.tzinfo is None:
        raise UnexpectedShape(f"{where} is not a timestamp with a time zone")
    return when


def _optional(inner: Decoder) -> Decoder:
    return lambda value, where: None if value is None else inner(value, where)


def _any_of(inner: list[Decoder], takes_none: bool) -> Decoder:
    def read(value: Any, where: str) -> Any:
        if value is None and takes_none:
            return None
        for one in inner:
            try:
                return one(value, where)
            except UnexpectedShape:
                continue
        raise UnexpectedShape(f"{where} has none of the allowed types")

    return read


def _list(inner: Decoder, make: type) -> Decoder:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise UnexpectedShape(f"{where} is not a list")
        return make([inner(item, where) for item in value])

    return read


def _mapping(inner: Decoder | None) -> Decoder:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise UnexpectedShape(f"{where} is not an object")
        return value if inner is None else {key: inner(item, f"{where}.{key[:64]}") for key, item in value.items()}

    return read


def _dataclass(kind: Any) -> Decoder:
    hints = typing.get_type_hints(kind)
    fields = []
    for f in dataclasses.fields(kind):
        if not f.init:
            continue
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        fields.append((f.name, f.metadata.get("name", f.name), decoder_for(hints[f.name]), needed))

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise UnexpectedShape(f"{where} is not an object")
        given = {}
        for name, key, inner, needed in fields:
            item = value.get(key)
            if item is not None:
                given[name] = inner(item, f"{where}.{key}")
            elif needed:
                given[name] = inner(None, f"{where}.{key}") if key in value else _missing(f"{where}.{key}")
        return kind(**given)

    return read


def _missing(where: str) -> Any:
    raise UnexpectedShape(f"{where} is missing")
