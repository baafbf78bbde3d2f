"""Write docs/cli.md from the commands' own help texts, and check the links between the pages.

With ``--check`` nothing is written: the program fails if docs/cli.md is not what it would write.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "cli.md"
WIDTH = 100
HEAD = """\
# The command line

Made by `make docs` from the help texts of the commands; change those, not this page.
"""


def iter_commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the full name and the help text of a command and of all below it, in the order that the help lists them."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from iter_commands(child, open_context(child, name, context))


def open_context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    """Return a context that lays out help the same way on every terminal."""
    return click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)


def render_reference(main: click.Command) -> str:
    """Return the text of docs/cli.md."""
    sections = [HEAD]
    for name, help_text in iter_commands(main, open_context(main, "shardset")):
        lines = "\n".join(line.rstrip() for line in help_text.splitlines())
        sections.append(f"## {name}\n\n```text\n{lines}\n```\n")
    return "\n".join(sections)


def iter_broken_links(page: Path) -> Iterator[str]:
    """Yield the relative link targets of a Markdown page that do not exist; code is no link."""
    prose = re.sub(r"^(```|~~~).*?^\1|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(<?([^)\s>]+)", prose):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
            yield target


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if docs/cli.md is out of date")
    check = parser.parse_args().check
    problems = []

    text = render_reference(importlib.import_module("shardset.cli").main)
    if not check:
        REFERENCE.parent.mkdir(exist_ok=True)
        REFERENCE.write_text(text, encoding="utf-8", newline="\n")
    elif not REFERENCE.exists() or REFERENCE.read_text(encoding="utf-8") != text:
        problems.append("docs/cli.md does not show the commands as they are: run `make docs`")

    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        problems += [f"{page.relative_to(ROOT)}: no such file: {target}" for target in iter_broken_links(page)]

    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
