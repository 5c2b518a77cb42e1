"""ClusterEnv: Gymnasium environments on many processes and machines, seen as one vector environment."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterenv import errors, policy
    from clusterenv.config import Faults, Network, Timeouts
    from clusterenv.entry_points import make_vec, vector_entry_point
    from clusterenv.env import ClusterEnv
    from clusterenv.errors import ClusterEnvError, PolicyError, WorkerFailed, WorkerLost
    from clusterenv.evaluation.result import Evaluation
    from clusterenv.head.stream import Stream
    from clusterenv.head.supervisor import Loss
    from clusterenv.launchers.by_hand import ByHandLauncher
    from clusterenv.launchers.kubernetes.launcher import KubernetesLauncher
    from clusterenv.launchers.local import LocalLauncher
    from clusterenv.launchers.ray import RayLauncher
    from clusterenv.launchers.slurm import SlurmLauncher
    from clusterenv.launchers.ssh import SSHLauncher
    from clusterenv.policy.policy import BasePolicy, Decision, Policy
    from clusterenv.policy.sync import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync, SyncBudget
    from clusterenv.recording.recorder import Recorder
    from clusterenv.rollout import Rollout
    from clusterenv.scalars import log_stats
    from clusterenv.setup.factories import NativeVector
    from clusterenv.wire.values import RemoteObject

__version__ = "0.1.0"

__all__ = [
    "AdaptiveSync",
    "BasePolicy",
    "ByHandLauncher",
    "ClusterEnv",
    "ClusterEnvError",
    "Decision",
    "Evaluation",
    "EveryUpdate",
    "Faults",
    "KubernetesLauncher",
    "LocalLauncher",
    "Loss",
    "NativeVector",
    "Network",
    "NeverSync",
    "PeriodicSync",
    "Policy",
    "PolicyError",
    "RayLauncher",
    "Recorder",
    "RemoteObject",
    "Rollout",
    "SSHLauncher",
    "SlurmLauncher",
    "Stream",
    "SyncBudget",
    "Timeouts",
    "WorkerFailed",
    "WorkerLost",
    "errors",
    "log_stats",
    "make_vec",
    "policy",
    "vector_entry_point",
]

# Imported on first use: a script that stays on one machine need not load the other launchers, and a worker's guardian,
# whose module is part of this package, needs almost nothing.
_HOMES = {
    "AdaptiveSync": "policy.sync",
    "BasePolicy": "policy.policy",
    "ByHandLauncher": "launchers.by_hand",
    "ClusterEnv": "env",
    "ClusterEnvError": "errors",
    "Decision": "policy.policy",
    "Evaluation": "evaluation.result",
    "EveryUpdate": "policy.sync",
    "Faults": "config",
    "KubernetesLauncher": "launchers.kubernetes.launcher",
    "LocalLauncher": "launchers.local",
    "Loss": "head.supervisor",
    "NativeVector": "setup.factories",
    "Network": "config",
    "NeverSync": "policy.sync",
    "PeriodicSync": "policy.sync",
    "Policy": "policy.policy",
    "PolicyError": "errors",
    "RayLauncher": "launchers.ray",
    "Recorder": "recording.recorder",
    "RemoteObject": "wire.values",
    "Rollout": "rollout",
    "SSHLauncher": "launchers.ssh",
    "SlurmLauncher": "launchers.slurm",
    "Stream": "head.stream",
    "SyncBudget": "policy.sync",
    "Timeouts": "config",
    "WorkerFailed": "errors",
    "WorkerLost": "errors",
    "log_stats": "scalars",
    "make_vec": "entry_points",
    "vector_entry_point": "entry_points",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"clusterenv.{_HOMES[name]}"), name)
    if name in ("errors", "policy"):
        return importlib.import_module(f"clusterenv.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
