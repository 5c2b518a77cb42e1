"""Other libraries' learners, really installed, train on a ClusterEnv by the recipes of docs/how-to/learners.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner_venvs import ROOT, run_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # The first time, the learner is installed.


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: Ray makes sockets in it, whose names may not be long."""
    with tempfile.TemporaryDirectory(prefix="h", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


# One process for each learner's tests: its interpreter is made once.
RECIPES = [
    pytest.param(name, recipe, arguments, id=name, marks=pytest.mark.xdist_group(name))
    for name, recipe, arguments in (
        ("rllib", "rllib_ppo", ["--total-steps", "500", "--batch-steps", "256"]),
        ("tianshou", "tianshou_dqn", ["--epochs", "1", "--epoch-steps", "1000"]),
        ("torchrl", "torchrl_ppo", ["--total-steps", "1024", "--batch-steps", "512"]),
    )
]


@pytest.mark.parametrize(("name", "recipe", "arguments"), RECIPES)
def test_a_recipe_trains(name: str, recipe: str, arguments: list[str], home: Path) -> None:
    printed = run_with(name, home, "-m", f"examples.recipes.{recipe}", *arguments)
    assert re.search(r"^return [\d.]+ after \d+ steps$", printed, re.MULTILINE)


def test_sb3s_own_way_of_making_environments_works(home: Path) -> None:
    pytest.importorskip("stable_baselines3")
    command = [sys.executable, "-m", "examples.recipes.sb3_ppo", "--total-steps", "1024", "--num-envs", "4"]
    variables = {"OMP_NUM_THREADS": "1", "SB3_LOGDIR": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch")}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"return [\d.]+ \+- [\d.]+ after 1024 steps", done.stdout)


@pytest.mark.xdist_group("tianshou")
def test_tianshou_sees_what_its_own_environments_show(home: Path) -> None:
    script = """
import numpy as np
from gymnasium import spaces
from tianshou.env import DummyVectorEnv
from clusterenv.adapters.tianshou import ClusterVectorEnv
from tests.worlds import World

def plain(value):
    # Numbers in infos are numpy's, whatever type the environment gave.
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) or isinstance(value, np.ndarray) and value.dtype == object:
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value

DICT = spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,), np.float32), "b": spaces.Discrete(5)})
for space in (None, DICT):
    for num_workers in (0, 2):
        factories = [lambda index=index: World(space, index=index, infos="numbers") for index in range(3)]
        ours, theirs = ClusterVectorEnv(factories, num_workers=num_workers), DummyVectorEnv(factories)

        def same(mine, other):
            for one, two in zip(mine, other, strict=True):
                one, two = np.asarray(one), np.asarray(two)
                assert one.dtype == two.dtype or one.dtype.kind == two.dtype.kind, (one.dtype, two.dtype)
                assert plain(one) == plain(two)

        assert (len(ours), ours.env_num, ours.is_async) == (len(theirs), theirs.env_num, theirs.is_async)
        assert ours.action_space == theirs.action_space
        assert ours.seed(7) == theirs.seed(7)
        same(ours.reset(seed=3), theirs.reset(seed=3))
        ready = np.arange(3)
        rng = np.random.default_rng(0)
        for _ in range(30):
            ids = np.sort(rng.choice(3, rng.integers(1, 4), replace=False)) if rng.random() < 0.5 else ready
            mine, other = (envs.step(np.arange(len(ids)), ids) for envs in (ours, theirs))
            same(mine, other)
            if len(done := ids[mine[2] | mine[3]]):
                same(ours.reset(done), theirs.reset(done))
        assert ours.get_env_attr("label", [2, 0]) == theirs.get_env_attr("label", [2, 0])
        for envs in (ours, theirs):
            envs.set_env_attr("label", "other", 1)
            assert envs.get_env_attr("label") == ["world 0", "other", "world 2"]
            envs.close()
print("same")
"""
    assert run_with("tianshou", home, "-c", script) == "same\n"


@pytest.mark.xdist_group("torchrl")
def test_a_torchrl_collector_gets_the_true_last_observations(home: Path) -> None:
    script = """
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from clusterenv import ClusterEnv

env = GymWrapper(ClusterEnv("CartPole-v1", 4, num_workers=2, autoreset_mode="SameStep"))
env.set_seed(1)
collector = Collector(env, frames_per_batch=400, total_frames=400, auto_register_policy_transforms=False)
(batch,) = collector
first, last = batch["observation"], batch["next", "observation"]
ended = batch["next", "terminated"].squeeze(-1)
assert ended.any()
assert ((last[ended][:, 2].abs() > 0.2095) | (last[ended][:, 0].abs() > 2.4)).all(), "the pole has fallen"
follows = (first[:, 1:] == last[:, :-1]).all(-1)
assert (follows == ~ended[:, :-1]).all(), "what follows is the same episode, or the beginning of another"
collector.shutdown()
print("right")
"""
    assert run_with("torchrl", home, "-c", script).endswith("right\n")


@pytest.mark.xdist_group("torchrl")
def test_torchrls_actors_act_on_workers(home: Path) -> None:
    script = """
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ActorValueOperator, OneHotCategorical, ProbabilisticActor
from torchrl.modules import QValueActor, TanhNormal, ValueOperator
from clusterenv import ClusterEnv

torch.manual_seed(0)


def network(num_inputs, num_outputs):
    return nn.Sequential(nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, num_outputs))


def actor(module, key, parameters, distribution, **kwargs):
    module = TensorDictModule(module, in_keys=[key], out_keys=parameters)
    return ProbabilisticActor(
        module, in_keys=parameters, distribution_class=distribution, distribution_kwargs=kwargs, return_log_prob=True
    )


def check(envs, agent, encode):
    for _ in range(2):
        rollout = envs.rollout(agent, 8)
        rows = TensorDict({"observation": torch.as_tensor(rollout.obs)}, batch_size=[8, 2])
        with torch.no_grad():
            chooser = agent.get_policy_operator() if isinstance(agent, ActorValueOperator) else agent
            logprob = chooser.get_dist(rows).log_prob(encode(torch.as_tensor(rollout.actions)))
            np.testing.assert_allclose(rollout.logprob, logprob.numpy(), rtol=1e-3, atol=1e-4)
            if isinstance(agent, ActorValueOperator):
                value = agent.get_value_operator()(rows)["state_value"][..., 0]
                np.testing.assert_allclose(rollout.value, value.numpy(), rtol=1e-4, atol=1e-5)
            for parameter in agent.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))


with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs:
    envs.reset(seed=1)
    one_hot = actor(network(4, 2), "observation", ["logits"], OneHotCategorical)
    check(envs, one_hot, lambda action: nn.functional.one_hot(action, 2))
    trunk = TensorDictModule(network(4, 8), in_keys=["observation"], out_keys=["hidden"])
    head = actor(network(8, 2), "hidden", ["logits"], torch.distributions.Categorical)
    both = ActorValueOperator(trunk, head, ValueOperator(network(8, 1), in_keys=["hidden"]))
    check(envs, both, lambda action: action)
    q = QValueActor(network(4, 2), in_keys=["observation"], action_space="one-hot")
    assert envs.rollout(q, 8, values={"epsilon": 0.5}).actions.shape == (8, 2)
with ClusterEnv("Pendulum-v1", 2, num_workers=0) as envs:
    envs.reset(seed=1)
    body = nn.Sequential(network(3, 2), NormalParamExtractor())
    check(envs, actor(body, "observation", ["loc", "scale"], TanhNormal, low=-2.0, high=2.0), lambda action: action)
print("right")
"""
    assert run_with("torchrl", home, "-c", script).endswith("right\n")
