"""Show: the demo from its first line to its last picture."""

from __future__ import annotations

import copy
import logging
import shutil
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from clusterenv import AdaptiveSync, ClusterEnv
from examples.demo.course import Course
from examples.demo.display import Display, open_display
from examples.demo.figure import draw_course
from examples.demo.flight import Flight, draw_strip, fly, write_film
from examples.demo.opening import compare_with_gymnasium
from examples.demo.summary import summarise
from examples.demo.training import train
from examples.ppo import Agent, Args

NUM_FLIGHTS = 8  # With the trained agent; the best of them is filmed.


@dataclass(frozen=True, kw_only=True)
class Show:
    """What `python -m examples.demo` does; the fields are its options."""

    num_envs: int
    seed: int
    seconds: float
    out: Path

    def run(self) -> int:
        """Train, tell and draw; returns the exit status."""
        display = open_display()
        logging.getLogger("clusterenv").addHandler(Remarks(display))
        # Where examples/ppo.py counts steps, a demo counts seconds: larger minibatches learn more in them.
        args = Args(num_envs=self.num_envs, seed=self.seed, minibatch_size=512, learning_rate=1.5e-3)
        torch.distributions.Distribution.set_default_validate_args(False)  # The clock is running.
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.torch_threads)
        # No guard against plateaus: that is for learners that clip against the workers' policy, and this one does not.
        rule = AdaptiveSync(threshold=args.sync_threshold, plateau=None)
        with ClusterEnv(args.env_id, args.num_envs, sync=rule) as envs:
            course = Course(args.num_envs, envs.num_workers, self.seconds, args.sync_threshold)
            num_compared = compare_with_gymnasium(envs, args.env_id, args.seed)
            say(f"ClusterEnv and Gymnasium's SyncVectorEnv: {num_compared:,} steps compared, equal bit for bit.")
            say(
                f"Now PPO learns to land on the moon: {args.num_envs} landers on {envs.num_workers} workers, for at "
                f"most {self.seconds:g} seconds. Ctrl-C ends it at any time.",
                "",
            )
            agent = Agent(8, 4)
            untrained = copy.deepcopy(agent)
            envs.rollout(agent, num_steps=1)  # Workers import torch for it, before the clock starts.
            envs.reset(seed=args.seed)
            try:
                train(envs, agent, args, course, display.show)
            except KeyboardInterrupt:
                envs.close()
                say("", "Stopped; the workers have ended.", *summarise(course, is_interrupted=True))
                return 128 + signal.SIGINT
        say("", *summarise(course), "")
        self.draw(course, args.env_id, untrained, agent)
        return 0

    def draw(self, course: Course, env_id: str, untrained: Agent, trained: Agent) -> None:
        """Leave pictures behind, and say where."""
        self.out.mkdir(parents=True, exist_ok=True)
        flights = [fly(env_id, trained, seed=10_000 + number) for number in range(NUM_FLIGHTS)]
        totals = [flight.total for flight in flights]
        best = flights[int(np.argmax(totals))]
        before = fly(env_id, untrained, best.seed, is_filmed=True)
        after: Flight = fly(env_id, trained, best.seed, is_filmed=True)
        draw_course(self.out / "learning.png", course)
        draw_strip(self.out / "landing.png", {"Before": before, f"After {course.seconds:.0f} s of training": after})
        write_film(self.out / "landing.gif", after)
        say(
            f"{NUM_FLIGHTS} flights of the trained agent, on moons it has not seen, returned "
            f"{', '.join(f'{total:.0f}' for total in totals)}. The best of them is in the pictures:",
        )
        print(f"  {self.out / 'learning.png'}   the learning curve, the divergence and the pulls")
        print(f"  {self.out / 'landing.png'}    the same moon before and after the training")
        print(f"  {self.out / 'landing.gif'}    the landing as a film")
        say(
            "",
            "Next: README.md does this for your environments in 15 lines, docs/tutorials/four-steps.md for your PPO.",
        )


class Remarks(logging.Handler):
    """Puts the library's warnings where they do not spoil the display."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning."""
        self._display.tell(f"Note: {record.getMessage()}")


def say(*paragraphs: str) -> None:
    """Print paragraphs as wide as the terminal is, within reason."""
    width = max(20, min(100, shutil.get_terminal_size(fallback=(101, 24)).columns - 1))
    for paragraph in paragraphs:
        print("\n".join(textwrap.wrap(paragraph, width)))
    sys.stdout.flush()
