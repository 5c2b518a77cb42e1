"""What is measured: the contenders, and the cells (one task at one size) in which they meet."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tasks import IN_ENVPOOL, TASKS

Settings = Mapping[str, Any]

LOCKSTEP = "lockstep"
SCALING = "scaling"
SCALING_ENVS = (64, 256, 1024)

SIZES: Mapping[str, Sequence[int]] = {
    "cartpole": (16, 64, 256),
    "lunarlander": (16, 64, 256),
    "atari": (16,),
    "mujoco": (64,),
    "dict": (64,),
    "image": (64,),
    "wait": (16,),
    "work": (16,),
    "random": (16,),
}
# Numbers of processes where a step takes a millisecond: if it waits, all may wait at once, whatever the cores; if it
# works, more processes than cores leave it to the system to balance their loads. What should be fastest comes first.
CROWDS: Mapping[str, Sequence[int]] = {"wait": (16, 2), "work": (2, 16), "random": (2, 16)}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of stepping environments.

    Args:
        name: How `--only` and the CSV call it.
        label: How the table calls it.
        builder: A key of `builders.BUILDERS`.
        settings: Keyword arguments for the builder. Where there are several, all are tried and the fastest competes;
            what should be fastest comes first.
        by_task: Settings for some tasks, in place of those.
        peer: The virtual environment it needs, a key of `peers.PEERS`; None for the interpreter of the benchmark.
    """

    name: str
    label: str
    builder: str
    settings: Sequence[Settings] = ({},)
    by_task: Mapping[str, Sequence[Settings]] = field(default_factory=dict)
    peer: str | None = None

    def list_settings(self, task: str) -> Sequence[Settings]:
        """List the settings to try in a task."""
        return self.by_task.get(task, self.settings)


def crowd(
    key: str, *others: Settings, crowds: Mapping[str, Sequence[int]] = CROWDS
) -> Mapping[str, Sequence[Settings]]:
    """List settings for the tasks with slow steps: each of the others with each number of processes, under this key."""
    return {
        task: [{key: number, **other} for number in numbers for other in others or ({},)]
        for task, numbers in crowds.items()
    }


# In playing order. Neighbours are compared most: what the machine does between two of them spoils their ratio least.
CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            name="bare",
            label="bare loops",
            builder="bare",
            by_task=crowd("num_processes"),
        ),
        Contender(
            name="clusterenv-zmq",
            label="ClusterEnv, zmq",
            builder="clusterenv",
            settings=({"num_workers": 2, "transport": "zmq"},),
            by_task=crowd("num_workers", {"transport": "zmq"}),
        ),
        Contender(
            name=LOCKSTEP,
            label="lockstep limit",
            builder="lockstep",
            settings=({"barrier": "pair"}, {"barrier": "parent"}),
            by_task=crowd("num_processes", {"barrier": "parent"}),
        ),
        Contender(
            name="clusterenv-shm",
            label="ClusterEnv, shm",
            builder="clusterenv",
            settings=({"num_workers": 2, "transport": "shm"},),
            by_task=crowd("num_workers", {"transport": "shm"}),
        ),
        Contender(
            name="clusterenv-exchange",
            label="ClusterEnv, shm, send and recv",
            builder="clusterenv-exchange",
            by_task=crowd("num_workers"),
        ),
        Contender(
            name="clusterenv-shm-views",
            label="ClusterEnv, shm, copy=False",
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
            by_task=crowd(
                "num_workers",
                {"backend": "Multiprocessing", "half_batches": True, "any_order": True},
                {"backend": "Multiprocessing"},
                crowds=dict.fromkeys(CROWDS, (2, 16)),  # Its workers spin, so more than cores seldom help.
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
            settings=({"num_threads": 2}, {"num_threads": 1}),
        ),
        Contender(
            name="clusterenv-envpool",
            label="EnvPool on ClusterEnv workers",
            builder="clusterenv-envpool",
            settings=(
                {"num_workers": 2, "num_threads": 1},
                {"num_workers": 1, "num_threads": 2},
            ),
        ),
    )
}

# What only matters where the observations are large, and where steps take unequally long.
VIEWS = ("clusterenv-shm-views", "clusterenv-0-views")
EXCHANGE = ("clusterenv-exchange",)


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
    tasks: Collection[str],
    envs: Collection[int] | None,
    only: Collection[str] | None,
    *,
    scaling: bool,
    is_quick: bool = False,
) -> list[Cell]:
    """Lay out the cells of a run.

    Args:
        tasks: Keys of `tasks.TASKS`.
        envs: Sizes for every task; None for the sizes each task is meant for.
        only: Names of the contenders to keep (the lockstep limit always stays); None for all.
        scaling: Whether to end with the scaling cell.
        is_quick: Whether one size a task will do, the middle one.
    """
    cells = []
    for task, sizes in SIZES.items():
        if task in tasks:
            planned = envs or ([middle(sizes)] if is_quick else sizes)
            cells += [plan_cell(task, num_envs, only) for num_envs in planned]
    if scaling:
        cells.append(plan_scaling())
    return cells


def plan_cell(task: str, num_envs: int, only: Collection[str] | None) -> Cell:
    """Pick who competes in one task at one size; who cannot, will say so."""
    left_out: set[str] = set()
    if task != "image":
        left_out.update(VIEWS)
    if task != "random":
        left_out.update(EXCHANGE)
    if task not in IN_ENVPOOL:
        left_out.add("clusterenv-envpool")  # EnvPool itself stays, and says why it cannot.
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
    return Cell(name=SCALING, task="cartpole", entries=entries, base=base)


def middle(sizes: Sequence[int]) -> int:
    """Pick the size that stands for a task where there is room for one only."""
    return sorted(sizes)[len(sizes) // 2]
