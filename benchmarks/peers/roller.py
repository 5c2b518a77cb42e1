"""Roller: what every contender of the rollout benchmark is, to the one that measures it."""

import time
from collections.abc import Callable
from pathlib import Path

NUM_STEPS = 128


class Roller:
    """Collects rollouts for a while, and says how fast it went.

    Args:
        collect: Collects some more, at most a rollout; returns how many environment steps that were.
        close: Called once at the end.
        busy_log: Where to append, for every run, a line with its rate and the cores that this process took.
    """

    def __init__(
        self, collect: Callable[[], int], close: Callable[[], object], busy_log: str | Path | None = None
    ) -> None:
        self._collect = collect
        self._close = close
        self._busy_log = Path(busy_log) if busy_log else None

    def run(self, seconds: float) -> float:
        """Collect for at least so long; returns environment steps per second."""
        env_steps = 0
        cpu_before = time.process_time()
        began = now = time.perf_counter()
        while now - began < seconds:
            env_steps += self._collect()
            now = time.perf_counter()
        cores = (time.process_time() - cpu_before) / (now - began)
        rate = env_steps / (now - began)
        if self._busy_log is not None:
            with self._busy_log.open("a") as file:
                file.write(f"{rate:.3f} {cores:.5f}\n")
        return rate

    def close(self) -> None:
        """Release processes and memory."""
        self._close()
