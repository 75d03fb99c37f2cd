"""Reads JSON from a stranger into typed answers: what is missing or of another type is an error, what is unknown is passed over."""

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
from .answers import Page
from .secret import Secret

T = TypeVar("T")
Read = Callable[[Any, str], Any]


def decode(kind: type[T], body: bytes, url: str) -> T:
    """An answer's JSON as a `kind`; raises `NotCobox`, naming the field but none of the stranger's words."""
    try:
        value: T = reader(kind)(json.loads(body), "the answer")
        return value
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, Unexpected) else "it is not JSON"
        raise errors.NotCobox(f"{url} gave an answer that can't be read: {why}") from None


def decode_page(kind: type[T], body: bytes, url: str) -> Page[T]:
    """One page of a list."""
    page = decode(_RawPage, body, url)
    try:
        items = [reader(kind)(item, "an item") for item in page.items]
    except Unexpected as error:
        raise errors.NotCobox(f"{url} gave an answer that can't be read: {error}") from None
    return Page(items, page.next_cursor)


@dataclasses.dataclass(frozen=True)
class _RawPage:
    items: list[Any]
    next_cursor: str | None = None


class Unexpected(ValueError):
    """A value of another type than the protocol says."""


def reader(kind: Any) -> Read:
    """How to read a type: made once, used for every value of it."""
    return _reader(kind)


@functools.cache
def _reader(kind: Any) -> Read:
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
        inner = [reader(arg) for arg in args if arg is not type(None)]
        return _optional(inner[0]) if len(inner) == 1 and type(None) in args else _any_of(inner, type(None) in args)
    if origin in (list, tuple):
        return _list(reader(args[0]), tuple if origin is tuple else list)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return _mapping(reader(args[1]) if args else None)
    return _plain(kind)


def _plain(kind: type) -> Read:
    def read(value: Any, where: str) -> Any:
        # JSON's true is no number, though Python's is.
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise Unexpected(f"{where} is not {kind.__name__}")

    return read


def _datetime(value: Any, where: str) -> datetime:
    try:
        when = datetime.fromisoformat(value.replace("Z", "+00:00")) if len(value) < 64 else None
    except (AttributeError, TypeError, ValueError):
        when = None
    if when is None or when.tzinfo is None:
        raise Unexpected(f"{where} is not a time")
    return when


def _optional(inner: Read) -> Read:
    return lambda value, where: None if value is None else inner(value, where)


def _any_of(inner: list[Read], takes_none: bool) -> Read:
    def read(value: Any, where: str) -> Any:
        if value is None and takes_none:
            return None
        for one in inner:
            try:
                return one(value, where)
            except Unexpected:
                continue
        raise Unexpected(f"{where} is of no type that it may be")

    return read


def _list(inner: Read, make: type) -> Read:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise Unexpected(f"{where} is not a list")
        return make([inner(item, where) for item in value])

    return read


def _mapping(inner: Read | None) -> Read:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Unexpected(f"{where} is not an object")
        return value if inner is None else {key: inner(item, f"{where}.{key[:64]}") for key, item in value.items()}

    return read


def _dataclass(kind: Any) -> Read:
    hints = typing.get_type_hints(kind)
    fields = []
    for f in dataclasses.fields(kind):
        if not f.init:
            continue
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        fields.append((f.name, f.metadata.get("name", f.name), reader(hints[f.name]), needed))

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Unexpected(f"{where} is not an object")
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
    raise Unexpected(f"{where} is missing")
