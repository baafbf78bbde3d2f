"""Names of many shards in one text: ``{000..063}``, ``train@64``, ``train-00000-of-00064``. Text only, no files.

Braces are those of the shell and of the `braceexpand` package, which WebDataset users write; ``@`` is the notation of
TensorFlow's sharded files, whose names end in ``-00000-of-00064`` with at least five digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, product
from math import prod
from typing import Final, Literal, NamedTuple

_MOST_NAMES: Final = 10_000_000
_DEEPEST: Final = 64
_NUMBERS: Final = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.(-?[0-9]{1,18}))?")
_LETTERS: Final = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]{1,18}))?")
_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PADDED: Final = re.compile(r"-?0[0-9]")
_GLOB: Final = re.compile(r"[*?]|\[!?[^/][^/\]]*\]", re.DOTALL)
_NUMBERED: Final = re.compile(r"(.*)-([0-9]{1,18})-of-([0-9]{1,18})(?![0-9])(.*)", re.DOTALL)
_RECORDS: Final = re.compile(
    r"(?:\.(?:tfrecords?|tf_records?|tfrec|tfr|records?)|_tfrecords?)(?:\.(?:gz|gzip|zlib))?\Z", re.IGNORECASE
)
_SQUEEZED: Final = re.compile(r"(?:\.(?:gz|gzip|zlib))?", re.IGNORECASE)
_SQUEEZED_END: Final = re.compile(r"\.(?:gz|gzip|zlib)\Z", re.IGNORECASE)
_COUNTED: Final = re.compile(r"(.*[^/])@([0-9]{1,18}|\*)(\.[^/@]*)?", re.DOTALL)


ShardFormat = Literal["tar", "tfrecord"]


class NumberedName(NamedTuple):
    """The parts of a name like ``train-00003-of-00064.tfrecord``.

    Attributes:
        prefix: What stands before the hyphen, folders included: ``"train"``.
        number: Which shard it is: 3. Counted from 0 by custom; nothing is checked here.
        total: How many shards there are: 64.
        suffix: What follows: ``".tfrecord"``, or nothing.
    """

    prefix: str
    number: int
    total: int
    suffix: str


@dataclass(frozen=True, slots=True)
class _Range:
    """``{000..063}`` or ``{a..e}``: numbers with the width to pad them to, or (width None) places in the alphabet."""

    numbers: range
    width: int | None

    def count(self) -> int:
        return len(self.numbers)

    def spell(self) -> list[str]:
        if self.width is None:
            return [_ALPHABET[number] for number in self.numbers]
        return [f"{number:0{self.width}d}" for number in self.numbers]


@dataclass(frozen=True, slots=True)
class _Choice:
    """``{a,b}``: patterns of which one stands in this place."""

    options: list[_Pattern]

    def count(self) -> int:
        return sum(map(_count, self.options))

    def spell(self) -> list[str]:
        return [name for option in self.options for name in _spell(option)]


# What stands one behind the other: text as it is, and places where several things may stand.
_Pattern = list[str | _Range | _Choice]


def expand_braces(text: str) -> list[str]:
    """Return all names that a brace pattern stands for, the leftmost place changing slowest, as the shell does.

    ``{000..063}`` counts, padded with zeros to the longer end if either end is; ``{0..9..3}`` in steps; ``{9..0}``
    down. ``{a..e}`` goes through letters, capitals before small ones. ``{a,b}`` chooses; choices may be empty and may
    hold braces themselves. Any other brace, paired or not, is left as it stands. A backslash is an ordinary character,
    as Windows paths need it, so a brace cannot be escaped.

    Raises:
        ValueError: There are more than ten million names (found before any is made), or braces nested 64 deep.
    """
    pattern = _parse(text, 0, len(text), _pair_braces(text), 0)
    count = _count(pattern)
    if count > _MOST_NAMES:
        raise ValueError(f"{_brief(text)} stands for more than {_MOST_NAMES} names")
    return _spell(pattern)


def has_braces(text: str) -> bool:
    """Tell whether a text is a brace pattern: whether `expand_braces` finds anything in it to expand.

    Raises:
        ValueError: Braces are nested 64 deep.
    """
    return any(not isinstance(piece, str) for piece in _parse(text, 0, len(text), _pair_braces(text), 0))


def has_glob(text: str) -> bool:
    """Tell whether a text has glob characters: ``*``, ``?``, or ``[...]`` in one part of the path.

    The ``?`` of an http url's query looks the same; a caller who may meet one asks about the part before it.
    """
    return _GLOB.search(text) is not None


def glob_folder(pattern: str) -> str:
    """Return the part of a glob that is a folder without glob characters: ``s3://b/a/*/x.tar`` lies in ``s3://b/a``."""
    match = _GLOB.search(pattern)
    return pattern.rpartition("/")[0] if match is None else pattern[: match.start()].rpartition("/")[0]


def matches_glob(path: str, pattern: str) -> bool:
    """Tell whether a glob matches a whole path, as it would in the shell.

    ``*``, ``?`` and ``[...]`` stay within one part of the path, and ``**`` as a whole part stands for any number of
    them. None of them matches a dot at the beginning of a part.
    """
    parts, wanted = path.split("/"), pattern.split("/")
    # Whether the first parts of the path are matched by the patterns so far: one row a pattern, so no star goes back.
    reached = [True] + [False] * len(parts)
    for number, part_pattern in enumerate(wanted):
        if part_pattern == "**":
            following = reached[:]
            for at, part in enumerate(parts):
                following[at + 1] |= following[at] and not part.startswith(".")
            if number == len(wanted) - 1:  # at the end it stands for what lies below, not for nothing
                following = [after and not before for after, before in zip(following, reached, strict=True)]
        else:
            following = [False] + [
                before and _matches_part(part, part_pattern) for before, part in zip(reached[:-1], parts, strict=True)
            ]
        reached = following
    return reached[-1]


def _matches_part(part: str, pattern: str) -> bool:
    is_hidden = part.startswith(".") and not pattern.startswith(".")
    return not is_hidden and fnmatchcase(part, pattern)


def parse_numbered(name: str) -> NumberedName | None:
    """Take a name like ``train-00003-of-00064.tfrecord`` apart, or return None if it is no such name.

    Only the last part of a path is looked at, and in it the last such number. Any number of digits is accepted.
    """
    folder, slash, last = name.rpartition("/")
    match = _NUMBERED.fullmatch(last)
    if match is None:
        return None
    return NumberedName(folder + slash + match[1], int(match[2]), int(match[3]), match[4])


def named_format(name: str) -> ShardFormat | None:
    """Return what a file seems to be by its name: a tar shard, a TFRecord shard, or None for neither.

    TFRecord shards are those whose suffix says so (``.tfrecord``, ``.tfrecords``, ``.tfrec``, ``.tfr``, ``.record``,
    ``_tfrecord``, and these with ``.gz`` or ``.zlib`` behind), before the number of the shard or after it; and
    numbered names without any other suffix, as TensorFlow writes them (``train-00000-of-00064``,
    ``data_tfrecord-00000-of-00001.gz``).
    """
    last = name.rpartition("/")[2]
    numbered = _numbered_file(last)
    if last.lower().endswith(".tar"):
        return "tar"
    prefix, suffix = (last, "") if numbered is None else (numbered.prefix, numbered.suffix)
    if _RECORDS.search(prefix if _SQUEEZED.fullmatch(suffix) else suffix):
        return "tfrecord"
    if numbered is None or not _SQUEEZED.fullmatch(suffix):
        return None
    if prefix.lower().endswith(".tar"):
        return "tar"
    return None if "." in prefix else "tfrecord"


def _numbered_file(last: str) -> NumberedName | None:
    """Take a numbered file name apart if it is written as TensorFlow does, with five digits at least."""
    numbered = parse_numbered(last)
    is_padded = numbered is not None and re.search(r"-[0-9]{5,}-of-[0-9]{5,}", last) is not None
    return numbered if is_padded else None


def find_sets(names: list[str]) -> list[ShardSet]:
    """Find the sets that numbered names (``train-00003-of-00064``) are of, in the order of their first names.

    Names of one prefix and suffix and of one total are one set, whether compressed (``.gz``, ``.zlib``) or not, since
    some writers mix them; names without numbers are of none.
    """
    sets: dict[tuple[str, str, int], tuple[str, set[int]]] = {}
    for name in names:
        numbered = parse_numbered(name)
        if numbered is not None:
            plain = _SQUEEZED_END.sub("", numbered.suffix)
            numbers = sets.setdefault((numbered.prefix, plain, numbered.total), (numbered.suffix, set()))[1]
            numbers.add(numbered.number)
    return [
        ShardSet(prefix, suffix, total, frozenset(numbers)) for (prefix, _, total), (suffix, numbers) in sets.items()
    ]


@dataclass(frozen=True, slots=True)
class ShardSet:
    """Numbered shards that belong together.

    Attributes:
        prefix: What their names begin with.
        suffix: What follows the numbers, in the first of them.
        total: How many there should be.
        numbers: Those that are there.
    """

    prefix: str
    suffix: str
    total: int
    numbers: frozenset[int]

    def missing(self, most: int = 8) -> list[str]:
        """Return the names of the first few that are not there."""
        width = max(5, len(str(self.total)))
        found = (number for number in range(self.total) if number not in self.numbers)
        return [
            f"{self.prefix}-{number:0{width}d}-of-{self.total:0{width}d}{self.suffix}" for number in islice(found, most)
        ]

    @property
    def num_missing(self) -> int:
        """How many are not there."""
        return self.total - sum(number < self.total for number in self.numbers)


def has_count(text: str) -> bool:
    """Tell whether a text is of the form ``train@64`` or ``train@*``, which `expand_count` takes apart."""
    return _COUNTED.fullmatch(text) is not None


def expand_count(text: str) -> list[str]:
    """Return the names that ``train@64`` or ``train@64.tfrecord`` stands for; any other text as its only name.

    ``train@*`` is any number of shards: the answer is then one glob, which also fits names with another suffix, so what
    it finds is to be taken apart by `parse_numbered`. Only an ``@`` in the last part of a path counts, and only with
    nothing or a suffix behind the number. A file may have such a name itself; who can look for it should do so first.

    Raises:
        ValueError: The count is zero, or above ten million.
    """
    match = _COUNTED.fullmatch(text)
    if match is None:
        return [text]
    prefix, digits, suffix = match[1], match[2], match[3] or ""
    if digits == "*":
        return [f"{prefix}-[0-9]*-of-[0-9]*{suffix}"]
    count = int(digits)
    if not 0 < count <= _MOST_NAMES:
        raise ValueError(f"{_brief(text)} stands for {count} shards; from 1 to {_MOST_NAMES} are possible")
    width = max(5, len(str(count)))  # as TensorFlow Datasets: both numbers grow together past 99999
    return [f"{prefix}-{number:0{width}d}-of-{count:0{width}d}{suffix}" for number in range(count)]


def _pair_braces(text: str) -> dict[int, int]:
    """Return where the brace that is opened at a position is closed; positions of lone ones are absent."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            pairs[opened.pop()] = match.start()
    return pairs


def _parse(text: str, start: int, end: int, pairs: dict[int, int], depth: int) -> _Pattern:
    """Parse ``text[start:end]``, in which every pair of braces lies whole or not at all."""
    if depth > _DEEPEST:
        raise ValueError(f"{_brief(text)} nests braces more than {_DEEPEST} deep")
    pattern: _Pattern = []
    plain = position = start
    while (position := text.find("{", position, end)) >= 0:
        closing = pairs.get(position)
        piece = None if closing is None else _parse_place(text, position + 1, closing, pairs, depth)
        if piece is None or closing is None:
            position += 1  # the brace is text; what it holds may still be a pattern
            continue
        pattern += [text[plain:position], piece]
        plain = position = closing + 1
    pattern.append(text[plain:end])
    return pattern


def _parse_place(text: str, start: int, end: int, pairs: dict[int, int], depth: int) -> _Range | _Choice | None:
    """Parse what stands between two braces; None if it is neither a range nor a choice."""
    if match := _NUMBERS.fullmatch(text, start, end):
        low, high = match[1], match[2]
        width = max(len(low), len(high)) if _PADDED.match(low) or _PADDED.match(high) else 0
        return _Range(_steps(int(low), int(high), match[3]), width)
    if match := _LETTERS.fullmatch(text, start, end):
        return _Range(_steps(_ALPHABET.index(match[1]), _ALPHABET.index(match[2]), match[3]), None)
    commas = _find_commas(text, start, end, pairs)
    if not commas:
        return None
    begins, ends = [start, *(comma + 1 for comma in commas)], [*commas, end]
    return _Choice([_parse(text, first, last, pairs, depth + 1) for first, last in zip(begins, ends, strict=True)])


def _find_commas(text: str, start: int, end: int, pairs: dict[int, int]) -> list[int]:
    """Return the positions of commas that are in no pair of braces further in."""
    commas = []
    position = start
    while position < end:
        if text[position] == ",":
            commas.append(position)
        position = pairs.get(position, position) + 1
    return commas


def _steps(first: int, last: int, step: str | None) -> range:
    """Return first to last, both inclusive; the shell takes the sign of a step from the ends, and 0 for 1."""
    width = abs(int(step or 1)) or 1
    return range(first, last + 1, width) if first <= last else range(first, last - 1, -width)


def _count(pattern: _Pattern) -> int:
    """Return how many names a pattern stands for."""
    return prod(piece.count() for piece in pattern if not isinstance(piece, str))


def _spell(pattern: _Pattern) -> list[str]:
    """Return the names that a pattern stands for."""
    places = [[piece] if isinstance(piece, str) else piece.spell() for piece in pattern]
    return ["".join(parts) for parts in product(*places)]


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
