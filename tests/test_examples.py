"""Every example learns: a shortened run of each, with a fixed seed, ends with better returns than it began with."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import numpy as np
import pytest

from clusterenv import LocalLauncher, RayLauncher, SlurmLauncher, SSHLauncher
from clusterenv.launchers.base import Launcher

pytest.importorskip("tyro")
pytest.importorskip("torch")


def learns(test: Any) -> Any:
    """Mark a test that trains until an improvement cannot be chance."""
    return pytest.mark.slow(pytest.mark.timeout(300)(test))


def improvement(returns: list[float], num_episodes: int = 20) -> float:
    """Mean return of the last episodes, less that of the first."""
    assert len(returns) >= 2 * num_episodes, f"only {len(returns)} episodes"
    return float(np.mean(returns[-num_episodes:]) - np.mean(returns[:num_episodes]))


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        ([], LocalLauncher()),
        (["local", "--cpus", "1"], LocalLauncher(cpus=1)),
        (["slurm", "--nodes", "4", "--partition", "cpu"], SlurmLauncher(nodes=4, partition="cpu")),
        (["ssh", "--hosts", "n1", "n2"], SSHLauncher(hosts=["n1", "n2"])),
        (["ray", "--cpus", "2", "--address", "n1:6379"], RayLauncher(cpus=2, address="n1:6379")),
        (["ray", "--resources", "room", "1"], RayLauncher(resources={"room": 1})),
    ],
)
def test_the_command_line_names_a_launcher_and_its_options(words: list[str], launcher: Launcher) -> None:
    import tyro
    from examples import ppo

    args = tyro.cli(ppo.Args, args=["--num-envs", "8", *words])
    assert (args.num_envs, args.launcher) == (8, launcher)


@learns
@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3"])
def test_ppo_learns(env_id: str) -> None:
    from examples import ppo

    args = ppo.Args(env_id=env_id, total_timesteps=50_000, num_steps=64, learning_rate=2e-3, num_workers=2, track=False)
    returns = ppo.train(args)
    assert improvement(returns) > 80


@learns
def test_ppo_continuous_learns() -> None:
    pytest.importorskip("mujoco")
    from examples import ppo_continuous as example

    args = example.Args(
        env_id="InvertedPendulum-v5",
        total_timesteps=30_000,
        num_steps=64,
        learning_rate=1e-3,
        num_workers=2,
        track=False,
    )
    assert improvement(example.train(args)) > 30


@learns
def test_ppo_on_a_stream_learns() -> None:
    from examples import ppo_async as example

    args = example.Args(
        env_id="CartPole-v1",
        total_timesteps=40_000,
        num_steps=64,
        learning_rate=2e-3,
        num_workers=2,
        track=False,
    )
    assert improvement(example.train(args)) > 60


def test_v_trace_is_generalized_advantage_estimation_where_workers_are_up_to_date() -> None:
    import torch
    from examples import ppo, ppo_async

    rng = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(9, 4, generator=rng), torch.randn(10, 4, generator=rng)
    done = torch.rand(9, 4, generator=rng) < 0.3
    terminated = done & (torch.rand(9, 4, generator=rng) < 0.5)
    expected = ppo.estimate_advantages(rewards, values, terminated, done, ppo.Args())
    advantages, targets = ppo_async.trace(rewards, values, terminated, done, torch.ones(9, 4), ppo_async.Args())
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(targets, values[:-1] + expected)


def test_v_trace_believes_the_critic_where_the_newest_policy_would_never_have_gone() -> None:
    import torch
    from examples import ppo_async

    rewards, values, going = torch.full((3, 1), 100.0), torch.zeros(4, 1), torch.zeros(3, 1, dtype=torch.bool)
    weights = torch.tensor([[1.0], [0.0], [1.0]])
    args = ppo_async.Args(gamma=1.0, trace_lambda=1.0)
    advantages, targets = ppo_async.trace(rewards, values, going, going, weights, args)
    assert targets.flatten().tolist() == [100.0, 0.0, 100.0]
    assert advantages.flatten().tolist() == [100.0, 200.0, 100.0]


@learns
def test_ppo_atari_learns_from_pixels() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    from examples import ppo_atari as example

    args = example.Args(
        env_id="ALE/CrazyClimber-v5",
        total_timesteps=21_504,
        max_episode_steps=256,
        screen_size=42,
        num_envs=16,
        num_steps=64,
        learning_rate=1e-3,
        clip_coef=0.2,
        num_workers=2,
        torch_threads=1,
        track=False,
    )
    assert improvement(example.train(args), num_episodes=16) > 100


@learns
def test_dqn_learns() -> None:
    from examples import dqn

    returns = dqn.train(dqn.Args(total_timesteps=12_000, learning_starts=500, num_workers=2, track=False))
    assert improvement(returns) > 40


@learns
def test_ppo_lstm_learns_what_only_a_memory_can_tell() -> None:
    from examples import ppo_lstm as example

    args = example.Args(total_timesteps=90_000, num_steps=64, num_workers=2, track=False)
    assert improvement(example.train(args)) > 40


@learns
def test_sac_learns() -> None:
    from examples import sac

    # Long enough to be sure of: a stream's rollouts depend on who was how fast.
    args = sac.Args(total_timesteps=14_000, learning_starts=400, hidden=32, batch_size=128, num_workers=2, track=False)
    assert improvement(sac.train(args), num_episodes=8) > 400


def test_the_plain_loop_learns_and_gymnasiums_own_environments_learn_the_same() -> None:
    from examples import actions

    def train(**settings: Any) -> list[float]:
        return actions.train(actions.Args(num_steps=64, track=False, **settings))

    assert improvement(train(total_timesteps=30_000, num_workers=2)) > 80
    assert train(total_timesteps=4_000, num_workers=2) == train(total_timesteps=4_000, gymnasium=True)


def test_weights_and_biases_says_what_to_install_before_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import ppo

    monkeypatch.setitem(sys.modules, "wandb", None)  # How Python itself marks a module that cannot be imported.
    args = ppo.Args(track=False, wandb_project="landers", launcher=SSHLauncher(hosts=["nowhere.invalid"]))
    with pytest.raises(ModuleNotFoundError, match="`pip install wandb`"):
        ppo.train(args)


@pytest.mark.parametrize(
    "name", ["actions", "dqn", "ppo", "ppo_async", "ppo_atari", "ppo_continuous", "ppo_lstm", "sac"]
)
def test_help_explains_every_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import tyro

    if name == "ppo_atari":
        pytest.importorskip("ale_py")
    example = importlib.import_module(f"examples.{name}")
    with pytest.raises(SystemExit):
        tyro.cli(example.Args, args=["--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--num-envs INT environments" in words
    assert re.findall(r"(--[a-z][\w-]*)(?:, --no-[\w-]+)? (?:\S+ )?\(default", words) == [], "arguments without a word"
