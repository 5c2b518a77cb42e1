"""Typical mistakes: each message names the argument, shows what was given, and says what is expected."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import NormalizeObservation

from clusterenv import (
    AdaptiveSync,
    BasePolicy,
    ClusterEnv,
    Decision,
    EveryUpdate,
    Faults,
    LocalLauncher,
    NativeVector,
    Network,
    PeriodicSync,
    SlurmLauncher,
    SSHLauncher,
    Timeouts,
    make_vec,
)
from clusterenv.cli import main
from clusterenv.policy import Categorical, QValues

CARTPOLE = "CartPole-v1"
Mistake = Callable[[], object]


def make(*args: Any, **kwargs: Any) -> ClusterEnv:
    """Make environments without workers: what is wrong is told before any would start."""
    return ClusterEnv(*(args or (CARTPOLE,)), **{"num_workers": 0, **kwargs})


def act(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


class Old(gym.Env[Any, Any]):
    """Of the old Gym: its step() returns four values."""

    observation_space: Any = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, {}


class Forgetful(Old):
    def step(self, action: Any) -> Any:
        pass


class Spaceless(Old):
    observation_space = None


class Unclosable(Old):
    def close(self) -> None:
        raise RuntimeError("not today")


class Remembering(BasePolicy):
    """Has whatever state it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision(act(obs), {}, state)

    def initial_state(self, num_envs: int) -> Any:
        return self.state


class Logging:
    """Has a file to write to."""

    def __init__(self, journal: Any) -> None:
        self.journal = journal

    def __call__(self, obs: Any) -> Any:
        return act(obs)


class Logits(BasePolicy):
    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        return Categorical(np.zeros((len(obs), 2), np.float32))


class Greedy(BasePolicy):
    def distribution(self, obs: Any, state: Any = None) -> QValues:
        return QValues(np.zeros((len(obs), 2), np.float32))


class Methodical:
    """Not a torch module, but has the method of one."""

    def get_action_and_value(self, obs: Any) -> Any:
        return act(obs), None, None, None


def roll_out_greedily(envs: ClusterEnv, epsilon: Any) -> object:
    return envs.rollout(Greedy(), 2, values={"epsilon": epsilon})


def old_step(autoreset_mode: str, cls: type[Old] = Old) -> object:
    with make(cls, num_envs=1, autoreset_mode=autoreset_mode) as envs:
        envs.reset(seed=0)
        return envs.step(np.zeros(1, np.int64))


def roll_out_with_a_file(envs: ClusterEnv) -> object:
    with Path(os.devnull).open("w") as journal:
        return envs.rollout(Logging(journal), 2)


# What is done, and what its message must hold: the argument, what was given, what is expected.
CONSTRUCTION: dict[str, tuple[Mistake, str, str, str]] = {
    "launcher as text": (lambda: make(launcher="slurm"), "launcher must", "'slurm'", "SlurmLauncher(nodes=...)"),
    "launcher as class": (lambda: make(launcher=SSHLauncher), "launcher", "class SSHLauncher", "SSHLauncher(...)"),
    "sync as text": (lambda: make(sync="adaptive"), "sync must", "'adaptive'", "AdaptiveSync(0.05)"),
    "sync as number": (lambda: make(sync=0.05), "sync must", "got 0.05", "AdaptiveSync(0.05)"),
    "sync as class": (lambda: make(sync=EveryUpdate), "sync", "class EveryUpdate", "EveryUpdate(...)"),
    "sync that is not called": (
        lambda: make(sync=AdaptiveSync.off_policy),
        "sync must",
        "was not called",
        "sync=AdaptiveSync.off_policy(...)",
    ),
    "timeouts as number": (lambda: make(timeouts=10), "timeouts must", "got 10", "Timeouts(call_s=60)"),
    "faults as text": (lambda: make(faults="raise"), "faults must", "'raise'", "Faults(on_loss='raise')"),
    "network as text": (lambda: make(network="10.0.0.1"), "network must", "'10.0.0.1'", "Network(listen="),
    "network as class": (lambda: make(network=Network), "network", "class Network", "Network(...)"),
    "num_envs as float": (lambda: make(num_envs=2.0), "num_envs must", "got 2.0", "int of at least 1"),
    "num_envs as bool": (lambda: make(num_envs=True), "num_envs must", "got True", "int of at least 1"),
    "num_envs of zero": (lambda: make(num_envs=0), "num_envs must", "got 0", "int of at least 1"),
    "num_workers as text": (lambda: make(num_workers="all"), "num_workers must", "'all'", "int of at least 0"),
    "more workers than environments": (
        lambda: make(num_envs=2, num_workers=4),
        "num_workers=4",
        "num_workers=4",
        "num_envs=2",
    ),
    "unknown autoreset mode": (
        lambda: make(autoreset_mode="Never"),
        "autoreset_mode must",
        "'Never'",
        "'NextStep', 'SameStep', 'Disabled'",
    ),
    "unknown observation mode": (
        lambda: make(observation_mode="all"),
        "observation_mode",
        "got all",
        "'same' or 'different'",
    ),
    "copy as text": (lambda: make(copy="no"), "copy must", "'no'", "True or False"),
    "env_kwargs as text": (lambda: make(env_kwargs="human"), "env_kwargs must", "'human'", '{"gravity": 9.0}'),
    "env_kwargs with a factory": (
        lambda: make(lambda: gym.make(CARTPOLE), env_kwargs={"a": 1}),
        "env_kwargs",
        "{'a': 1}",
        "into the factory",
    ),
    "render_mode with a factory": (
        lambda: make(gym.Env, render_mode="human"),
        "render_mode",
        "'human'",
        "gymnasium.make(..., render_mode=...)",
    ),
    "two render modes": (
        lambda: make(render_mode="human", env_kwargs={"render_mode": "rgb_array"}),
        "render_mode='human'",
        "rgb_array",
        "leave one",
    ),
    "a wrapper instead of a list": (lambda: make(wrappers=TimeLimit), "wrappers must", "TimeLimit", "a list"),
    "a wrapper that is none": (lambda: make(wrappers=["TimeLimit"]), "wrappers[0] must", "'TimeLimit'", "function"),
    "a vector wrapper for one environment": (
        lambda: make(wrappers=[NormalizeObservation]),
        "wrappers[0] must",
        "NormalizeObservation",
        "NormalizeObservation(ClusterEnv(...))",
    ),
    "a wrapper that returns nothing": (
        lambda: make(wrappers=[lambda env: None]),
        "wrappers[0]",
        "got None",
        "return a gymnasium.Env",
    ),
    "wrappers of a native vector": (
        lambda: make(NativeVector(CARTPOLE), wrappers=[TimeLimit]),
        "wrappers=",
        "TimeLimit",
        "single environments",
    ),
    "an unknown vectorization mode": (
        lambda: make_vec(CARTPOLE, vectorization_mode="threads"),
        "vectorization_mode must",
        "'threads'",
        "'cluster', or one of Gymnasium's: 'async', 'sync'",
    ),
    "an environment": (lambda: make(gym.make(CARTPOLE)), "env must", "CartPoleEnv", "ClusterEnv(lambda: ...,"),
    "a list of environments": (lambda: make([gym.make(CARTPOLE)]), "Factory 0", "CartPoleEnv", "function that makes"),
    "a vector environment": (lambda: make(gym.make_vec(CARTPOLE, 2)), "env must", "CartPoleVector", "num_envs"),
    "a generator of factories": (lambda: make(iter([gym.Env])), "env must", "list_iterator", "Make it a list"),
    "no factories": (lambda: make([]), "env must", "got []", "non-empty sequence of factories"),
    "factories and another number": (lambda: make([gym.Env] * 2, 3), "num_envs=3", "2 factories", "Leave num_envs out"),
    "a factory of factories": (
        lambda: make(lambda: lambda: gym.make(CARTPOLE)),
        "factory",
        "<lambda>",
        "[make_env(i) for i in range(n)]",
    ),
    "a factory of a number": (lambda: make(lambda: 1), "factory must", "got 1", "return a gymnasium.Env"),
    "no observation space": (lambda: make(Spaceless), "observation_space", "got None", "gymnasium.spaces.Space"),
    **{
        f"four values from step() in mode {mode}": (
            functools.partial(old_step, mode),
            "step() must return",
            "got 4",
            "(observation, reward, terminated, truncated, info)",
        )
        for mode in ("NextStep", "SameStep", "Disabled")
    },
    "nothing from step()": (
        lambda: old_step("NextStep", Forgetful),
        "step() must return",
        "NoneType",
        "(observation, reward, terminated, truncated, info)",
    ),
    "a mistyped id": (lambda: make("CartPol-v1"), "Environment", "`CartPol`", "`CartPole`"),
    "a native vector that is none": (
        lambda: NativeVector("MountainCar-v0"),
        "vector",
        "MountainCar-v0",
        "ClusterEnv('MountainCar-v0', ...)",
    ),
    "a timeout as text": (lambda: Timeouts(call_s="10"), "Timeouts.call_s", "'10'", "positive number of seconds"),  # type: ignore[arg-type]  # the mistake
    "an unknown choice": (lambda: Faults(on_loss="restart"), "Faults.on_loss", "'restart'", "'replace', 'raise'"),
    "a threshold as text": (lambda: AdaptiveSync("0.05"), "AdaptiveSync.threshold", "'0.05'", "number of nats"),  # type: ignore[arg-type]  # the mistake
    "a period of zero": (lambda: PeriodicSync(0), "PeriodicSync.k", "got 0", "at least 1 version"),
    "hosts as text": (lambda: SSHLauncher("gpu1"), "SSHLauncher.hosts", "'gpu1'", "a list"),
    "nodes as text": (lambda: SlurmLauncher(nodes="4"), "SlurmLauncher.nodes", "'4'", "int of at least 1"),  # type: ignore[arg-type]  # the mistake
    "a time in words": (lambda: SlurmLauncher(time="2 hours"), "SlurmLauncher.time", "'2 hours'", '"02:00:00"'),
    "cpus as text": (lambda: LocalLauncher(cpus="2"), "LocalLauncher.cpus", "'2'", "int of at least 1"),  # type: ignore[arg-type]  # the mistake
    "a port without a host": (lambda: Network(listen=5555), "Network.listen", "5555", "'10.0.0.5:5555'"),  # type: ignore[arg-type]  # the mistake
}

USE: dict[str, tuple[Callable[[ClusterEnv], object], str, str, str]] = {
    "no actions": (lambda envs: envs.step(None), "actions must", "got None", "one per environment (2 here)"),
    "one action": (lambda envs: envs.step(1), "actions must", "got 1", "one per environment (2 here)"),
    "one numpy action": (
        lambda envs: envs.step(np.int64(1)),
        "actions must",
        "array(1)",
        "one per environment (2 here)",
    ),
    "an action in words": (lambda envs: envs.step("left"), "actions must", "'left'", "one per environment (2 here)"),
    "too many actions": (lambda envs: envs.step([0, 1, 0]), "actions", "got 3", "Expected 2 actions"),
    "a float for a seed": (lambda envs: envs.reset(seed=1.5), "seed must", "got 1.5", "one per environment"),  # type: ignore[arg-type]  # the mistake
    "too few seeds": (lambda envs: envs.reset(seed=[1]), "seeds", "length=1", "num_envs=2"),
    "steps as float": (lambda envs: envs.rollout(act, 4.0), "num_steps must", "got 4.0", "int of at least 1"),  # type: ignore[arg-type]  # the mistake
    "arguments in the wrong order": (
        lambda envs: envs.rollout(8, act),  # type: ignore[arg-type]  # the mistake
        "num_steps must",
        "<function act",
        "int of at least 1",
    ),
    "values as number": (lambda envs: envs.rollout(act, 4, values=0.1), "values must", "0.1", '{"epsilon": 0.1}'),  # type: ignore[arg-type]  # the mistake
    "a stream of no steps": (lambda envs: envs.stream(act, 0), "num_steps must", "got 0", "int of at least 1"),
    "a stream of too many environments": (
        lambda envs: envs.stream(act, 4, min_envs=9),
        "min_envs=9",
        "min_envs=9",
        "only 2 environments",
    ),
    "no agent": (lambda envs: envs.rollout(None, 4), "policy", "NoneType", "a function from observations"),
    "an agent that is not called": (
        lambda envs: envs.rollout(SimpleNamespace(act=act), 4),
        "policy",
        "SimpleNamespace",
        "agent.act",
    ),
    "an agent that predicts": (
        lambda envs: envs.step(SimpleNamespace(predict=act)),
        "policy",
        "SimpleNamespace",
        "lambda obs: agent.predict(obs)[0]",
    ),
    "one action for all environments": (
        lambda envs: envs.rollout(lambda obs: 1, 2),
        "action must have shape (2,)",
        "got shape ()",
        "a batch of observations",
    ),
    "no action": (
        lambda envs: envs.rollout(lambda obs: None, 2),
        "action must have shape (2,)",
        "got a NoneType",
        "a batch of observations",
    ),
    "an open file": (
        roll_out_with_a_file,
        "cannot be sent",
        "its journal",
        "outside of the agent",
    ),
    "an agent's class": (lambda envs: envs.rollout(BasePolicy, 4), "BasePolicy", "class", "BasePolicy(...)"),
    "NaN for a number": (
        lambda envs: envs.rollout(lambda obs: np.full(len(obs), np.nan), 2),
        "actions hold NaN",
        "NaN",
        "int64 is expected",
    ),
    "a policy that returns more than actions": (
        lambda envs: envs.rollout(lambda obs: (act(obs), None), 2),
        "action",
        "a tuple of 2 parts",
        "lambda obs: act(obs)[0]",
    ),
    "a temperature of zero": (
        lambda envs: envs.rollout(Logits(), 2, values={"temperature": 0}),
        "temperature",
        "0}",
        'must be positive. For the likeliest actions, pass values={"deterministic": True}',
    ),
    **{
        f"an epsilon of {epsilon}": (
            functools.partial(roll_out_greedily, epsilon=epsilon),
            "epsilon",
            f"{epsilon}}}",
            "must be from 0 to 1",
        )
        for epsilon in (2.0, -1.0, np.nan)
    },
    "an epsilon for other environments": (
        functools.partial(roll_out_greedily, epsilon=np.full(3, 0.5)),
        "epsilon",
        "got an array of shape (3,)",
        "one number for each of the worker's 2 environments",
    ),
    "an agent's method": (
        lambda envs: envs.rollout(Methodical().get_action_and_value, 2),
        "get_action_and_value",
        "Methodical",
        "Give the agent itself",
    ),
    "an agent that is no module": (
        lambda envs: envs.rollout(Methodical(), 2),
        "get_action_and_value()",
        "Methodical",
        "not a torch.nn.Module",
    ),
    "a function of nothing": (lambda envs: envs.rollout(lambda: 0, 2), "<lambda>()", "parameter", "the observations"),
    "options as a list": (lambda envs: envs.reset(options=[1]), "options must", "got [1]", "a dict"),  # type: ignore[arg-type]  # the mistake
    "an unknown extra": (
        lambda envs: envs.rollout(Logits(), 2, extras=("value",)),
        "extras=('value',)",
        "asks for value",
        "It returns: logprob",
    ),
    "a state that is no dict": (
        lambda envs: envs.rollout(Remembering([0.0]), 2),
        "initial_state()",
        "got a list",
        "a dict of numpy arrays",
    ),
    "a state of lists": (
        lambda envs: envs.rollout(Remembering({"h": [0.0, 0.0]}), 2),
        "initial_state()",
        "'h' is a list",
        "numpy arrays",
    ),
    "values for one environment": (lambda envs: envs.set_attr("gravity", [1.0]), "Values", "`1` values", "2 environm"),
}


@pytest.fixture(scope="module")
def envs() -> Iterator[ClusterEnv]:
    with ClusterEnv(CARTPOLE, 2, num_workers=0) as envs:
        envs.reset(seed=0)
        yield envs


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_a_mistake_in_making_environments_is_told_in_a_sentence(name: str) -> None:
    mistake, *parts = CONSTRUCTION[name]
    with pytest.raises((TypeError, ValueError, gym.error.Error)) as caught:
        mistake()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", USE)
def test_a_mistake_in_using_environments_is_told_in_a_sentence(name: str, envs: ClusterEnv) -> None:
    mistake, *parts = USE[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake(envs)
    for part in parts:
        assert part in str(caught.value)


def test_a_refusal_on_a_worker_comes_without_our_own_frames() -> None:
    with pytest.raises(ValueError, match=r"The factory of environment 0 raised ConfigError: .*, got None") as caught:
        ClusterEnv(lambda: None, 1, num_workers=1)  # type: ignore[arg-type,return-value]  # the mistake
    assert "File" not in str(caught.value)


def test_a_function_for_one_observation_is_told_that_it_is_given_a_batch(envs: ClusterEnv) -> None:
    with pytest.raises(ValueError, match="truth value") as caught:
        envs.rollout(lambda obs: 1 if obs[1] > 0 else 0, 2)
    assert "a batch of observations of shape (2, 4)" in caught.value.__notes__[0]


def test_a_module_that_workers_cannot_import_is_named() -> None:
    module: Any = ModuleType("made_here")
    exec("def act(obs):\n    return [0] * len(obs)\n", vars(module))
    sys.modules["made_here"] = module
    try:
        with (
            ClusterEnv(CARTPOLE, 1, num_workers=1) as envs,
            pytest.raises(ValueError, match="needs the module 'made_here'"),
        ):
            envs.rollout(module.act, 2)
    finally:
        del sys.modules["made_here"]


def test_a_torch_agent_that_cannot_act_is_told_why(envs: ClusterEnv) -> None:
    torch = pytest.importorskip("torch")
    from clusterenv.adapters.torch import TorchPolicy
    from tests.torch_agents import Discrete

    agent = Discrete()
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"The agent's \S+ holds NaN\. Has training diverged"):
        envs.rollout(agent, 2)
    with pytest.raises(ValueError, match="TorchScript"):
        TorchPolicy(torch.jit.trace(torch.nn.Linear(4, 2), torch.zeros(2, 4)), output="logits")


def test_an_unknown_extra_of_a_torch_agent_is_answered_with_all_there_are() -> None:
    torch = pytest.importorskip("torch")
    from tests.torch_agents import Discrete

    torch.manual_seed(0)
    with make(num_envs=2) as envs, pytest.raises(ValueError, match=r"It returns: logprob, value\."):
        envs.rollout(Discrete(), 2, extras=("logprobs",))


def test_the_predict_of_an_sb3_model_is_answered_with_the_model() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", CARTPOLE, device="cpu")
    for predict in (model.predict, model.policy.predict):
        with make(num_envs=2) as envs, pytest.raises(ValueError, match=r"\(actions, state\).*envs.rollout\(model"):
            envs.rollout(predict, 2)


def test_an_environment_that_cannot_be_closed_is_told_of_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    ClusterEnv(Unclosable, 1, num_workers=1).close()
    told = [line for line in capfd.readouterr().err.splitlines() if "not today" in line or "File" in line]
    assert told == ["[worker 0] An environment's close() raised RuntimeError: not today"]


def test_what_users_catch_is_found_where_they_look() -> None:
    import clusterenv
    from clusterenv import errors

    assert (clusterenv.PolicyError, clusterenv.WorkerFailed) == (errors.PolicyError, errors.WorkerFailed)


@pytest.mark.parametrize("mode", ["SAME_STEP", "same_step", "SameStep", AutoresetMode.SAME_STEP])
def test_a_mode_may_be_written_as_its_name_or_its_value(mode: str | AutoresetMode) -> None:
    with make(autoreset_mode=mode) as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_numpy_integers_are_numbers() -> None:
    with ClusterEnv(CARTPOLE, np.int64(2), num_workers=np.int32(1), faults=Faults(min_workers=np.int64(1))) as envs:  # type: ignore[arg-type]  # ints to a user
        assert (type(envs.num_envs), type(envs.num_workers)) == (int, int)
        assert envs.rollout(act, np.int64(3)).rewards.shape == (3, 2)  # type: ignore[arg-type]  # an int to a user
        with envs.stream(act, np.int16(3), min_envs=np.int64(2)) as rollouts:  # type: ignore[arg-type]  # ints to a user
            assert next(rollouts).rewards.shape == (3, 2)


def test_the_argument_that_everybody_gives_needs_no_name() -> None:
    assert AdaptiveSync(0.1) == AdaptiveSync(threshold=0.1)
    assert SSHLauncher(["gpu1"]) == SSHLauncher(hosts=["gpu1"])


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no workers": (["doctor", "local", "--num-workers", "0"], r"--num-workers: must be .* at least 1, got '0'"),
    "unknown launcher": (["doctor", "slum"], r"invalid choice: 'slum' \(choose from 'local', 'slurm'"),
    "launcher behind options": (
        ["doctor", "--env", CARTPOLE, "ssh", "--hosts", "gpu1"],
        r"unrecognized arguments: ssh --hosts gpu1; the launcher comes first: clusterenv doctor ssh",
    ),
    "no hosts": (["doctor", "ssh"], r"the following arguments are required: --hosts"),
    "mistyped option": (["doctor", "--enviroment", CARTPOLE], r"unrecognized arguments: --enviroment CartPole-v1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_on_the_command_line_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = COMMANDS[name]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(text, capsys.readouterr().err)
