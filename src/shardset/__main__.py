"""Make ``python -m shardset`` the same program as ``shardset``."""

from __future__ import annotations

from .cli import main

# Guarded, because worker processes import this module again under another name.
if __name__ == "__main__":
    main()
