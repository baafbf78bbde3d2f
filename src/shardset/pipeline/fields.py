"""Stages about the fields of samples: pick them into tuples, rename them, pass them through functions.

The arguments are those of webdataset's stages of the same names. A field that a sample lacks is an error of the code
``missing_field`` (`MissingFieldError`), unless the run's policy has a default for it, which is then counted under it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import DuplicateFieldError, MissingFieldError

from .passage import Passage
from .run import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .run import Handler

_LAYOUTS_KEPT: Final = 256


def getfirst(
    a: Mapping[str, Any], keys: str | Sequence[str], default: Any = None, *, missing_is_error: bool = True
) -> Any:
    """Return the value of the first of several fields that a sample has.

    Args:
        a: The sample.
        keys: Names of fields, as a list or with semicolons between.
        default: What to return if there is none of them.
        missing_is_error: Raise instead.

    Raises:
        MissingFieldError: The sample has none of them.
        ValueError: A name has a space.
    """
    names = alternatives(keys)
    for name in names:
        if name in a:
            return a[name]
    if missing_is_error:
        raise _missing(names, a)
    return default


def alternatives(field: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names that ``"png;jpg"``, or a list of names, stands for.

    Raises:
        ValueError: A name has a space.
    """
    names = tuple(field.split(";")) if isinstance(field, str) else tuple(field)
    for name in names:
        if " " in name:
            raise ValueError(
                f"{name!r}: no field has a space; give several fields as several arguments, or as one string"
            )
    return names


def to_tuple(
    source: Iterable[Any],
    *fields: str | Sequence[str],
    handler: Handler | None = None,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
    step: Step | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Make a tuple of some fields of each sample, also where it is one field.

    Args:
        source: Samples, as dicts.
        fields: Names of fields; alternatives, of which the first that a sample has is taken, with semicolons between or
            as a list. A single argument may name several fields, with spaces between.
        handler: Decides about errors.
        missing_is_error: Otherwise None stands for a field that is missing.
        none_is_error: Whether a value of None is an error, of the code ``none_field``; None for as
            `missing_is_error` says.
        step: The step of a run.

    Raises:
        ValueError: No field is named, or a name has a space.
    """
    if len(fields) == 1 and isinstance(fields[0], str):
        fields = tuple(fields[0].split())
    if not fields:
        raise ValueError("to_tuple: no field is named, so nothing would be left of the samples")
    step = step or Step(name="to_tuple")
    wanted = [alternatives(field) for field in fields]
    rejects_none = missing_is_error if none_is_error is None else none_is_error
    pick = _picker(wanted)
    passage = Passage(step)
    for sample in source:
        try:
            values = pick(sample)
        except (LookupError, TypeError):
            values = None  # the slow way says what is wrong
        if values is None or (rejects_none and _has_none(values)):
            try:
                values = tuple([_value(sample, names, step, missing_is_error, rejects_none) for names in wanted])
            except Exception as error:  # noqa: BLE001 - settled
                if passage.settle(error, _code_of(error, sample, "to_tuple_failed"), sample, handler):
                    continue
                break
        passage.passed = True
        yield values
    passage.finish()


def _picker(wanted: list[tuple[str, ...]]) -> Callable[[Any], tuple[Any, ...] | None]:
    if any(len(names) != 1 for names in wanted):
        return lambda sample: tuple([_present(sample, names) for names in wanted])
    first, *more = (names[0] for names in wanted)
    return itemgetter(first, *more) if more else lambda sample: (sample[first],)


def _present(sample: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in sample:
            return sample[name]
    raise KeyError(names)


def _has_none(values: tuple[Any, ...]) -> bool:
    for value in values:  # noqa: SIM110 - for each sample; and `in` would compare arrays
        if value is None:
            return True
    return False


def _value(sample: Any, names: tuple[str, ...], step: Step, missing_is_error: bool, rejects_none: bool) -> Any:
    found = [name for name in names if name in _dict(sample)]
    if not found:
        return _take(sample, names, step, missing_is_error)
    value = sample[found[0]]
    if value is None and rejects_none:
        raise _missing(found[:1], sample, f"sample {sample.get('__key__')!r}: the field {found[0]!r} is None")
    return value


def _take(sample: Any, names: Sequence[str], step: Step, missing_is_error: bool = True) -> Any:
    """Return the first of the fields, else a default of the policy, else None if that is allowed."""
    for name in names:
        if name in sample:
            return sample[name]
    defaults = step.run.policy.defaults
    for name in names:
        if name in defaults:
            step.drop("missing_field", sample, f"no {name!r}")
            return defaults[name]
    if missing_is_error:
        raise _missing(names, sample)
    return None


def _missing(names: Sequence[str], sample: Mapping[str, Any], what: str = "") -> MissingFieldError:
    fields = [name for name in sample if not str(name).startswith("__")]
    key, shard = sample.get("__key__"), sample.get("__url__")
    if not what:
        asked = " or ".join(repr(name) for name in names)
        what = f"sample {key!r} has no field {asked}, only {', '.join(map(repr, fields)) or 'none at all'}"
    lower = [name for name in names if name not in sample and name.lower() in sample]
    return MissingFieldError(
        what,
        field=names[0] if names else None,
        shard=shard if isinstance(shard, str) else None,
        key=key if isinstance(key, str) else None,
        hint="fields are in lower case, whatever the members' names" if lower else None,
    )


def _code_of(error: Exception, sample: Any, otherwise: str) -> str:
    """Return the code of an error: a field that is not there, one that is None, or something else."""
    if not isinstance(error, MissingFieldError):
        return otherwise
    return "none_field" if error.field in sample else "missing_field"


def _of(sample: Any, field: str) -> Any:
    if field not in _dict(sample):
        raise _missing([field], sample)
    return sample[field]


def _dict(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise TypeError(f"a sample with fields is a dict, not a {type(sample).__name__}")
    return sample


def _together(stage: str, given: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Join what is given as a mapping with what is given by name."""
    if given is not None and not hasattr(given, "items"):
        raise TypeError(f"{stage}: {given!r} is no mapping of fields; a handler is given by name, handler=...")
    return {**(given or {}), **more}


def rename(
    source: Iterable[Any],
    names: Mapping[str, str | Sequence[str]] | None = None,
    /,
    handler: Handler | None = None,
    keep: bool = True,
    *,
    step: Step | None = None,
    **new: str | Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Rename fields: ``image="jpg;png"`` gives the first of ``jpg`` and ``png`` that a sample has the name ``image``.

    All the alternatives that are named are taken out of the sample. Where a new name was that of yet another field,
    this is replaced, and counted as ``overwritten_field``.

    Args:
        source: Samples, as dicts.
        names: Old names, with semicolons between or as a list, by new name; for new names that are also those of
            arguments here.
        handler: Decides about errors.
        keep: Keep the other fields; otherwise everything else goes, also ``__key__`` and ``__url__``.
        step: The step of a run.
        new: Old names by new name.

    Raises:
        ValueError: An old name has a space.
    """
    step = step or Step(name="rename")
    wanted = [(name, alternatives(old)) for name, old in _together("rename", names, new).items()]
    replaced = {old for _, names in wanted for old in names}
    passage = Passage(step)
    for sample in source:
        try:
            result = {name: value for name, value in _dict(sample).items() if name not in replaced} if keep else {}
            fresh = {name: _take(sample, names, step) for name, names in wanted}
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, _code_of(error, sample, "rename_failed"), sample, handler):
                continue
            break
        if keep and not result.keys().isdisjoint(fresh):
            over = ", ".join(repr(name) for name in fresh if name in result)
            step.drop("overwritten_field", sample, f"another field took the name of {over}")
        result.update(fresh)
        passage.passed = True
        yield result
    passage.finish()


def map_dict(
    source: Iterable[Any],
    functions: Mapping[str, Callable[[Any], Any]] | None = None,
    /,
    handler: Handler | None = None,
    *,
    step: Step | None = None,
    **more: Callable[[Any], Any],
) -> Iterator[dict[str, Any]]:
    """Replace values of each sample, in place, by what a function for each field makes of them.

    A sample that lacks one of the fields is an error.

    Args:
        source: Samples, as dicts.
        functions: Function by field; for fields whose names are also those of arguments here.
        handler: Decides about errors.
        step: The step of a run.
        more: Function by field.

    Raises:
        ValueError: No field is named.
        TypeError: Something given is no function.
    """
    pairs = list(_together("map_dict", functions, more).items())
    if not pairs:
        raise ValueError("map_dict: no field is named")
    for field, function in pairs:
        if not callable(function):
            raise TypeError(f"map_dict: no function for {field!r}: {function!r}")
    passage = Passage(step or Step(name="map_dict"))
    for sample in source:
        try:
            for field, function in pairs:
                sample[field] = function(_of(sample, field))
        except Exception as error:  # noqa: BLE001 - settled
            if passage.settle(error, _code_of(error, sample, "map_failed"), sample, handler):
                continue
            break
        passage.passed = True
        yield sample
    passage.finish()


def extract_keys(
    source: Iterable[Any],
    *patterns: str | Sequence[str],
    duplicate_is_error: bool = True,
    ignore_missing: bool = False,
    handler: Handler | None = None,
    step: Step | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Make a tuple of the fields that match patterns: for each pattern, the value of the field that matches it.

    Args:
        source: Samples, as dicts.
        patterns: As `fnmatch` takes them, with alternatives as in ``"*.jpg;*.png"`` or as a list. Each is held against
            the field's name, and against the name with a dot before it. ``__key__`` and ``__url__`` count as fields.
        duplicate_is_error: Whether several fields that match one pattern are an error, of the code
            ``ambiguous_field``; otherwise the first is taken.
        ignore_missing: Leave out what is missing. The tuple is then SHORTER, and what comes behind moves forward, as it
            does in webdataset: ``to_tuple(..., missing_is_error=False)`` gives tuples of one length.
        handler: Decides about errors.
        step: The step of a run.
    """
    step = step or Step(name="extract_keys")
    wanted = [tuple(pattern.split(";")) if isinstance(pattern, str) else tuple(pattern) for pattern in patterns]

    def find(names: tuple[str, ...], sample: dict[str, Any]) -> list[str | tuple[str, ...]]:
        found: list[str | tuple[str, ...]] = []
        for pattern in wanted:
            matches = [name for name in names if any(_matches(name, part) for part in pattern)]
            if len(matches) > 1 and duplicate_is_error:
                raise _ambiguous(f"{', '.join(matches)} all match {';'.join(pattern)}", matches[1], sample)
            if matches:
                found.append(matches[0])
            elif not ignore_missing:
                found.append(pattern)  # a default of the policy, or an error for each sample
        return found

    layouts: dict[tuple[str, ...], list[str | tuple[str, ...]]] = {}
    passage = Passage(step)
    for sample in source:
        try:
            names = tuple(_dict(sample))
            layout = layouts.get(names)
            if layout is None:
                layout = _kept(layouts, names, find(names, sample))
            values = tuple([sample[at] if isinstance(at, str) else _take(sample, at, step) for at in layout])
        except Exception as error:  # noqa: BLE001 - settled
            code = "ambiguous_field" if isinstance(error, DuplicateFieldError) else "extract_keys_failed"
            if passage.settle(error, _code_of(error, sample, code), sample, handler):
                continue
            break
        passage.passed = True
        yield values
    passage.finish()


def rename_keys(
    source: Iterable[Any],
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    handler: Handler | None = None,
    step: Step | None = None,
    **new: str,
) -> Iterator[dict[str, Any]]:
    """Rename fields by patterns: ``image="*.jpg"``, or ``("image", "*.jpg")``, names what matches ``image``.

    Args:
        source: Samples, as dicts.
        args: Pairs of a new name and a pattern, as `fnmatch` takes it. It is held against the last part of the
            field's name, in lower case. Of several patterns that match a field the last wins.
        keep_unselected: Keep fields that no pattern matches; otherwise they go, also ``__key__`` and ``__url__``.
        must_match: Whether a pattern that matches nothing is an error, of the code ``missing_field``.
        duplicate_is_error: Whether two fields that get one name are an error, of the code ``ambiguous_field``;
            otherwise the first stays.
        handler: Decides about errors.
        step: The step of a run.
        new: Patterns by new name.
    """
    rules = [*args, *new.items()]

    layouts: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    passage = Passage(step or Step(name="rename_keys"))
    for sample in source:
        try:
            names = tuple(_dict(sample))
            layout = layouts.get(names)
            if layout is None:
                found = _renamed(sample, rules, keep_unselected=keep_unselected, duplicate_is_error=duplicate_is_error)
                if must_match:
                    _check_matched(sample, rules)
                layout = _kept(layouts, names, found)
        except Exception as error:  # noqa: BLE001 - settled
            code = "ambiguous_field" if isinstance(error, DuplicateFieldError) else "rename_keys_failed"
            if passage.settle(error, _code_of(error, sample, code), sample, handler):
                continue
            break
        passage.passed = True
        yield {name: sample[old] for name, old in layout}
    passage.finish()


def _renamed(
    sample: dict[str, Any], rules: list[tuple[str, str]], *, keep_unselected: bool, duplicate_is_error: bool
) -> list[tuple[str, str]]:
    """Return pairs of a new name and the old one."""
    found: dict[str, str] = {}
    for name in sample:
        rule = _rule_for(name, rules)
        if rule is None and not keep_unselected:
            continue
        new = name if rule is None else rule[0]
        if new not in found:
            found[new] = name
        elif duplicate_is_error:
            raise _ambiguous(f"{found[new]!r} and {name!r} both become {new!r}", name, sample)
    return list(found.items())


def _rule_for(name: str, rules: list[tuple[str, str]]) -> tuple[str, str] | None:
    last = name.rpartition("/")[2].lower()
    return next((rule for rule in reversed(rules) if fnmatchcase(last, rule[1])), None)


def _check_matched(sample: dict[str, Any], rules: list[tuple[str, str]]) -> None:
    matched = {rule[1] for rule in (_rule_for(name, rules) for name in sample) if rule is not None}
    for _, pattern in rules:
        if pattern not in matched:
            raise _missing([pattern], sample)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def _kept(layouts: dict[tuple[str, ...], Any], names: tuple[str, ...], layout: Any) -> Any:
    """Remember what was found out about samples with these fields; most datasets have few such layouts."""
    if len(layouts) >= _LAYOUTS_KEPT:
        layouts.clear()
    layouts[names] = layout
    return layout


def _ambiguous(what: str, field: str, sample: Mapping[str, Any]) -> DuplicateFieldError:
    key, shard = sample.get("__key__"), sample.get("__url__")
    return DuplicateFieldError(
        f"sample {key!r}: {what}",
        field=field,
        shard=shard if isinstance(shard, str) else None,
        key=key if isinstance(key, str) else None,
    )
