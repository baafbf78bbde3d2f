"""The command line: one small module a command, loaded when it is used."""

from __future__ import annotations

from .program import main

__all__ = ["main"]
