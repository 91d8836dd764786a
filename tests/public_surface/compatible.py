"""Tell what of a stored surface is gone or changed. What is new passes, unless it breaks those who use the old."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

KNOWN_TYPES = {*dir(builtins), *typing.__all__, *collections.abc.__all__}


def lost(stored: Any, now: Any, at: str = "") -> Iterator[str]:
    """Yield what is gone: keys of mappings, elements of lists, other values that differ."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key, value in stored.items():
            if key not in now:
                yield f"{at}{key} was removed"
            else:
                yield from lost(value, now[key], f"{at}{key}: ")
    elif isinstance(stored, list) and isinstance(now, list):
        yield from (f"{at}{one!r} was removed" for one in stored if one not in now)
    elif stored != now:
        yield f"{at}was {stored!r}, is {now!r}"


def broken_names(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield every Python name that is gone, or that cannot be used as before."""
    for name, old in stored.items():
        new = now.get(name)
        if new is None:
            yield f"{name} was removed"
        elif new["kind"] != old["kind"]:
            yield f"{name} was a {old['kind']}, is a {new['kind']}"
        else:
            yield from broken_call(old.get("signature", ""), new.get("signature", ""), name)
            yield from lost(old.get("bases", []), new.get("bases", []), f"{name} base class ")
            yield from _broken_members(old.get("members", {}), new.get("members", {}), name)


def _broken_members(stored: Mapping[str, str], now: Mapping[str, str], at: str) -> Iterator[str]:
    for name, old in stored.items():
        new = now.get(name)
        if new is None:
            yield f"{at}.{name} was removed"
        elif old.startswith("(") and new.startswith("("):
            yield from broken_call(old, new, f"{at}.{name}")
        elif old.startswith("(") != new.startswith("("):
            yield f"{at}.{name} was {old}, is {new}"


def broken_call(stored: str, now: str, at: str) -> Iterator[str]:
    """Yield why a call that was right for the stored signature may be wrong for the present one."""
    if stored == now or not stored:
        return
    if not now:
        yield f"{at}: was {stored}, has no signature of its own"
        return
    old, new = _parse(stored), _parse(now)
    for name, one in old.items():
        other = new.get(name)
        if other is None:
            yield f"{at}: parameter {name} was removed"
            continue
        if one["kind"] != other["kind"] and other["kind"] != "either":
            yield f"{at}: parameter {name} was {one['kind']}, is {other['kind']}"
        elif one["place"] is not None and one["place"] != other["place"]:
            yield f"{at}: parameter {name} was at place {one['place']}, is at {other['place']}"
        if one["default"] != other["default"] and (one["default"] is not None or one["kind"] == "return"):
            yield f"{at}: default of {name} was {one['default']}, is {other['default'] or 'required'}"
        if not _takes(one["type"], other["type"], exactly=name == "return"):
            yield f"{at}: type of {name} was {one['type']}, is {other['type']}"
    for name in new.keys() - old.keys():
        if new[name]["default"] is None and not new[name]["kind"].startswith("*") and name != "return":
            yield f"{at}: the new parameter {name} has no default"


def _parse(signature: str) -> dict[str, dict[str, Any]]:
    """Return parameter -> kind, place among positional ones, default and type; also `return`."""
    [function] = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    found: dict[str, dict[str, Any]] = {}
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    for place, (one, default) in enumerate(zip(positional, defaults)):
        kind = "positional" if one in given.posonlyargs else "either"
        found[one.arg] = {"kind": kind, "place": place, "default": _text(default), "type": _text(one.annotation)}
    for one, default in zip(given.kwonlyargs, given.kw_defaults):
        found[one.arg] = {"kind": "keyword", "place": None, "default": _text(default), "type": _text(one.annotation)}
    for stars, one in (("*", given.vararg), ("**", given.kwarg)):
        if one is not None:
            found[one.arg] = {"kind": stars, "place": None, "default": None, "type": _text(one.annotation)}
    if function.returns is not None:
        found["return"] = {"kind": "return", "place": None, "default": None, "type": _text(function.returns)}
    return found


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _takes(stored: str | None, now: str | None, exactly: bool) -> bool:
    """Whether a type accepts what the stored one did; names of our own types may change, `...` takes anything."""
    if stored is None or now is None or stored == now:
        return stored == now or not exactly
    old, new = (set(_alternatives(_anonymous(text))) for text in (stored, now))
    return old == new if exactly else old <= new or "Any" in new


def _anonymous(text: str) -> str:
    """Return the annotation with `_` for every name that is not Python's own."""
    words = re.compile(r"'[^']*'|[A-Za-z_]\w*")
    return words.sub(lambda found: found[0] if found[0][0] == "'" or found[0] in KNOWN_TYPES else "_", text)


def _alternatives(text: str) -> list[str]:
    node = ast.parse(text, mode="eval").body
    parts: list[ast.expr] = [node]
    while any(isinstance(part, ast.BinOp) for part in parts):
        parts = [
            side for part in parts for side in ((part.left, part.right) if isinstance(part, ast.BinOp) else (part,))
        ]
    return [ast.unparse(part) for part in parts]


class Schemas:
    """JSON schemas by name with their definitions, the stored ones and the present ones."""

    def __init__(self, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self._stored, self._now = stored, now
        self._seen: set[tuple[str, str]] = set()

    def broken(self, name: str) -> Iterator[str]:
        """Yield fields that are gone, retyped, newly required or no longer sure to be there."""
        self._seen.clear()
        yield from self._differences(self._stored[name], self._now[name], name)

    def _differences(self, old: Mapping[str, Any], new: Mapping[str, Any], at: str) -> Iterator[str]:
        pair = str(old.get("$ref", "")), str(new.get("$ref", ""))
        if all(pair):
            if pair in self._seen:
                return
            self._seen.add(pair)
        old_ones, new_ones = _branches(old, self._stored), _branches(new, self._now)
        for kind, one in old_ones.items():
            if kind in new_ones:
                yield from self._same_kind(one, new_ones[kind], f"{at} ({kind})" if len(old_ones) > 2 else at)
            elif len(old_ones) == 1:
                yield f"{at}: was {kind}, is {' or '.join(new_ones)}"
            else:
                yield f"{at}: {kind} was removed"

    def _same_kind(self, old: Mapping[str, Any], new: Mapping[str, Any], at: str) -> Iterator[str]:
        for part in ("items", "additionalProperties"):
            if isinstance(old.get(part), dict) and isinstance(new.get(part), dict):
                yield from self._differences(old[part], new[part], f"{at}[]")
            elif old.get(part) != new.get(part) and part in old:
                yield f"{at}: {part} was {old[part]}, is {new.get(part)}"
        for name in ("minItems", "maxItems"):
            if old.get(name) != new.get(name):
                yield f"{at}: {name} was {old.get(name)}, is {new.get(name)}"
        for one, other in zip(old.get("prefixItems", ()), new.get("prefixItems", ())):
            yield from self._differences(one, other, f"{at}[]")
        yield from lost(old.get("enum", []), new.get("enum", []), f"{at}: ")
        fields, now = old.get("properties", {}), new.get("properties", {})
        needed, needed_now = set(old.get("required", ())), set(new.get("required", ()))
        for name, field in fields.items():
            if name not in now:
                yield f"{at}.{name} was removed or renamed"
                continue
            yield from self._differences(field, now[name], f"{at}.{name}")
            if field.get("default") != now[name].get("default"):
                yield (
                    f"{at}.{name}: default was {field.get('default')!r}, is {now[name].get('default')!r}; "
                    "files leave out defaults"
                )
        yield from (f"{at}.{name}: files of before do not have it; give it a default" for name in needed_now - needed)
        yield from (f"{at}.{name}: was in every document, may be missing" for name in needed & set(now) - needed_now)


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return kind -> alternative of a schema, unions within unions taken apart and references followed."""
    if "$ref" in schema:
        return _branches(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return {kind: one for part in schema["anyOf"] for kind, one in _branches(part, root).items()}
    tags = [
        f"{name}={field['enum'][0]}"
        for name, field in schema.get("properties", {}).items()
        if list(field) == ["enum"] and len(field["enum"]) == 1
    ]
    kind = schema.get("type") or ("one of some words" if "enum" in schema else "anything")
    return {" ".join([str(kind), *tags]): schema}
