"""Training: PPO by the clock. The learner is that of examples/ppo.py; only the end is another."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from clusterenv import ClusterEnv
from examples.demo.course import Course, Point
from examples.ppo import Agent, Args, learn


def train(envs: ClusterEnv, agent: Agent, args: Args, course: Course, show: Callable[[Course], None]) -> None:
    """Train until it is solved, or until another update might not end within the course's budget.

    Args:
        envs: Landers, reset.
        agent: Is trained in place.
        args: PPO's settings. The learning rate falls with time, not with steps: it is time that will run out.
        course: Is kept up to date, so it holds what was reached also when this is interrupted.
        show: Called after each update.
    """
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    steps_before = envs.stats["env_steps"]
    began = time.monotonic()
    elapsed = update_s = 0.0
    while not course.is_solved and elapsed + update_s <= course.budget_s:
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - elapsed / course.budget_s)
        env_steps = course.points[-1].env_steps if course.points else 0
        rollout = envs.rollout(agent, args.num_steps)
        # Episodes come worker by worker; a curve wants them in the order in which they ended.
        for index in np.argsort(rollout.episodes.steps, kind="stable"):
            course.returns.append(float(rollout.episodes.returns[index]))
            course.ended_at.append(env_steps + int(rollout.episodes.steps[index] + 1) * rollout.num_envs)
        learn(agent, optimizer, rollout, args)
        now = time.monotonic() - began
        stats = envs.stats
        course.points.append(
            Point(
                seconds=now,
                env_steps=stats["env_steps"] - steps_before,
                mean_return=course.mean_return,
                divergence=stats["divergence"],
                pulls=stats["pulls"],
                pulls_saved=stats["pulls_saved"],
            )
        )
        show(course)
        elapsed, update_s = now, now - elapsed
