"""LocalLauncher, the launcher that is used unless another is named, does what every launcher must."""

from __future__ import annotations

from pathlib import Path

from clusterenv import LocalLauncher
from clusterenv.launchers.base import Launcher
from tests.launcher_contract import LauncherContract


class TestLocalLauncher(LauncherContract):
    def make_launcher(self, log_dir: Path) -> Launcher:
        return LocalLauncher(log_dir=log_dir)
