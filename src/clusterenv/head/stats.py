"""Stats: what a run has done and what it has cost, as plain numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from clusterenv.head.outcome import Collection
from clusterenv.policy.rehearsal import Rehearsal
from clusterenv.policy.sync import Reason


class Stats:
    """Counters of a run; `report` returns a plain mapping for any logger.

    Attributes:
        rehearsal: Estimates what `AdaptiveSync` would have done, if workers pull every version.
    """

    def __init__(self) -> None:
        self.env_steps = 0
        self.rollout_steps = 0
        self.rollouts = 0
        self.env_errors = 0
        self.updates = 0
        self.checks = 0
        self.pulls = 0
        self.pulls_if_every_update = 0
        self.bytes_if_every_update = 0
        self.divergence = float("nan")
        self.threshold = float("nan")
        self.age = 0.0
        self.fast_path = 0
        self.bytes: Counter[str] = Counter(weights=0, checks=0, rollouts=0)
        self.reasons: Counter[Reason] = Counter()
        self.collect_s = 0.0
        self.busy_s = 0.0
        self.rollouts_lost = 0
        self.rollouts_discarded = 0
        self.env_steps_discarded = 0
        self.rehearsal: Rehearsal | None = None

    def note_needed(self, num_pulls: int, num_bytes: int) -> None:
        """Count the pulls that there would have been if workers pulled every version, and their bytes."""
        self.pulls_if_every_update += num_pulls
        self.bytes_if_every_update += num_bytes

    def note_rollout(self, env_steps: int, collection: Collection, seconds: float) -> None:
        """Count a rollout."""
        self.env_steps += env_steps
        self.rollouts += 1
        self.collect_s += seconds
        self.rollout_steps += env_steps
        self.busy_s += sum(collection.busy_s)
        self.bytes["rollouts"] += sum(array.nbytes for array in collection.buffers.arrays())

    def note_discarded(self, env_steps: int) -> None:
        """Count a rollout that was made and discarded."""
        self.rollouts_discarded += 1
        self.env_steps_discarded += env_steps

    def snapshot(self) -> dict[str, float]:
        """Return the counts that one rollout can change."""
        return {
            "env_steps": self.env_steps,
            "checks": self.checks,
            "pulls": self.pulls,
            **{f"bytes_{kind}": count for kind, count in self.bytes.items()},
        }

    def report(self, num_workers: int) -> dict[str, Any]:
        """Return all counters as a flat mapping of names to numbers."""
        return {
            "env_steps": self.env_steps,
            "rollouts": self.rollouts,
            "env_errors": self.env_errors,
            "rollouts_discarded": self.rollouts_discarded,
            "rollouts_lost": self.rollouts_lost,
            "env_steps_discarded": self.env_steps_discarded,
            "updates": self.updates,
            "checks": self.checks,
            "pulls": self.pulls,
            "pulls_saved": self.pulls_if_every_update - self.pulls,
            "divergence": self.divergence,
            "threshold": self.threshold,
            "age": self.age,
            "fast_path": self.fast_path,
            "collect_seconds": self.collect_s,
            "env_steps_per_second": self.rollout_steps / self.collect_s if self.collect_s else 0.0,
            "worker_idle_share": 1.0 - self.busy_s / (max(1, num_workers) * self.collect_s) if self.collect_s else 0.0,
            **{f"bytes_{kind}": count for kind, count in self.bytes.items()},
            **{f"pulls_{reason.value}": count for reason, count in self.reasons.items()},
        }

    def summary(self) -> str:
        """Describe in a few sentences what adaptive synchronisation saved."""
        every = self.bytes_if_every_update
        spent = self.bytes["weights"] + self.bytes["checks"]
        if not every:
            return f"{self.env_steps} environment steps; no policy was sent to workers."
        versions = "1 version" if self.updates == 1 else f"{self.updates} versions"
        pulled = (
            f"{self.env_steps} environment steps, {versions} of the policy: workers pulled weights {self.pulls} times"
        )
        if self.pulls == self.pulls_if_every_update and spent == every:
            sentences = [f"{pulled}, every version, {_size(every)}."]
        else:
            sentences = [
                f"{pulled} where pulling every version would have taken {self.pulls_if_every_update}.",
                f"{_size(spent)} for weights and checks instead of {_size(every)}, {_change(spent, every)}.",
            ]
        if self.reasons[Reason.SHARED]:
            sentences.append("Workers that share the head's memory pulled all versions: a check takes longer there.")
        if self.reasons[Reason.BUDGET] and not math.isnan(self.threshold):
            sentences.append(f"The budget came to a threshold of {self.threshold:.2g} nats in the end.")
        if self.rehearsal is not None and 2 * self.rehearsal.num_judged > self.rehearsal.num_versions:
            share = self.rehearsal.num_pulls / self.rehearsal.num_versions
            rows, num_workers = self.env_steps / self.updates, self.pulls_if_every_update / self.updates
            would = share * every + self.updates * self.rehearsal.estimate_check_bytes(num_workers, rows)
            sentences.append(
                f"AdaptiveSync({self.rehearsal.rule.threshold:g}) would have pulled about "
                f"{self.pulls_if_every_update * share:.0f} times and sent about {_size(would)} with its checks, "
                f"{_change(would, every)}, judging by {self.rehearsal.num_judged} of the versions."
            )
        return " ".join(sentences)


def _change(spent: float, every: float) -> str:
    return f"{1 - spent / every:.0%} saved" if spent <= every else f"{spent / every - 1:.0%} more"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
