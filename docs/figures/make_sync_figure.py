"""Draw docs/figures/sync.png: when workers pull, and what that does to learning.

    python -m docs.figures.make_sync_figure

Four real trainings of a 64-64 agent on CartPole in this process (`num_workers=0`), one seed each, about 35 s of CPU
time. Needs torch and matplotlib. It is an illustration: for numbers over several seeds see docs/explanation/sync.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from experiments.agents import MlpAgent
from experiments.ppo import Learner, PpoConfig
from matplotlib import pyplot as plt

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate
from clusterenv.policy import SyncRule

NUM_ENVS, NUM_STEPS, NUM_VERSIONS, THRESHOLD, SEED = 48, 128, 25, 0.05, 1
LINE, REFERENCE = "#1f5fa8", "#9a9a9a"
MARKS = {
    "diverged": ("pulled: over the threshold", "o", "#d1495b"),
    "plateau": ("pulled: stopped growing", "D", "#e0a030"),
}


@dataclass
class Run:
    """What one training reports, an entry for each version."""

    divergences: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    pulls: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in MARKS})
    num_pulls: int = 0


def train(rule: SyncRule, *, is_decoupled: bool) -> Run:
    """Train one agent, and write down what its worker does."""
    torch.manual_seed(SEED)
    agent, run = MlpAgent(4, 2), Run()
    # Fewer and larger steps than the benchmark's, which draw the same picture in a fraction of the time.
    config = PpoConfig(decoupled=is_decoupled, learning_rate=1e-3, minibatch_size=500)
    learner = Learner(agent, config, SEED)
    with ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=0, sync=rule) as envs:
        envs.reset(seed=SEED)
        before = dict.fromkeys(MARKS, 0)
        for version in range(1, NUM_VERSIONS + 1):
            rollout = envs.rollout(agent, NUM_STEPS)
            stats = envs.stats
            run.divergences.append(stats["divergence"])
            run.returns.append(float(rollout.episodes.returns.mean()))
            for name in MARKS:
                if (count := stats.get(f"pulls_{name}", 0)) > before[name]:
                    before[name] = count
                    run.pulls[name].append(version)
            learner.update(rollout)
        run.num_pulls = envs.stats["pulls"] - envs.stats["pulls_first"]
    return run


def draw(runs: dict[str, Run], reference: Run, path: Path) -> None:
    """Draw a column a training: the divergence above, the return below."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, len(runs), figsize=(10, 4.8), sharex=True, sharey="row", layout="constrained")
    versions = range(1, NUM_VERSIONS + 1)
    for column, (title, run) in enumerate(runs.items()):
        above, below = axes[:, column]
        above.axhline(THRESHOLD, color=REFERENCE, linestyle="--", linewidth=1)
        above.plot(versions, run.divergences, color=LINE, linewidth=1.5, zorder=2)
        for name, (_, marker, color) in MARKS.items():
            heights = [run.divergences[version - 1] for version in run.pulls[name]]
            above.scatter(run.pulls[name], heights, marker=marker, color=color, s=28, zorder=3)
        above.set_title(f"{title}\n{run.num_pulls} pulls in {NUM_VERSIONS - 1} updates", fontsize=9.5)
        below.plot(versions, reference.returns, color=REFERENCE, linewidth=1.2)
        below.plot(versions, run.returns, color=LINE, linewidth=1.5)
        below.set_xlabel("version of the policy")
    axes[0, 0].set_ylabel("divergence of the worker's\npolicy from the newest (nats)")
    axes[1, 0].set_ylabel("mean return of\nfinished episodes")
    axes[0, 0].annotate("threshold", (NUM_VERSIONS, THRESHOLD), (0, 3), textcoords="offset points", ha="right",
                        color="#666666", fontsize=8)  # fmt: skip
    axes[1, 0].annotate("grey: EveryUpdate", (1, reference.returns[-1]), (2, -2), textcoords="offset points",
                        color="#666666", fontsize=8)  # fmt: skip
    handles = [
        plt.Line2D([], [], marker=marker, color=color, linestyle="", label=label) for label, marker, color in
        MARKS.values()
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train and draw."""
    plt.switch_backend("agg")  # No window.
    logging.disable(logging.WARNING)  # The advice about plain PPO is the point of the figure.
    torch.set_num_threads(1)
    unprotected = AdaptiveSync(threshold=THRESHOLD, plateau=None, max_lag=10**6)
    runs = {
        "decoupled PPO, AdaptiveSync(threshold=0.05)": train(AdaptiveSync(threshold=THRESHOLD), is_decoupled=True),
        "plain PPO, threshold only: the trap": train(unprotected, is_decoupled=False),
        "plain PPO, AdaptiveSync(threshold=0.05)": train(AdaptiveSync(threshold=THRESHOLD), is_decoupled=False),
    }
    draw(runs, train(EveryUpdate(), is_decoupled=False), Path(__file__).with_name("sync.png"))


if __name__ == "__main__":
    main()
