"""ClusterEnv: Gymnasium environments on many processes and machines, seen as one vector environment."""

from clusterenv.config import Timeouts
from clusterenv.env import ClusterEnv
from clusterenv.errors import ClusterEnvError
from clusterenv.factories import NativeVector
from clusterenv.launchers.local import LocalLauncher
from clusterenv.wire.values import RemoteObject

__version__ = "0.1.0"

__all__ = ["ClusterEnv", "ClusterEnvError", "LocalLauncher", "NativeVector", "RemoteObject", "Timeouts"]
