"""Inline: the stand-in for the hub when there are no workers, and everything runs in the head's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clusterenv.head.outcome import Outcome
from clusterenv.wire.planes import Planes
from clusterenv.worker.host import Host


class Inline:
    """Runs calls when they are waited for, so that an environment's exception comes up where the user stands."""

    pids: tuple[int, ...] = ()

    def __init__(self, host: Host, planes: Planes) -> None:
        self._host = host
        self._planes = planes
        self._work: Callable[[], Outcome] | None = None
        host.open()

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> None:
        """Note a reset."""
        self._work = lambda: self._stepped(self._host.reset(seeds, mask, options))

    def step(self, actions: Iterable[Any] | None) -> None:
        """Note a step."""
        self._work = lambda: self._stepped(self._host.step(actions))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call."""
        self._work = lambda: Outcome({}, [], self._host.call(name, args, kwargs))

    def set_attr(self, name: str, items: Sequence[Any]) -> None:
        """Note the setting of an attribute."""

        def work() -> Outcome:
            self._host.set_attr(name, items)
            return Outcome({}, [], [])

        self._work = work

    def finish(self, timeout_s: float | None) -> Outcome:
        """Do what was noted. There is nobody to wait for, so the timeout has no meaning."""
        work, self._work = self._work, None
        assert work is not None, "a call is under way"
        return work()

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """Close the environments."""
        self._host.close()

    def _stepped(self, infos: dict[str, Any]) -> Outcome:
        return Outcome(infos, [list(column) for column in self._host.objects()], [])
