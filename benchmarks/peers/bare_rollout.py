"""The limit for rollouts: one process's environments and an agent, in the loop that a user writes without a library."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.agent_loop import AgentLoop
from benchmarks.tasks import make_env


class AgentShard(AgentLoop):
    """The environments of one process, with an agent that chooses their actions.

    As in NEXT_STEP mode, a finished environment is reset in the place of its next step.

    Args:
        task: A key of `tasks.TASKS`.
        size: How many environments.
        num_steps: How many steps a rollout has.
    """

    def __init__(self, task: str, size: int, *, num_steps: int) -> None:
        self._envs = [make_env(task) for _ in range(size)]
        self._is_finished = [False] * size
        first = [env.reset(seed=seed)[0] for seed, env in enumerate(self._envs)]
        num_actions = int(self._envs[0].action_space.n)  # type: ignore[attr-defined]  # Discrete in these tasks
        super().__init__(np.array(first, np.float32), num_actions, num_steps)

    def step(self) -> None:
        """Collect one rollout: what happens between two meetings."""
        self.collect()

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def _step_environments(self, actions: NDArray[np.int64], step: int) -> None:
        is_finished, next_obs = self._is_finished, self.next_obs
        rewards, dones = self.rewards[step], self.dones[step]
        for index, env in enumerate(self._envs):
            if is_finished[index]:
                next_obs[index], _ = env.reset()
                rewards[index], is_finished[index] = 0.0, False
            else:
                next_obs[index], rewards[index], terminated, truncated, _ = env.step(actions[index])
                is_finished[index] = terminated or truncated
            dones[index] = is_finished[index]
