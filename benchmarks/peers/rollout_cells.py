"""Who competes in the rollout benchmark, and what ClusterEnv is to reach there."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from benchmarks.peers.cells import Cell, Contender, Entry, Settings
from benchmarks.peers.targets import Target
from benchmarks.tasks import TASKS

NUM_ENVS = 64
NUM_WORKERS = 2
BARE = "bare-rollout"
ROLLOUT_TASKS = ("cartpole", "lunarlander")
ON_WORKERS = ("rollout-shm", "rollout-zmq", "rollout-shm-updates", "rollout-zmq-updates", "stream-shm", "stream-zmq")
OF_BARE = 1.0
HEAD_AT_MOST = 0.10  # Of one core.

# How many times as fast as others, with weights that change as theirs may.
OF_OTHERS: Mapping[str, Mapping[str, float]] = {
    "cartpole": {"rllib": 5.0, "torchrl": 12.0, "torchrl-vector": 12.0, "json-push": 30.0},
    "lunarlander": {"rllib": 2.8, "torchrl": 5.0, "torchrl-vector": 5.0, "json-push": 15.0},
}

# The limit first, then ClusterEnv, then the policy in the main process, then the frameworks.
READING_ORDER = (
    BARE,
    *ON_WORKERS,
    "central-clusterenv",
    "central-sync",
    "central-puffer",
    "central-async",
    "central-sb3",
    "central-envpool",
    "envpool-rollout",
    "rllib",
    "torchrl",
    "torchrl-vector",
    "json-push",
)


def plan_cell(task: str, cache: Path, only: Collection[str] | None = None) -> Cell:
    """Pick who competes in one task.

    Args:
        task: One of `ROLLOUT_TASKS`.
        cache: The benchmark's cache directory, where heads note how busy they are.
        only: Names of the contenders to keep (the bare loops always stay); None for all.
    """
    entries = [
        Entry(contender=contender, num_envs=NUM_ENVS)
        for contender in list_contenders(task, cache)
        if only is None or contender.name in {*only, BARE}
    ]
    base = next(entry for entry in entries if entry.contender.name == BARE)
    name = f"{TASKS[task]}, {NUM_WORKERS} x {NUM_ENVS // NUM_WORKERS} envs"
    return Cell(name=name, task=task, entries=entries, base=base)


def list_contenders(task: str, cache: Path) -> Iterator[Contender]:
    """List everybody in playing order: the limit between the transports, because neighbours are compared most.

    Of several settings the first is the one that was fastest before: a quick run tries no other.
    """

    def contend(name: str, label: str, builder: str, *settings: Settings, peer: str | None = None) -> Contender:
        return Contender(name=name, label=label, builder=builder, settings=settings or ({},), peer=peer)

    def clusterenv(name: str, label: str, builder: str, *settings: Settings) -> Contender:
        noted = {"busy_log": str(busy_log_of(cache, name, task))}
        return contend(name, f"ClusterEnv {label}", builder, *({**each, **noted} for each in settings))

    shm = {"num_workers": NUM_WORKERS, "transport": "shm"}
    zmq = {"num_workers": NUM_WORKERS, "transport": "zmq"}
    updates = {"changes_weights": True}
    yield clusterenv("rollout-shm", "rollout, shm", "clusterenv-rollout", shm)
    yield contend(BARE, "bare loops, 2 processes", "bare-rollout")
    yield clusterenv("rollout-zmq", "rollout, zmq (TCP)", "clusterenv-rollout", zmq)
    yield clusterenv("rollout-shm-updates", "rollout, shm, new weights", "clusterenv-rollout", shm | updates)
    yield clusterenv("rollout-zmq-updates", "rollout, zmq, new weights", "clusterenv-rollout", zmq | updates)
    yield clusterenv("stream-shm", "stream, shm, new weights", "clusterenv-stream", shm)
    yield clusterenv("stream-zmq", "stream, zmq, new weights", "clusterenv-stream", zmq)
    yield clusterenv("central-clusterenv", "actions, shm, policy in main", "central-clusterenv", shm)
    yield contend("central-sync", "Gymnasium SyncVectorEnv, policy in main", "central-sync")
    yield contend(
        "central-puffer",
        "PufferLib 3.0, policy in main",
        "central-puffer",
        {"backend": "Serial"},
        {"backend": "Multiprocessing", "num_workers": 2, "half_batches": True},
        {"backend": "Multiprocessing", "num_workers": 1},
        {"backend": "Multiprocessing", "num_workers": 2},
        peer="pufferlib",
    )
    yield contend("central-async", "Gymnasium AsyncVectorEnv, policy in main", "central-async")
    yield contend("central-sb3", "SB3 SubprocVecEnv, policy in main", "central-sb3", peer="sb3")
    yield contend(
        "central-envpool",
        "EnvPool (C++), policy in main",
        "central-envpool",
        {"num_threads": 2},
        {"num_threads": 1},
        {"num_threads": 2, "half_batches": True},
        {"num_threads": 1, "half_batches": True},
    )
    yield clusterenv(
        "envpool-rollout",
        "rollout, EnvPool (C++) on workers",
        "clusterenv-envpool-rollout",
        {"num_workers": 2, "num_threads": 1},
        {"num_workers": 2, "num_threads": 2},
    )
    yield contend("rllib", "RLlib EnvRunners", "rllib", {"in_flight": 2}, {"in_flight": 0}, peer="rllib")
    yield contend(
        "torchrl",
        "TorchRL collectors, its own environments",
        "torchrl",
        {"collector": "sync", "envs": "serial"},
        {"collector": "async", "envs": "serial"},
        {"collector": "parallel", "envs": "serial"},
        peer="torchrl",
    )
    yield contend(
        "torchrl-vector",
        "TorchRL collectors, SyncVectorEnv",
        "torchrl",
        {"collector": "sync", "envs": "vector"},
        {"collector": "async", "envs": "vector"},
        {"collector": "one", "envs": "vector"},
        peer="torchrl",
    )
    yield contend("json-push", "all weights as JSON at every step", "json-push")


def list_targets(task: str) -> Iterator[Target]:
    """List what ClusterEnv is to reach in one task, apart from how busy its head may be."""

    def target(name: str, rival: str, at_least: float) -> Target:
        return Target(name=name, envs=NUM_ENVS, rival=rival, rival_envs=NUM_ENVS, at_least=at_least)

    for name in ON_WORKERS:
        yield target(name, BARE, OF_BARE)
    # Frameworks' fastest settings are mostly asynchronous, as a stream is; so both ways of ours are held against them.
    for rival, at_least in OF_OTHERS[task].items():
        yield target("rollout-shm-updates", rival, at_least)
        yield target("stream-shm", rival, at_least)
    yield target("envpool-rollout", "central-envpool", 1.0)


def busy_log_of(cache: Path, name: str, task: str) -> Path:
    """Say where a contender notes how busy its head is."""
    return cache / "logs" / f"{name}-{task}.busy"
