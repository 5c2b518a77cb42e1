"""Scalars: a training run's numbers, on the terminal, in TensorBoard and, if asked for, in Weights & Biases."""

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

    def __init__(
        self, name: str, args: Any, *, track: bool = True, wandb_project: str | None = None, print_s: float = 2.0
    ) -> None:
        """Start a log.

        Args:
            name: Of the run.
            args: A dataclass of what it was started with.
            track: Whether to write TensorBoard's files, if it is installed.
            wandb_project: The project of Weights & Biases to log to as well; none by default.
            print_s: Print at most one line in so many seconds.

        Raises:
            ModuleNotFoundError: Weights & Biases is wanted and not installed.
        """
        settings = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
        self._run = None if wandb_project is None else start_run(wandb_project, name, settings)
        self._writer = SummaryWriter(f"runs/{name}") if track and SummaryWriter is not None else None
        self._print_s = print_s
        self._began = self._printed = time.monotonic()
        if self._writer is not None:
            self._writer.add_text("args", "\n\n".join(f"{key}: {value}" for key, value in settings.items()))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note these numbers, as they are after `step` environment steps."""
        now = time.monotonic()
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(dict(scalars), step=step)
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
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def start_run(project: str, name: str, settings: Mapping[str, Any]) -> Any:
    """Start a run of Weights & Biases; its own variables apply, such as WANDB_MODE=offline.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"wandb_project={project!r} asks for Weights & Biases, which is not installed here. "
            "`pip install wandb` adds it; without the argument numbers go to the terminal and to TensorBoard."
        ) from error
    return wandb.init(project=project, name=name, config=dict(settings))
