"""What `benchmarks.studies.scale` measures with one number of workers."""

import msgspec


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's part of a rollout costs the head, in seconds: the median of the rounds, and quartiles.

    Args:
        cpu_s: Of all threads, without heartbeats.
        main_s: Of the main thread: the rest is ZeroMQ's, which encrypts and decrypts.
        wall_s: Wall-clock, with the light workers on the same cores.
        checks: How often the newest policy was compared with one that workers hold: once a version, whoever holds it.
        pulls: How often it was sent weights.
    """

    cpu_s: float
    low_s: float
    high_s: float
    main_s: float
    wall_s: float
    checks: float
    pulls: float


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in a stream when seven of eight workers pull at once.

    Args:
        weights_bytes: Of one version.
        pace_s: How long a worker takes for a rollout.
        seconds: Until all of the seven had delivered a rollout with the new weights.
        rollouts: How many were delivered meanwhile.
        gap_before_s: The longest time between two rollouts before it.
        gap_s: The longest during it.
        gap_cpu_s: CPU time of the head's process within that one.
        others_gap_before_s: The longest between two rollouts of the eighth ones before it.
        others_gap_s: The longest during it.
        grown_bytes: By how much the head's memory grew at most.
    """

    weights_bytes: int
    pace_s: float
    seconds: float
    rollouts: int
    gap_before_s: float
    gap_s: float
    gap_cpu_s: float
    others_gap_before_s: float
    others_gap_s: float
    grown_bytes: int


class SizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with so many workers; if observations have another size, only rollouts and streams.

    Args:
        num_floats: Of an observation; 0 for those of the usual environment.
        rollout_messages: That a worker's rollout comes in.
        rollout_bytes: Of them, with headers.
        idle_cores: What heartbeats take while nothing is asked for.
        versions: CPU seconds from new weights to the rule's verdict on all workers, by agent.
        peak_bytes: The head's memory after the measurements, before the storm.
    """

    num_workers: int
    num_floats: int
    rollout_messages: int
    rollout_bytes: int
    start_s: float
    start_cpu_s: float
    idle_cores: float
    versions: dict[str, float]
    costs: dict[str, Cost]
    peak_bytes: int
    storm: Storm | None

    @property
    def pull_s(self) -> float:
        """The CPU time of a pull."""
        plain, pulled = self.costs["rollout"], self.costs["rollout, pulled"]
        return (pulled.cpu_s - plain.cpu_s) / pulled.pulls

    def full_at(self, phase: str) -> float:
        """Workers' rollouts a second with which the busier of the head's two threads would be full."""
        cost = self.costs[phase]
        return 1 / max(cost.main_s, cost.cpu_s - cost.main_s)

    @property
    def messages_a_second(self) -> float:
        """Messages that a stream took in by the clock, with the light workers on the same cores."""
        return self.rollout_messages / self.costs["stream"].wall_s

    @property
    def bytes_a_second(self) -> float:
        """Bytes that a stream took in by the clock, with the light workers on the same cores."""
        return self.rollout_bytes / self.costs["stream"].wall_s
