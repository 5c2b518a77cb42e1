"""Scalars: numbers of a training run, on the terminal and, if it is installed, in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any, Self

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # `pip install tensorboard` adds it.
    SummaryWriter = None  # type: ignore[assignment,misc]  # an optional dependency


class Scalars:
    """Writes to `runs/<name>`; `tensorboard --logdir runs` shows it."""

    def __init__(self, name: str, args: Any, *, track: bool = True, print_s: float = 2.0) -> None:
        """Start a log.

        Args:
            name: Of the run.
            args: A dataclass of what it was started with.
            track: Whether to write files at all.
            print_s: Print at most one line in so many seconds.
        """
        self._writer = SummaryWriter(f"runs/{name}") if track and SummaryWriter is not None else None
        self._print_s = print_s
        self._began = self._printed = time.monotonic()
        if self._writer is not None and is_dataclass(args) and not isinstance(args, type):
            self._writer.add_text("args", "\n\n".join(f"{key}: {value}" for key, value in asdict(args).items()))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note these numbers, as they are after `step` environment steps."""
        now = time.monotonic()
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        if now - self._printed >= self._print_s:
            self._printed = now
            numbers = "   ".join(f"{name} {value:.4g}" for name, value in scalars.items())
            print(f"{now - self._began:5.0f} s   step {step:>9,}   {numbers}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
