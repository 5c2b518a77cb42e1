"""`python -m examples.demo`: the command line, and what is needed to run it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDS = {"torch": "torch", "matplotlib": "matplotlib", "tyro": "tyro", "Box2D": "box2d", "pygame": "pygame"}


def main() -> int:
    """Run the demo; returns the exit status."""
    options = parse()
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if missing:
        print(
            f"The demo needs {', '.join(missing)}, which this Python does not have.\n"
            "`make demo` installs everything into .venv by itself; so does, into the Python of your choice,\n"
            '    pip install torch && pip install -e ".[box2d,demo]"',
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        # Only now: importing torch takes seconds, in which `--help` has long answered and Ctrl-C must be heard.
        from examples.demo.show import Show

        return Show(num_envs=options.num_envs, seed=options.seed, seconds=options.seconds, out=options.out).run()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 128 + signal.SIGINT


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Watch PPO learn to land on the moon (LunarLander-v3), on workers on all cores of this machine. "
        "It ends when the task is solved or the time is up, and leaves a figure, a picture and a film.",
    )
    parser.add_argument(
        "--seconds", type=float, default=100.0, metavar="S", help="how long to train at most (default: %(default)g)"
    )
    parser.add_argument(
        "--num-envs", type=int, default=32, metavar="N", help="how many landers fly at once (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of landers, network and sampling (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="where pictures go (default: %(default)s)"
    )
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error(f"--seconds must be positive, got {options.seconds:g}")
    if options.num_envs < 1:
        parser.error(f"--num-envs must be at least 1, got {options.num_envs}")
    return options


if __name__ == "__main__":
    sys.exit(main())
