"""Dtypes and shapes from the wire: which may travel, checked before numpy is asked to read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from clusterenv.errors import WireError

PLAIN_KINDS = frozenset("biufcSUmM")  # Kinds of numpy dtypes whose bytes are data and nothing else.

# As `dtype.str` writes them. numpy itself would also read records, repetitions and units of 0 seconds, by which it
# divides.
_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU]\d{1,9}|[mM]8(?:\[(?:[1-9]\d{0,8})?[a-zA-Zμ]{1,2}\])?)")
_MAX_DIMENSIONS = 32  # numpy 1's own limit. Multiplying out a longer shape could take minutes.


def checked_dtype(text: object) -> np.dtype[Any]:
    """Read a dtype from the wire, refusing those whose bytes would be pointers or records.

    Raises:
        WireError: It is no dtype, or none that may travel.
    """
    if not isinstance(text, str):
        raise WireError(f"An array of dtype {repr(text)[:100]} cannot travel.")
    return _read_dtype(text)


@lru_cache(maxsize=64)
def _read_dtype(text: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(text):
        raise WireError(f"An array of dtype {repr(text)[:100]} cannot travel.")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise WireError(f"There is no dtype {text}.") from error


def checked_shape(shape: Sequence[object]) -> tuple[int, ...]:
    """Read a shape from the wire.

    Raises:
        WireError: It is no shape.
    """
    sizes: list[int] = []
    for size in shape if isinstance(shape, list | tuple) and len(shape) <= _MAX_DIMENSIONS else (None,):
        if type(size) is not int or not 0 <= size < 2**63:
            raise WireError(f"{repr(shape)[:100]} is no shape.")
        sizes.append(size)
    return tuple(sizes)
