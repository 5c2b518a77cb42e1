"""A worker that cannot reach the head's memory, as one on another machine cannot: it sees no process but its own.

Run as a program in place of `python -m clusterenv.worker`. Needs `unshare` of util-linux, and the right to use it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

COMMAND = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


def is_possible() -> bool:
    """Whether this machine lets us."""
    return (
        shutil.which("unshare") is not None and subprocess.run([*COMMAND, "true"], capture_output=True).returncode == 0
    )


if __name__ == "__main__":
    os.execvp(COMMAND[0], [*COMMAND, sys.executable, "-m", "clusterenv.worker"])
