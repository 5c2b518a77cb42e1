"""A CleanRLView shows what Gymnasium 0.29 showed, and a training loop in CleanRL's shape learns through it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Categorical

from clusterenv import ClusterEnv
from clusterenv.adapters.cleanrl import CleanRLView
from clusterenv.errors import ConfigError
from tests.conftest import Backend
from tests.worlds import Factory, World, assert_same, make_factories


class Vector029:
    """Steps environments and lays their infos out as Gymnasium 0.29's SyncVectorEnv is documented to."""

    def __init__(self, factories: list[Factory]) -> None:
        self.envs = [factory() for factory in factories]

    def reset(self, seed: int) -> tuple[NDArray[Any], dict[str, Any]]:
        answers = [env.reset(seed=seed + index) for index, env in enumerate(self.envs)]
        return np.stack([obs for obs, _ in answers]), self._gather([info for _, info in answers])

    def step(self, actions: NDArray[Any]) -> tuple[Any, ...]:
        answers = []
        for env, action in zip(self.envs, actions, strict=True):
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                last = {"final_observation": obs, "final_info": info}
                obs, info = env.reset()
                info |= last
            answers.append((obs, float(reward), bool(terminated), bool(truncated), info))
        obs, rewards, terminations, truncations, infos = zip(*answers, strict=True)
        return np.stack(obs), np.array(rewards), np.array(terminations), np.array(truncations), self._gather([*infos])

    def _gather(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for index, row in enumerate(rows):
            for key, value in row.items():
                kind = type(value) if isinstance(value, int | float | bool | np.number) else object
                fill = np.zeros(len(rows), kind) if kind is not object else np.full(len(rows), None, object)
                gathered.setdefault(key, fill)[index] = value
                gathered.setdefault(f"_{key}", np.zeros(len(rows), np.bool_))[index] = True
        return gathered


def plain(value: Any) -> Any:
    """Return a value with numbers as Python has them and keys in order: these do not survive the vector layout."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, np.ndarray) and value.ndim:
        return [plain(item) for item in value]
    return (
        value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    )


def test_steps_and_infos_have_the_layout_of_gymnasium_0_29(backend: Backend) -> None:
    factories = make_factories(3)
    theirs = Vector029(factories)
    with ClusterEnv(factories, autoreset_mode="SameStep", **backend) as envs:
        ours = CleanRLView(envs)
        answers: Any = ours.reset(seed=4), theirs.reset(seed=4)
        num_endings = 0
        for step in range(40):
            our, their = ((*answer[:-1], plain(answer[-1])) for answer in answers)
            assert_same(our, their, f"answer {step}")
            for key in ("count", "score", "flag", "float32", "name", "vector", "nested"):
                assert answers[0][-1][key].dtype == answers[1][-1][key].dtype, key
            for key in ("final_observation", "final_info"):
                if key in answers[1][-1]:
                    num_endings += 1
                    assert answers[0][-1][key].dtype == object
                    assert answers[0][-1][f"_{key}"].dtype == np.bool_
            actions = np.full(3, step % 4)
            answers = ours.step(actions), theirs.step(actions)
    assert num_endings > 20


def test_a_step_that_ends_no_episode_has_no_final_keys() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0, autoreset_mode="SameStep") as envs:
        view = CleanRLView(envs)
        assert view.reset(seed=1)[1] == {}
        assert view.step(np.array([0, 1]))[4] == {}


def test_it_also_shows_gymnasiums_own_vector_environments() -> None:
    view = CleanRLView(SyncVectorEnv([World] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    view.reset(seed=[1, 2])
    for _ in range(5):
        obs, _, terminations, truncations, infos = view.step(np.zeros(2, np.int64))
        for index in np.flatnonzero(terminations | truncations):
            assert infos["final_observation"][index].shape == obs[index].shape
            assert infos["final_info"][index]["episode"]["r"] is not None
    view.close()


@pytest.mark.parametrize(
    ("options", "remedy"), [({}, "SameStep"), ({"autoreset_mode": "SameStep", "copy": False}, "copy=False")]
)
def test_environments_that_cleanrl_would_misread_are_refused(options: dict[str, Any], remedy: str) -> None:
    with ClusterEnv(World, num_workers=0, **options) as envs, pytest.raises(ConfigError, match=remedy):
        CleanRLView(envs)


def test_a_loop_in_cleanrls_shape_learns_and_finds_episodes_and_final_observations() -> None:
    def make_env() -> gym.Env[Any, Any]:
        return RecordEpisodeStatistics(gym.make("CartPole-v1"))

    torch.set_num_threads(1)
    torch.manual_seed(1)
    num_envs, num_steps = 16, 32
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))  # Two logits and a value.
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    returns: list[float] = []
    envs = CleanRLView(ClusterEnv([make_env] * num_envs, num_workers=2, autoreset_mode="SameStep"))
    next_obs, _ = envs.reset(seed=1)
    for _ in range(60):
        rows = []
        for _ in range(num_steps):
            obs = torch.as_tensor(next_obs)
            with torch.no_grad():
                actions = Categorical(logits=network(obs)[:, :2]).sample()  # type: ignore[no-untyped-call]  # torch's own
            next_obs, rewards, terminations, truncations, infos = envs.step(actions.numpy())
            real_next_obs = next_obs.copy()
            for index, is_truncated in enumerate(truncations):
                if is_truncated:
                    real_next_obs[index] = infos["final_observation"][index]
            if "final_info" in infos:
                for info in infos["final_info"]:
                    if info is not None:
                        returns.append(float(info["episode"]["r"]))
            with torch.no_grad():
                following = network(torch.as_tensor(real_next_obs))[:, 2] * ~torch.as_tensor(terminations)
            done = torch.as_tensor(terminations | truncations)
            rows.append((obs, actions, torch.as_tensor(rewards, dtype=torch.float32), following, done))
        parts = [torch.stack(part) for part in zip(*rows, strict=True)]
        for _ in range(4):
            output = network(parts[0])
            probs, values = Categorical(logits=output[..., :2]), output[..., 2]
            errors = parts[2] + 0.98 * parts[3] - values.detach()
            advantages, ahead = torch.zeros_like(errors), torch.zeros(num_envs)
            for t in reversed(range(num_steps)):
                advantages[t] = ahead = errors[t] + 0.98 * 0.9 * ~parts[4][t] * ahead
            targets = advantages + values.detach()
            logprobs = probs.log_prob(parts[1])  # type: ignore[no-untyped-call]  # torch's own
            gain = logprobs * (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            loss = 0.05 * (values - targets).square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
    envs.close()
    assert np.mean(returns[-30:]) > np.mean(returns[:30]) + 60, (returns[:30], returns[-30:])
