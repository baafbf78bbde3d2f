"""What may be given as ``handler=``: functions that decide about an error, with the names and answers of webdataset's.

True means to go on without the thing at fault, False to end the stage there; `reraise_exception` raises. Whatever they
answer, the pipeline counts the error in its report.
"""

from __future__ import annotations

import warnings
from typing import NoReturn


def reraise_exception(exn: Exception) -> NoReturn:
    """Raise the error.

    Raises:
        Exception: `exn`.
    """
    raise exn


def ignore_and_continue(exn: Exception) -> bool:  # noqa: ARG001 - a handler is given the error
    """Go on without the thing at fault."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Warn, and go on without the thing at fault; unlike webdataset's it does not sleep."""
    _warn(exn)
    return True


def ignore_and_stop(exn: Exception) -> bool:  # noqa: ARG001 - a handler is given the error
    """End the stage."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Warn, and end the stage; unlike webdataset's it does not sleep."""
    _warn(exn)
    return False


def _warn(error: Exception) -> None:
    # Under no line of a file: it would be one of ours, and only the first error of each line would be shown.
    text = f"{type(error).__name__}: {error}"
    warnings.warn_explicit(text, UserWarning, "shardset", 0)
