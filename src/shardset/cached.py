"""Properties that are worked out once, without a lock.

`functools.cached_property` of Python 3.11 has one lock for all objects of a class. A process that is forked while
another thread works a value out, as torch's workers are, would wait for that lock for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801 - stands where a decorator does
    """A property whose value is kept in the object. Threads that ask at once may each work it out: let it be pure."""

    def __init__(self, work_out: Callable[[Any], Value]) -> None:
        self._work_out = work_out
        self._name = work_out.__name__
        self.__doc__ = work_out.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        # From now on found there, as this has no __set__.
        value = instance.__dict__[self._name] = self._work_out(instance)
        return value
