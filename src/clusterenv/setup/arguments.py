"""Arguments: checks what a user passes to ClusterEnv besides the environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from clusterenv.config import Faults, Network, Timeouts
from clusterenv.errors import ConfigError

_LAUNCHERS = "a launcher, such as LocalLauncher(), SSHLauncher(hosts=[...]) or SlurmLauncher(nodes=...)"
_RULES = "a rule, such as AdaptiveSync(0.05), EveryUpdate(), PeriodicSync(4) or NeverSync()"
_SETTINGS = {
    "faults": (Faults, "Faults(on_loss='raise')"),
    "network": (Network, "Network(listen='10.0.0.5')"),
    "timeouts": (Timeouts, "Timeouts(call_s=60)"),
}


def as_autoreset_mode(mode: object) -> AutoresetMode:
    """Read a mode given by its value or its name in Gymnasium, such as "NextStep" or "NEXT_STEP".

    Raises:
        ConfigError: There is no such mode.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    if isinstance(mode, str):
        for known in AutoresetMode:
            if mode.replace("_", "").lower() == known.value.lower():
                return known
    choices = ", ".join(repr(known.value) for known in AutoresetMode)
    raise ConfigError(f"autoreset_mode must be one of {choices}, or an AutoresetMode, got {mode!r}.")


def check_launcher(launcher: object) -> None:
    """Raise ConfigError unless this is a launcher; None stands for the default."""
    _check_instance("launcher", launcher, ("launch", "render"), _LAUNCHERS)


def check_sync(sync: object) -> None:
    """Raise ConfigError unless this is a sync rule; None stands for the default."""
    _check_instance("sync", sync, ("start", "compares"), _RULES)


def check_settings(**settings: object) -> None:
    """Raise ConfigError unless each setting is an instance of its class."""
    for name, value in settings.items():
        kind, example = _SETTINGS[name]
        if inspect.isclass(value):
            raise ConfigError(_class_text(name, value))
        if not isinstance(value, kind):
            raise ConfigError(f"{name} must be a {kind.__name__}(...), such as {example}, got {value!r}.")


def check_mapping(name: str, value: object, example: str) -> None:
    """Raise ConfigError unless this is a mapping with strings as keys; None stands for an empty one."""
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
        raise ConfigError(f"{name} must be a dict with names for keys, such as {example}, got {value!r}.")


def _check_instance(name: str, value: object, methods: tuple[str, ...], what: str) -> None:
    if value is None:
        return
    if inspect.isclass(value):
        raise ConfigError(_class_text(name, value))
    if not all(hasattr(value, method) for method in methods):
        if inspect.isroutine(value):
            called = f"{name}={value.__qualname__}(...)"
            raise ConfigError(f"{name} must be an instance, {called}, got the function itself, which was not called.")
        raise ConfigError(f"{name} must be {what}, got {value!r}.")


def _class_text(name: str, value: type[Any]) -> str:
    return f"{name} must be an instance, {name}={value.__name__}(...), got the class {value.__name__} itself."
