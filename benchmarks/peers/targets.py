"""The bars ClusterEnv has set itself, and how a run compares with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.cells import CROWDS, LOCKSTEP, SCALING_ENVS
from benchmarks.peers.rounds import CellResult, Spread

OF_LOCKSTEP = {
    ("cartpole", 16): 0.85,
    ("cartpole", 64): 0.92,
    ("cartpole", 256): 0.95,
    ("lunarlander", 16): 0.90,
    ("lunarlander", 64): 0.93,
    ("lunarlander", 256): 0.93,
    ("atari", 16): 0.95,
    ("mujoco", 64): 0.95,
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One contender should be so many times as fast as another, in the same rounds.

    Args:
        name: The one with the target, a contender's name.
        envs: Its number of environments.
        rival: The other one.
        rival_envs: The other one's number of environments.
        at_least: The ratio to reach.
    """

    name: str
    envs: int
    rival: str
    rival_envs: int
    at_least: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target, the cell it was measured in, and the ratio that was measured."""

    cell: str
    target: Target
    ratio: Spread

    @property
    def word(self) -> str:
        """Met or missed by the median, or missed by less than the spread between rounds."""
        if self.ratio.median >= self.target.at_least:
            return "met"
        return "missed, within the spread" if self.ratio.high >= self.target.at_least else "MISSED"


def judge(results: Sequence[CellResult]) -> list[Verdict]:
    """Hold the results against every target that this run can answer."""
    verdicts = []
    for result in results:
        for target in list_targets(result):
            own = result.find(target.name, target.envs)
            rival = result.find(target.rival, target.rival_envs)
            if own is None or rival is None:
                continue
            ratio = own.compare(rival)
            if ratio is not None:
                verdicts.append(Verdict(cell=result.cell.name, target=target, ratio=ratio))
    return verdicts


def list_targets(result: CellResult) -> Iterator[Target]:
    """List the targets of one cell."""
    task, envs = result.cell.task, result.cell.base.num_envs
    if result.cell.is_scaling:
        few, many = SCALING_ENVS[0], SCALING_ENVS[-1]
        yield Target(name="clusterenv-shm", envs=many, rival="clusterenv-shm", rival_envs=few, at_least=1.0)
        return
    bars: list[tuple[str, str, float]] = []
    if (task, envs) in OF_LOCKSTEP:
        bars.append(("clusterenv-shm", LOCKSTEP, OF_LOCKSTEP[task, envs]))
    bars.append(("clusterenv-shm", "async", 7.0 if (task, envs) == ("cartpole", 64) else 1.0))
    bars.append(("clusterenv-shm", "sb3", 1.0))
    # Half batches, which PufferLib may choose, compare with the way of stepping that does not wait for all either.
    bars.append(("clusterenv-exchange" if task == "random" else "clusterenv-shm", "puffer-mp", 1.0))
    if task == "lunarlander" or (task, envs) == ("cartpole", 256):
        bars += [("clusterenv-shm", "sync", 1.0), ("clusterenv-shm", "puffer-serial", 1.0)]
    # Where a step takes a millisecond, both take just that, and which is faster is chance.
    if task not in (*CROWDS, "atari"):
        # Equal terms: where a copy is dear, compare with the contender that makes none either.
        bars.append(("clusterenv-0-views" if task == "image" else "clusterenv-0", "sync", 1.0))
    # Fewer environments of EnvPool's take less time than the way to the workers and back.
    if (task, envs) == ("cartpole", 256):
        bars.append(("clusterenv-envpool", "envpool", 0.8))
    for name, rival, at_least in bars:
        yield Target(name=name, envs=envs, rival=rival, rival_envs=envs, at_least=at_least)
