"""FailureReport: describes any exception for the head, however odd the exception is.

An exception is the user's object: its text may be megabytes long, impossible to encode, or raise when read. None of
that may crash the worker.
"""

from __future__ import annotations

import builtins
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from clusterenv.errors import OWN_TYPES
from clusterenv.wire.messages import Adopt, Apply, Collect, Decide, Evaluate, Failed, Request, Where

_MAX_CHARACTERS = 32_000  # At most four bytes each, to keep the message small.
_MAX_NAME = 255
_OURS = os.path.join(Path(__file__).parent.parent, "")


def culprit_of(request: Request, *, is_stepping: bool) -> Where:
    """Return whose code raised while a request was handled.

    Args:
        request: The head's request.
        is_stepping: Whether the environments, not the policy, were running.
    """
    match request:
        case Apply():
            return "function"
        case Adopt():
            return "policy"
        case Decide() | Collect() | Evaluate():
            return "environment" if is_stepping else "policy"
        case _:
            return "environment"


def describe_failure(error: BaseException, call: int, *, env_index: int | None, where: Where) -> Failed:
    """Describe an exception for the head.

    Args:
        error: The exception.
        call: The call in which it was raised.
        env_index: The environment that raised it, if known.
        where: Whose code raised it.
    """
    return Failed(
        call=call,
        env_index=env_index,
        type_module=_ask(lambda: type(error).__module__, _MAX_NAME),
        type_name=_ask(lambda: type(error).__qualname__, _MAX_NAME),
        text=_ask(lambda: str(error), _MAX_CHARACTERS),
        traceback=_ask(lambda: _format(error), _MAX_CHARACTERS),
        where=where,
        base=_builtin_base(error),
    )


def summarize(error: BaseException) -> str:
    """Return an exception's type and text."""
    return f"{_ask(lambda: type(error).__name__, _MAX_NAME)}: {_ask(lambda: str(error), _MAX_CHARACTERS)}"


def _ask(question: Callable[[], str], limit: int) -> str:
    """Return a text that an exception provides, shortened and made encodable."""
    try:
        answer = question()
        if not isinstance(answer, str):
            return ""
        return _shorten(answer, limit).encode(errors="backslashreplace").decode()
    except BaseException as error:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<cannot be shown: that raises {type.__repr__(type(error))}>"


def _shorten(text: str, limit: int) -> str:
    """Leave out the middle of a text that is too long: its beginning says what happened, its end often why."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


def _format(error: BaseException) -> str:
    """Format a traceback in which the user's frames come first."""
    is_refusal = issubclass(type(error), OWN_TYPES)
    try:
        report = traceback.TracebackException.from_exception(error, compact=True)
        reports: list[traceback.TracebackException | None] = [report]
        for part in reports:
            if part is not None:
                _hide_our_frames(part.stack, is_refusal=is_refusal)
                reports += [part.__cause__, part.__context__, *(part.exceptions or ())]
        return "".join(report.format())
    except BaseException:  # noqa: BLE001 - not even its type can be trusted to have a name
        frames = traceback.extract_tb(error.__traceback__)
        _hide_our_frames(frames, is_refusal=is_refusal)
        return f"Traceback (most recent call last):\n{''.join(frames.format())}{summarize(error)}\n"


def _hide_our_frames(frames: traceback.StackSummary, *, is_refusal: bool) -> None:
    """Remove this library's frames that led to the user's code.

    If there is no user code, all frames are kept, unless the error is our own and its message says enough.
    """
    none = len(frames) if is_refusal else 0
    first = next((index for index, frame in enumerate(frames) if not frame.filename.startswith(_OURS)), none)
    del frames[:first]


def _builtin_base(error: BaseException) -> str:
    """Return the name of the nearest built-in type that the exception's type descends from."""
    known = {kind: name for name, kind in vars(builtins).items() if isinstance(kind, type)}
    known |= {kind: kind.__name__ for kind in OWN_TYPES}
    return next(known[base] for base in type.__getattribute__(type(error), "__mro__") if base in known)
