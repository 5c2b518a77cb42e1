"""Where the examples' workers are started: the one place that lists the launchers for the examples' command lines.

python -m examples.ppo --num-envs 256                          # on this machine
python -m examples.ppo --num-envs 256 slurm --nodes 4          # a launcher's name, then its own options
python -m examples.ppo --num-envs 256 ssh --help
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from clusterenv import KubernetesLauncher, LocalLauncher, RayLauncher, SlurmLauncher, SSHLauncher

Launching: TypeAlias = Annotated[
    Annotated[LocalLauncher, subcommand("local")]
    | Annotated[SlurmLauncher, subcommand("slurm")]
    | Annotated[SSHLauncher, subcommand("ssh")]
    | Annotated[KubernetesLauncher, subcommand("kubernetes")]
    | Annotated[RayLauncher, subcommand("ray")],
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
]
