"""Where the examples' workers are started: the one place that lists launchers for their command lines."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from tyro.conf import subcommand

from clusterenv import LocalLauncher

# A further launcher is one more `| Annotated[...]` here. Its name then follows the other arguments, and its own follow
# the name: python -m examples.ppo --num-envs 256 slurm --nodes 4
Launching: TypeAlias = Annotated[LocalLauncher, subcommand("local", prefix_name=False)]
