"""A contender's own process: `python -m benchmarks.peers.contender BUILDER TASK NUM_ENVS SETTINGS`.

It speaks lines. On its standard output: `ready`, or `missing REASON` (a library is not there), or `cannot REASON` (a
library has no way to do the task), or `failed REASON`; then
`rate ENV_STEPS_PER_SECOND` for every `run SECONDS` it reads on its standard input, until `quit` or its end. Between
lines it does nothing, and the arena freezes it on top of that.
"""

import argparse
import json
import os
import sys

from benchmarks.peers.builders import BUILDERS, CannotDo


def main() -> None:
    """Build the contender and answer lines until told to quit."""
    parser = argparse.ArgumentParser(
        description="One contender of the step benchmark; started by the benchmark itself."
    )
    parser.add_argument("builder", choices=sorted(BUILDERS))
    parser.add_argument("task")
    parser.add_argument("num_envs", type=int)
    parser.add_argument("settings", type=json.loads, help="JSON object of the builder's keyword arguments")
    arguments = parser.parse_args()

    # Libraries greet on standard output (pygame does); give them standard error and keep the line for ourselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)

    try:
        stepper = BUILDERS[arguments.builder](arguments.task, arguments.num_envs, **arguments.settings)
    except ImportError as error:
        answers.write(f"missing {one_line(error)}\n")
        raise
    except CannotDo as error:
        answers.write(f"cannot {error}\n")
        raise
    except Exception as error:
        answers.write(f"failed {one_line(error)}\n")
        raise
    answers.write("ready\n")

    for line in sys.stdin:
        command, _, value = line.strip().partition(" ")
        if command == "quit":
            break
        try:
            rate = stepper.run(float(value))
        except Exception as error:
            answers.write(f"failed {one_line(error)}\n")
            raise
        answers.write(f"rate {rate:.3f}\n")
    stepper.close()


def one_line(error: Exception) -> str:
    """Shorten an exception to its type and the first line of its text; the log has the rest."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


if __name__ == "__main__":
    main()
