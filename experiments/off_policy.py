"""The addendum of PREREGISTRATION.md: a threshold ten times as large for learners from replay.

    python -m experiments.off_policy

Works as `experiments.aps` does: a finished training is a file in experiments/results/off_policy, and is not repeated.
Writes runs.csv and report.md there.
"""

from __future__ import annotations

import signal
import sys

from clusterenv.config import usable_cores
from experiments.aps import ROOT, SettingsDiffer, open_folder
from experiments.plan import Run
from experiments.record import read_record
from experiments.report import write_task
from experiments.results import Results, total, write_runs
from experiments.rules import EVERY, Rule
from experiments.runner import Folder, RunFailed, run_all
from experiments.tasks import TASKS

SEEDS = range(311, 316)
RULES = (EVERY, Rule("adaptive", 0.5), Rule("periodic", 16))
TASKS_FROM_REPLAY = {name: TASKS[name] for name in ("sac-pendulum", "dqn-cartpole")}


def main() -> int:
    """Run what is not on record, and compare; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # As in experiments.aps.
    folder = Folder(ROOT / "experiments/results/off_policy")
    runs = [Run(task, rule, seed) for seed in SEEDS for task in TASKS_FROM_REPLAY for rule in RULES]
    try:
        open_folder(folder, TASKS_FROM_REPLAY)
        run_all(runs, folder, TASKS_FROM_REPLAY, usable_cores())
    except (RunFailed, SettingsDiffer) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Finished runs are kept, and the same command goes on from here.", file=sys.stderr)
        return 130
    results = Results(TASKS_FROM_REPLAY, {}, {run: total(read_record(folder.record(run))) for run in runs})
    write_runs(folder.path / "runs.csv", results)
    sections = ["# A threshold of 0.5 for learners from replay"]
    sections += [f"## {task}\n\n{write_task(results, task)}" for task in TASKS_FROM_REPLAY]
    text = "\n\n".join(sections) + "\n"
    (folder.path / "report.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
