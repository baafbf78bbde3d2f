"""Decoding whole samples: each field by the first handler that takes it, with what to do remembered by its name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import DecodeError, MissingExtraError

from .handlers import DEFAULT_POST, DEFAULT_PRE, Continue, NamedHandler, image_handler
from .registry import field_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .handlers import Handler
    from .registry import Decode

_NAMES_KEPT: Final = 4096
"""Names of fields that a decoder remembers. Where keys have dots in them, every sample brings new ones."""


class SampleDecoder:
    """Decodes the fields of samples.

    Each field goes to the handlers before, those that are given, and those after, in this order, until one returns
    something else than None. A field that none takes stays bytes. Fields that begin with ``__`` go to no handler:
    their bytes become text if they are UTF-8.

    Pickles where its handlers do. Safe to share between threads if they are.

    Args:
        handlers: Functions of (name with its dot, payload), or words for the form of images (`images.IMAGE_SPECS`).
        pre: The handlers before; None for `handlers.DEFAULT_PRE`, which unpacks ``.gz``.
        post: The handlers after; None for `handlers.DEFAULT_POST`, the table of `registry.USUAL`.
        only: Whole names of the fields to decode, as a list or separated by white space; None for all.
        partial: Leave values that are not bytes as they are, where they would be an error.

    Raises:
        ValueError: A word is none of `images.IMAGE_SPECS`.
        TypeError: A handler is neither a word nor callable.
    """

    def __init__(
        self,
        handlers: Iterable[Handler | str] = (),
        pre: Iterable[Handler | str] | None = None,
        post: Iterable[Handler | str] | None = None,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
    ) -> None:
        parts = (DEFAULT_PRE if pre is None else pre, handlers, DEFAULT_POST if post is None else post)
        self.handlers: tuple[Handler, ...] = tuple(_as_handler(each) for part in parts for each in part)
        self.only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self.partial = partial
        self._actions: dict[str, Decode | None] = {}
        self._chains: dict[tuple[str, int], list[tuple[int, Decode, bool]]] = {}

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new sample with the values of the fields.

        Raises:
            DecodeError: A field cannot be decoded, or is not bytes; with the field, the sample and where it is from.
            MissingExtraError: A package that is needed is not installed.
        """
        if not isinstance(sample, dict):
            raise DecodeError(
                f"decoding takes samples, which are dicts, and got a {type(sample).__name__}",
                hint="put decode before stages that make other things of them, such as to_tuple and batched",
            )
        decoded: dict[str, Any] = {}
        actions = self._actions
        name = ""
        try:
            for name, value in sample.items():
                try:
                    action = actions[name]
                except KeyError:
                    action = self._learn(name)
                if action is None:
                    decoded[name] = value
                elif isinstance(value, bytes):
                    decoded[name] = action(value)
                else:
                    decoded[name] = self._as_it_is(name, value)
        except MissingExtraError:
            raise
        except Exception as error:
            raise sample_error(error, name, sample) from error
        return decoded

    def decode_field(self, field: str, payload: bytes) -> Any:
        """Return the value of one field. Errors come as the handlers raise them."""
        return self._ask("." + field, payload, 0)

    def _as_it_is(self, name: str, value: Any) -> Any:
        """Return a value that is not bytes, if that is all right."""
        if self.partial or name[:2] == "__":
            return value
        what = "nothing (None)" if value is None else f"a value of type {type(value).__name__}"
        raise DecodeError(
            f"it holds {what}, where bytes are expected",
            hint="if it has been decoded before, decode(..., partial=True) leaves it as it is",
        )

    def _learn(self, name: str) -> Decode | None:
        """Return what to do with a field, and remember it: None leaves it as it is, whatever it is."""
        action: Decode | None
        if name[:2] == "__":
            action = _as_text
        elif self.only is not None and name not in self.only:
            action = None
        else:
            chain = self._chain("." + name, 0)
            if not chain:
                action = _unchanged
            elif chain[0][2]:
                action = chain[0][1]
            else:
                action = partial(self.decode_field, name)
        if len(self._actions) >= _NAMES_KEPT:
            self._actions.clear()
        self._actions[name] = action
        return action

    def _chain(self, key: str, start: int) -> list[tuple[int, Decode, bool]]:
        """Return (place, function, whether it is final) of the handlers from `start` on that may take a name."""
        chain = self._chains.get((key, start))
        if chain is None:
            chain = list(self._candidates(key, start))
            if len(self._chains) >= _NAMES_KEPT:
                self._chains.clear()
            self._chains[key, start] = chain
        return chain

    def _candidates(self, key: str, start: int) -> Iterable[tuple[int, Decode, bool]]:
        for place, handler in enumerate(self.handlers[start:], start):
            if not isinstance(handler, NamedHandler):
                yield place, partial(handler, key), False
            elif (decode := handler.find(key)) is not None:
                yield place, decode, handler.is_final
                if handler.is_final:
                    return

    def _ask(self, key: str, payload: bytes, start: int) -> Any:
        for place, decode, is_final in self._chain(key, start):
            value = decode(payload)
            if isinstance(value, Continue):
                return self._ask(value.key, value.data, place + 1)
            if is_final or value is not None:
                return value
        return payload

    def __getstate__(self) -> dict[str, Any]:
        return {"handlers": self.handlers, "only": self.only, "partial": self.partial}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _actions={}, _chains={})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.handlers))})"


def _as_handler(given: Handler | str) -> Handler:
    if isinstance(given, str):
        return image_handler(given)
    if not callable(given):
        raise TypeError(f"{given!r} is no handler: neither a function of (name, payload) nor the word for an image")
    return given


def _unchanged(payload: bytes) -> bytes:
    return payload


def _as_text(payload: bytes) -> str | bytes:
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError:
        return payload


def sample_error(error: Exception, field: str, sample: dict[str, Any]) -> DecodeError:
    """Return the error to raise, from `error`, that says which field of which sample it is about."""
    key, shard = sample.get("__key__"), sample.get("__url__")
    placed = field_error(
        error, field, shard=shard if isinstance(shard, str) else None, key=key if isinstance(key, str) else None
    )
    placed.sample = sample
    return placed
