"""Memory maps that hold no file descriptor.

Python's own `mmap` keeps a duplicate of the descriptor until it is closed, and it cannot be closed while an array
points into it. A learner that keeps an observation after `close()` would so keep a descriptor. Here only the pages
stay, until the last array that shows them is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref


def map_file(descriptor: int) -> memoryview:
    """Map a whole file, shared and writable; it is unmapped when nothing refers to the memory any more."""
    size = os.fstat(descriptor).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"Cannot map {size} bytes of shared memory: {os.strerror(code)}")
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")
