"""What is measured: the contenders, and the cells (one task at one size) in which they meet."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tasks import TASKS

Settings = Mapping[str, Any]

LOCKSTEP = "lockstep"
SCALING_ENVS = (64, 256, 1024)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of stepping environments.

    Args:
        name: How `--only` and the CSV call it.
        label: How the table calls it.
        builder: A key of `builders.BUILDERS`.
        settings: Keyword arguments for the builder. Where there are several, all are tried and the fastest competes.
        peer: The virtual environment it needs, a key of `peers.PEERS`; None for the interpreter of the benchmark.
    """

    name: str
    label: str
    builder: str
    settings: Sequence[Settings] = ({},)
    peer: str | None = None


# In playing order. Neighbours are compared most: what the machine does between two of them spoils their ratio least.
CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="bare", label="bare loops, 2 processes", builder="bare"),
        Contender(
            name="clusterenv-zmq",
            label="ClusterEnv, 2 workers, zmq",
            builder="clusterenv",
            settings=({"num_workers": 2, "transport": "zmq"},),
        ),
        Contender(
            name=LOCKSTEP,
            label="lockstep limit, 2 processes",
            builder="lockstep",
            settings=({"barrier": "pair"}, {"barrier": "parent"}),
        ),
        Contender(
            name="clusterenv-shm",
            label="ClusterEnv, 2 workers, shm",
            builder="clusterenv",
            settings=({"num_workers": 2, "transport": "shm"},),
        ),
        Contender(
            name="clusterenv-shm-views",
            label="ClusterEnv, 2 workers, shm, copy=False",
            builder="clusterenv",
            settings=({"num_workers": 2, "transport": "shm", "copy": False},),
        ),
        Contender(
            name="puffer-mp",
            label="PufferLib 3.0 Multiprocessing",
            builder="puffer",
            settings=(
                {"backend": "Multiprocessing", "num_workers": 1},
                {"backend": "Multiprocessing", "num_workers": 2},
                {"backend": "Multiprocessing", "num_workers": 2, "half_batches": True},
            ),
            peer="pufferlib",
        ),
        Contender(
            name="puffer-serial",
            label="PufferLib 3.0 Serial",
            builder="puffer",
            settings=({"backend": "Serial"},),
            peer="pufferlib",
        ),
        Contender(
            name="clusterenv-0",
            label="ClusterEnv, num_workers=0",
            builder="clusterenv",
            settings=({"num_workers": 0},),
        ),
        # Peers at their best: no copy of what they hand out. ClusterEnv above is as users get it, with a copy.
        Contender(name="sync", label="Gymnasium SyncVectorEnv", builder="sync", settings=({"copy": False},)),
        Contender(
            name="clusterenv-0-views",
            label="ClusterEnv, num_workers=0, copy=False",
            builder="clusterenv",
            settings=({"num_workers": 0, "copy": False},),
        ),
        Contender(name="async", label="Gymnasium AsyncVectorEnv", builder="async", settings=({"copy": False},)),
        Contender(name="sb3", label="SB3 SubprocVecEnv", builder="sb3", peer="sb3"),
        Contender(
            name="envpool",
            label="EnvPool alone (C++)",
            builder="envpool",
            settings=({"num_threads": 1}, {"num_threads": 2}),
        ),
        Contender(
            name="clusterenv-envpool",
            label="EnvPool on ClusterEnv workers",
            builder="clusterenv-envpool",
            settings=(
                {"num_workers": 2, "num_threads": 1},
                {"num_workers": 1, "num_threads": 1},
                {"num_workers": 1, "num_threads": 2},
            ),
        ),
    )
}

# What only matters where the observations are large, and what exists only for one task.
VIEWS = ("clusterenv-shm-views", "clusterenv-0-views")
ENVPOOL = ("envpool", "clusterenv-envpool")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender at one size."""

    contender: Contender
    num_envs: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Contenders that are measured against each other, in the same rounds.

    Args:
        name: Unique among the cells of a run.
        task: A key of `tasks.TASKS`.
        entries: In playing order.
        base: The entry that the ratios are relative to.
    """

    name: str
    task: str
    entries: Sequence[Entry]
    base: Entry

    @property
    def is_scaling(self) -> bool:
        """Whether it compares sizes of one contender instead of contenders of one size."""
        return len({entry.num_envs for entry in self.entries}) > 1


def plan_cells(
    tasks: Collection[str], envs: Collection[int] | None, only: Collection[str] | None, *, scaling: bool
) -> list[Cell]:
    """Lay out the cells of a run.

    Args:
        tasks: Keys of `tasks.TASKS`.
        envs: Sizes for every task; None for the sizes each task is meant for.
        only: Names of the contenders to keep (the lockstep limit always stays); None for all.
        scaling: Whether to end with the scaling cell.
    """
    cells = [
        plan_cell(task, num_envs, only)
        for task in TASKS
        if task in tasks
        for num_envs in envs or ((16, 64, 256) if task in ("cartpole", "lunarlander") else (64,))
    ]
    if scaling:
        cells.append(plan_scaling())
    return cells


def plan_cell(task: str, num_envs: int, only: Collection[str] | None) -> Cell:
    """Pick who competes in one task at one size."""
    left_out: set[str] = set()
    if task != "image":
        left_out.update(VIEWS)
    if (task, num_envs) != ("cartpole", 256):
        left_out.update(ENVPOOL)
    entries = [
        Entry(contender=contender, num_envs=num_envs)
        for contender in CONTENDERS.values()
        if contender.name not in left_out and (only is None or contender.name in {*only, LOCKSTEP})
    ]
    base = next(entry for entry in entries if entry.contender.name == LOCKSTEP)
    return Cell(name=f"{TASKS[task]}, {num_envs} envs", task=task, entries=entries, base=base)


def plan_scaling() -> Cell:
    """Compare the cost of an environment step as environments become many, beside what the limit itself does."""
    entries = [
        Entry(contender=CONTENDERS[name], num_envs=num_envs)
        for num_envs in SCALING_ENVS
        for name in (LOCKSTEP, "clusterenv-shm")
    ]
    base = next(entry for entry in entries if entry.contender.name == "clusterenv-shm")
    return Cell(name="scaling", task="cartpole", entries=entries, base=base)
