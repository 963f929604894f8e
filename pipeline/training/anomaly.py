"""What autograd's anomaly detection finds, in one sentence that names the author's line of the forward pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# How torch begins the warning that holds the traceback of the forward pass, and the error that follows it.
_WARNING = "Error detected in"
_ERROR = re.compile(r"Function '(\w+)' returned nan values")
_FRAME = re.compile(r'File "([^"]+/pymodules/[^"]+)", line (\d+), in .*\n\s*(.*)')


class AnomalyFound(RuntimeError):
    """Autograd has computed a gradient that is nan; the message says where its operation was called."""


@contextmanager
def anomaly_explained(describe_place: Callable[[], str]) -> Iterator[None]:
    """Turn what ``--detect-anomaly`` finds in this block into an ``AnomalyFound``; its cause is all torch says."""
    tracebacks: list[str] = []
    show = warnings.showwarning

    def keep_traceback(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message).startswith(_WARNING):
            tracebacks.append(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = keep_traceback
    try:
        yield
    except RuntimeError as error:
        found = _ERROR.search(str(error))
        if found is None:
            raise
        whole = RuntimeError("\n".join([str(error), *tracebacks])).with_traceback(error.__traceback__)
        raise AnomalyFound(_describe(found[1], tracebacks, describe_place())) from whole
    finally:
        warnings.showwarning = show


def _describe(function: str, tracebacks: list[str], place: str) -> str:
    frames = [frame for text in tracebacks for frame in _FRAME.findall(text)]
    if not frames:
        return f"The gradient of {function} is nan, in {place}."
    file, line, code = frames[-1]
    return f"{file}:{line}: the gradient of this operation is nan ({function}), in {place}: {code}"
