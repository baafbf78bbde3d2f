"""The command line: one small module a command, loaded when it is used."""

from __future__ import annotations

import sys

try:
    from .program import main
except KeyboardInterrupt:
    # Imports are all that the program does in its first moments, when there is nobody yet to say this.
    sys.stderr.write("shardset: interrupted\n")
    raise SystemExit(130) from None

__all__ = ["main"]
