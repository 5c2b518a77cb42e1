"""ClusterEnv: Gymnasium environments on many processes and machines, seen as one vector environment."""

import importlib
from typing import TYPE_CHECKING

from clusterenv.config import Timeouts
from clusterenv.env import ClusterEnv
from clusterenv.errors import ClusterEnvError
from clusterenv.factories import NativeVector
from clusterenv.head.crew import Loss
from clusterenv.head.stream import Stream
from clusterenv.launchers.local import LocalLauncher
from clusterenv.policy.policy import BasePolicy, Decision, Policy
from clusterenv.policy.sync import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync
from clusterenv.rollout import Rollout
from clusterenv.wire.values import RemoteObject

if TYPE_CHECKING:
    from clusterenv.launchers.by_hand import ByHandLauncher
    from clusterenv.launchers.slurm import SlurmLauncher
    from clusterenv.launchers.ssh import SSHLauncher

__version__ = "0.1.0"

__all__ = [
    "AdaptiveSync",
    "BasePolicy",
    "ByHandLauncher",
    "ClusterEnv",
    "ClusterEnvError",
    "Decision",
    "EveryUpdate",
    "LocalLauncher",
    "Loss",
    "NativeVector",
    "NeverSync",
    "PeriodicSync",
    "Policy",
    "RemoteObject",
    "Rollout",
    "SSHLauncher",
    "SlurmLauncher",
    "Stream",
    "Timeouts",
]

# Imported when they are first used: a script that stays on one machine need not load them.
_LAUNCHERS = {"ByHandLauncher": "by_hand", "SSHLauncher": "ssh", "SlurmLauncher": "slurm"}


def __getattr__(name: str) -> object:
    if name in _LAUNCHERS:
        return getattr(importlib.import_module(f"clusterenv.launchers.{_LAUNCHERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
