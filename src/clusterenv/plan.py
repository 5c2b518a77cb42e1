"""Plan: what is to be run, known before it is known where: environments, their spaces, how they reset."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gymnasium.vector import AutoresetMode

from clusterenv.factories import Factories, local_registry
from clusterenv.sample import Sample
from clusterenv.wire.assignment import Assignment, EnvFactory, VectorFactory


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan:
    """Makes every worker's assignment.

    Attributes:
        must_equal: Whether all observation spaces must be equal, or only agree in shape and dtype.
        num_workers: 0 if everything runs in this process.
        on_env_error: What follows an exception of an environment.
    """

    factories: Factories
    sample: Sample
    autoreset_mode: AutoresetMode
    must_equal: bool
    num_workers: int = field(default=0)
    on_env_error: str = "raise"

    def assignment(self, start: int, stop: int) -> Assignment:
        """Return the work of whoever hosts environments `[start, stop)`."""
        return Assignment(
            factories=self._factories(start, stop),
            registry=self._registry,
            autoreset_mode=self.autoreset_mode,
            observation_space=self.sample.single_observation_space,
            action_space=self.sample.single_action_space,
            must_equal=self.must_equal,
            start=start,
            num_envs=self.factories.num_envs,
            num_workers=self.num_workers,
            on_env_error=self.on_env_error,
        )

    def _factories(self, start: int, stop: int) -> list[EnvFactory] | VectorFactory:
        factories, kept = self.factories.for_shard(start, stop), self.sample.kept
        if isinstance(factories, list) and kept is not None and start == 0:
            return [lambda: kept, *factories[1:]]
        return factories

    @cached_property
    def _registry(self) -> list[bytes]:
        return local_registry() if self.num_workers else []
