"""What is wrong with shards, and what can be saved of them: `check` and `fix`."""

from .checking import check
from .repair import fix

__all__ = ["check", "fix"]
