"""The law of policies for JAX networks: what workers return is what the network itself returns, after any update.

Run by `test_jax.py` in an interpreter that has JAX, flax and equinox.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from gymnasium import spaces

from clusterenv import AdaptiveSync, ClusterEnv, Rollout
from clusterenv.adapters.jax import JaxPolicy
from clusterenv.errors import ConfigError, PolicyError
from tests.any_space import AnySpace
from tests.test_masks import Masked

VECTOR = spaces.Box(-1.0, 1.0, (6,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
DICT = spaces.Dict({"body": VECTOR, "mask": spaces.MultiBinary(3)})
DISCRETE = spaces.Discrete(3)
MULTI = spaces.MultiDiscrete([2, 3])
CONTINUOUS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Linen(linen.Module):
    width: int = 16

    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.tanh(linen.Dense(self.width)(x))
        return linen.Dense(3)(hidden), linen.Dense(1)(hidden)


class Convolutions(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Conv(4, (3, 3))(x / 255.0))
        x = x.reshape(x.shape[0], -1)
        return linen.Dense(3)(x), linen.Dense(1)(x)


class Stateful(nnx.Module):
    """With batch norm and dropout."""

    def __init__(self, rngs: Any) -> None:
        self.body = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.actor, self.critic = nnx.Linear(16, 3, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.drop(nnx.tanh(self.norm(self.body(x))))
        return self.actor(hidden), self.critic(hidden)


class Tree(eqx.Module):
    body: eqx.nn.MLP
    critic: eqx.nn.Linear
    scale: float

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.body, self.critic = eqx.nn.MLP(6, 3, 16, 1, key=one), eqx.nn.Linear(6, 1, key=two)
        self.scale = 2.0

    def __call__(self, x: Any) -> Any:
        return self.body(x) * self.scale, self.critic(x)[0]


@dataclass
class Agent:
    """A policy, what it says itself of a batch, and how it learns."""

    policy: JaxPolicy
    answer: Callable[[Any], Any]
    spaces: tuple[Any, Any] = (VECTOR, DISCRETE)
    bound: float = 1e-4
    learn: Callable[[], None] | None = None

    def update(self) -> None:
        if self.learn is not None:
            self.learn()
        else:
            self.policy.params = disturbed(self.policy.params)


def disturbed(tree: Any) -> Any:
    """Return a pytree with other numbers."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    rng = np.random.default_rng(len(leaves))
    return jax.tree_util.tree_unflatten(treedef, [_move(leaf, rng) for leaf in leaves])


def _move(leaf: Any, rng: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf + (0.3 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)


def by_linen(module: Any = None, space: Any = VECTOR) -> Agent:
    module = module or Linen()
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, *space.shape)))
    policy = JaxPolicy(module, variables, output="logits")
    return Agent(policy, lambda obs: module.apply(policy.params, obs), (space, DISCRETE))


def by_bare_params() -> Agent:
    module = Linen()
    policy = JaxPolicy(module, jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 6)))["params"], output="logits")
    return Agent(policy, lambda obs: module.apply({"params": policy.params}, obs))


def by_convolutions() -> Agent:
    return by_linen(Convolutions(), IMAGE)


def by_nnx() -> Agent:
    """In train mode but for dropout: batch norms act by their running statistics all the same."""
    model = Stateful(nnx.Rngs(0))
    model.drop.deterministic = True
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

    def answer(obs: Any) -> Any:
        model.norm.use_running_average = True
        try:
            return model(obs)
        finally:
            model.norm.use_running_average = False

    def learn() -> None:
        obs = jax.random.normal(jax.random.key(1), (32, 6))
        optimizer.update(model, nnx.grad(lambda model: (model(obs)[0] ** 2).sum() + model(obs)[1].sum())(model))

    return Agent(JaxPolicy(model, output="logits"), answer, learn=learn)


def by_equinox() -> Agent:
    policy = JaxPolicy(Tree(jax.random.key(0)), output="logits")
    return Agent(policy, lambda obs: jax.vmap(policy.params)(obs))


def by_equinox_of_a_script() -> Agent:
    """A class that workers could not import."""

    class Local(eqx.Module):
        tree: Tree

        def __call__(self, x: Any) -> Any:
            return self.tree(x)

    policy = JaxPolicy(Local(Tree(jax.random.key(0))), output="logits")
    return Agent(policy, lambda obs: jax.vmap(policy.params)(obs))


def by_function_with_a_closure() -> Agent:
    module, settings = Linen(), {"temperature": 1.0}

    def apply(params: Any, obs: Any) -> Any:
        logits, value = module.apply(params, obs)
        return logits / settings["temperature"], value

    def learn() -> None:
        policy.params = disturbed(policy.params)
        settings["temperature"] += 1.0

    policy = JaxPolicy(apply, jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 6))), output="logits")
    return Agent(policy, lambda obs: apply(policy.params, obs), learn=learn)


def by_half_precision() -> Agent:
    agent = by_linen()
    agent.policy.params = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), agent.policy.params)
    agent.bound = 2e-2
    return agent


def by_masks() -> Agent:
    module = Linen()

    def apply(params: Any, obs: Any) -> Any:
        logits, value = module.apply(params, obs["body"])
        return jnp.where(obs["mask"] != 0, logits, -1e8), value

    policy = JaxPolicy(apply, jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 6))), output="logits")
    return Agent(policy, lambda obs: apply(policy.params, obs), (DICT, DISCRETE))


def by_parts() -> Agent:
    params = {"one": jnp.ones((6, 2)) * 0.1, "two": jnp.ones((6, 3)) * 0.2}

    def apply(params: Any, obs: Any) -> Any:
        return [obs @ params["one"], obs @ params["two"]], obs.sum(1)

    policy = JaxPolicy(apply, params, output="logits")
    return Agent(policy, lambda obs: apply(policy.params, obs), (VECTOR, MULTI))


def by_gaussian(output: Any = "gaussian", **bounds: Any) -> Agent:
    params = {"mean": jnp.ones((6, 2)) * 0.1, "log_std": jnp.array([-0.5, 0.25]), "value": jnp.ones((6, 1))}

    def apply(params: Any, obs: Any) -> Any:
        return obs @ params["mean"], params["log_std"], obs @ params["value"]

    policy = JaxPolicy(apply, params, output=output, **bounds)
    return Agent(policy, lambda obs: apply(policy.params, obs), (VECTOR, CONTINUOUS))


AGENTS = [
    *(by_linen, by_bare_params, by_nnx, by_equinox, by_equinox_of_a_script, by_function_with_a_closure),
    *(by_half_precision, by_convolutions, by_masks, by_parts, by_gaussian),
]


def flat(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda rows: rows.reshape(-1, *rows.shape[2:]), tree)


def opinion(agent: Agent, rollout: Rollout) -> tuple[Any, Any]:
    """Return the network's own log-probabilities and values of a rollout's actions."""
    first, *others = jax.device_get(agent.answer(flat(rollout.obs)))
    actions = rollout.actions.reshape(-1, *rollout.actions.shape[2:])
    if agent.spaces[1] is CONTINUOUS:
        log_std = others.pop(0)
        logprob = (-0.5 * ((actions - first) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    else:
        columns = actions.reshape(len(actions), -1).T
        parts = first if isinstance(first, list) else [first]
        logprob = sum(
            log_softmax(part)[np.arange(len(column)), column] for part, column in zip(parts, columns, strict=True)
        )
    return logprob, others[0].astype(np.float64).reshape(-1)


def log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(agent: Agent, rollout: Rollout) -> None:
    logprob, value = opinion(agent, rollout)
    np.testing.assert_allclose(rollout.logprob.reshape(-1), logprob, rtol=agent.bound, atol=agent.bound)
    np.testing.assert_allclose(rollout.value.reshape(-1), value, rtol=agent.bound, atol=agent.bound)


def make_env(observation_space: Any = VECTOR, action_space: Any = DISCRETE) -> Callable[[], AnySpace]:
    return functools.partial(AnySpace, observation_space, action_space)


def live(agent: Agent, envs: ClusterEnv) -> None:
    """Let an agent act and learn."""
    for _ in range(3):
        rollout = envs.rollout(agent.policy, 3)
        assert (rollout.ages == 0).all()
        check(agent, rollout)
        agent.update()


# What workers run is the same in this process, where it starts sooner.
@pytest.mark.parametrize("make", AGENTS)
def test_what_is_exported_returns_what_the_network_itself_returns(make: Callable[[], Agent]) -> None:
    agent = make()
    with ClusterEnv(make_env(*agent.spaces), 5, num_workers=0) as envs:
        envs.reset(seed=1)
        live(agent, envs)


def test_workers_return_what_the_network_itself_returns() -> None:
    with ClusterEnv(make_env(), 5, num_workers=1) as envs:
        envs.reset(seed=1)
        loaded = set(envs.call("loaded")[0])
        for make in (by_equinox_of_a_script, by_nnx):
            live(make(), envs)
        assert set(envs.call("loaded")[0]) - loaded == {"jax"}, "flax and equinox stay on the head"

        agent = by_linen()
        obs, _ = envs.reset(seed=1)
        for _ in range(3):
            logits, value = agent.answer(obs)
            obs, _, _, _, info = envs.step(agent.policy)
            logprob = log_softmax(np.asarray(logits))[np.arange(5), info["action"]]
            np.testing.assert_allclose(info["logprob"], logprob, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(info["value"], value[:, 0], rtol=1e-4, atol=1e-6)
            agent.update()


def test_squashed_actions_stay_within_their_bounds() -> None:
    agent = by_gaussian("squashed", scale=[2.0, 2.0], shift=[1.0, 1.0])
    with ClusterEnv(make_env(*agent.spaces), 5, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(agent.policy, 20)
    assert rollout.actions.min() >= -1.0
    assert rollout.actions.max() <= 3.0
    assert np.isfinite(rollout.logprob).all()


def test_a_module_in_eval_mode_is_so_on_workers_and_dropout_differs_from_call_to_call() -> None:
    model = Stateful(nnx.Rngs(0))
    policy = JaxPolicy(model, output="logits")
    policy.seed(1)
    one, two = (policy.act(np.ones((4, 6), np.float32)).extras["value"] for _ in range(2))
    assert not np.array_equal(one, two)
    with ClusterEnv(make_env(), 5, num_workers=0) as envs:
        envs.reset(seed=1)
        spread = np.std(envs.rollout(policy, 60).value)
        model.eval()
        envs.reset(seed=1)
        rollout = envs.rollout(policy, 60)
    check(Agent(policy, lambda obs: model(obs)), rollout)
    assert spread > 1.1 * np.std(rollout.value)  # Features are dropped half of the time, and doubled otherwise.


def test_a_network_may_draw_its_own_actions() -> None:
    def act(params: Any, obs: Any, key: Any) -> Any:
        logits = obs @ params
        action = jax.random.categorical(key, logits)
        return {"action": action, "logprob": jax.nn.log_softmax(logits)[jnp.arange(obs.shape[0]), action]}

    policy = JaxPolicy(act, jnp.zeros((6, 3)))
    with ClusterEnv(make_env(), 5, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(policy, 60)
    assert set(rollout.actions.ravel().tolist()) == {0, 1, 2}
    np.testing.assert_allclose(rollout.logprob, np.log(1 / 3), rtol=1e-4)


def test_a_recurrent_state_is_carried_on_and_begins_anew_with_each_episode() -> None:
    cell = linen.GRUCell(8)
    params = jax.jit(cell.init)(jax.random.key(0), jnp.zeros((1, 8)), jnp.zeros((1, 6)))

    def step(params: Any, obs: Any, state: Any) -> Any:
        hidden, _ = cell.apply(params, state["h"], obs)
        return hidden[:, :3], hidden[:, 3], {"h": hidden}

    policy = JaxPolicy(step, params, output="logits", initial_state=lambda n: {"h": np.zeros((n, 8), np.float32)})
    with ClusterEnv(make_env(), 5, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(policy, 20)
    state, ends = jnp.zeros((5, 8)), rollout.terminations | rollout.truncations
    for t in range(20):
        if t > 0:
            # What follows an episode's end is the step that resets, and then the first of the next.
            state = jnp.where(~rollout.valid[t - 1][:, None], 0.0, state)
        np.testing.assert_allclose(rollout.states["h"][t], state, rtol=1e-4, atol=1e-6)
        _, value, new = step(params, jnp.asarray(rollout.obs[t]), {"h": state})
        np.testing.assert_allclose(rollout.value[t], value, rtol=1e-4, atol=1e-6)
        state = new["h"]
    assert ends.any()


def test_streams_pick_up_new_parameters_and_divergence_is_measured() -> None:
    agent = by_linen()
    with ClusterEnv(make_env(), 4, num_workers=1, sync=AdaptiveSync(0.01)) as envs:
        envs.reset(seed=1)
        with envs.stream(agent.policy, 8) as rollouts:
            for _ in range(6):
                next(rollouts)
                agent.update()
        assert envs.stats["checks"] > 0
        assert envs.stats["pulls"] > 1


def test_the_same_seed_gives_the_same_rollout() -> None:
    def roll() -> Rollout:
        with ClusterEnv(make_env(), 4, num_workers=0) as envs:
            envs.reset(seed=3)
            return envs.rollout(JaxPolicy(Stateful(nnx.Rngs(0)), output="logits"), 10)

    one, two = roll(), roll()
    assert np.array_equal(one.actions, two.actions)
    assert np.array_equal(one.value, two.value)


def linear(params: Any, obs: Any) -> Any:
    return obs @ params


def test_the_choices_of_an_evaluation_follow_from_each_episodes_seed() -> None:
    policy, tables = JaxPolicy(linear, jnp.ones((4, 2)), output="logits"), []
    for num_envs in (1, 3):
        with ClusterEnv("CartPole-v1", num_envs, num_workers=0) as envs:
            tables.append(envs.evaluate(policy, 12).returns.tolist())
    assert tables[0] == tables[1]


def test_a_file_of_a_network_with_other_code_is_refused(tmp_path: Path) -> None:
    params, path = jnp.ones((4, 2)), tmp_path / "eval.jsonl"
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
        for episodes in (3, 4):
            envs.evaluate(JaxPolicy(lambda params, obs: obs @ params, params, output="logits"), episodes, resume=path)
        for other in (
            JaxPolicy(lambda params, obs: -obs @ params, params, output="logits"),
            JaxPolicy(lambda params, obs: obs @ params, params, output="q"),
        ):
            with pytest.raises(ConfigError, match="another policy, or other weights or code"):
                envs.evaluate(other, 5, resume=path)


class MaskedLinen(linen.Module):
    @linen.compact
    def __call__(self, x: Any, action_mask: Any = None) -> Any:
        logits = linen.Dense(5)(x)
        logits = logits if action_mask is None else jnp.where(action_mask, logits, -1e9)
        return logits, linen.Dense(1)(x)


class MaskedNnx(nnx.Linear):
    def __call__(self, x: Any, action_mask: Any = None) -> Any:
        logits = super().__call__(x)
        return logits if action_mask is None else jnp.where(action_mask, logits, -1e9)


class MaskedTree(eqx.Module):
    body: eqx.nn.Linear

    def __call__(self, x: Any, action_mask: Any) -> Any:
        return jnp.where(action_mask, self.body(x), -1e9)


def masked_action(params: Any, obs: Any, key: Any, action_mask: Any) -> Any:
    return {"action": jax.random.categorical(key, jnp.where(action_mask, obs @ params, -1e9))}


def masked_policies() -> list[JaxPolicy]:
    module = MaskedLinen()
    return [
        JaxPolicy(module, module.init(jax.random.key(0), jnp.zeros((1, 2))), output="logits"),
        JaxPolicy(MaskedNnx(2, 5, rngs=nnx.Rngs(0)), output="logits"),
        JaxPolicy(MaskedTree(eqx.nn.Linear(2, 5, key=jax.random.key(0))), output="logits"),
        JaxPolicy(masked_action, jnp.ones((2, 5))),
    ]


# The environment fails at a forbidden action.
@pytest.mark.parametrize("num_workers", [0, 1])
def test_action_masks_reach_a_network_that_has_a_parameter_for_them(num_workers: int) -> None:
    with ClusterEnv(Masked, 3, num_workers=num_workers) as envs:
        for policy in masked_policies():
            envs.reset(seed=1)
            for _ in range(2):
                rollout = envs.rollout(policy, 9)
                chosen = np.take_along_axis(rollout.action_mask, rollout.actions[..., None], axis=2)[..., 0]
                assert (chosen[rollout.valid] == 1).all()
                if "logprob" in rollout.extras:
                    np.testing.assert_allclose(rollout.logprob[rollout.valid], 0.0, atol=1e-6)
            envs.step(policy)
            assert envs.evaluate(policy, 2, seed=1).lengths.tolist() == [4, 4]


def test_without_masks_a_network_is_called_without_or_says_that_it_needs_them() -> None:
    optional, _, needed, _ = masked_policies()
    with ClusterEnv(make_env(spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(5)), 3, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(optional, 3)
        logits = np.asarray(MaskedLinen().apply(optional.params, rollout.obs)[0])
        logprob = np.take_along_axis(log_softmax(logits), rollout.actions[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(rollout.logprob, logprob, rtol=1e-4, atol=1e-5)
        with pytest.raises(PolicyError, match=r"needs action_mask.*info\['action_mask'\]"):
            envs.rollout(needed, 3)


def test_masks_of_another_shape_are_told_of() -> None:
    class Odd(Masked):
        def _look(self) -> Any:
            obs, info = super()._look()
            return obs, {"action_mask": info["action_mask"][:4]}

    with (
        ClusterEnv(Odd, 3, num_workers=0) as envs,
        pytest.raises(PolicyError, match=r"a value for each action, shape \(5,\), got shape \(4,\)"),
    ):
        envs.rollout(masked_policies()[0], 3)


def row_by_row(params: Any, obs: Any) -> Any:
    return jnp.stack([row @ params for row in obs])


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a bare nnx module": (lambda: Stateful(nnx.Rngs(0)), r'JaxPolicy\(agent, output="logits"\)'),
    "a bare equinox module": (lambda: Tree(jax.random.key(0)), r'JaxPolicy\(agent, output="logits"\)'),
    "a bare linen module": (Linen, r'JaxPolicy\(agent, params, output="logits"\)'),
    "no parameters": (lambda: JaxPolicy(Linen(), output="logits"), "JaxPolicy needs parameters"),
    "parameters twice": (lambda: JaxPolicy(Tree(jax.random.key(0)), {}, output="q"), "holds its own parameters"),
    "an unknown output": (lambda: JaxPolicy(linear, 1.0, output="probs"), r"one of logits, q.*got 'probs'"),  # type: ignore[arg-type]  # the mistake
    "no output": (lambda: JaxPolicy(linear, jnp.zeros((6, 3))), 'should return a dict with "action"'),
    "too few results": (
        lambda: JaxPolicy(linear, jnp.zeros((6, 3)), output="gaussian"),
        "should return mean, log_std, and may return a value after that; got a",
    ),
    "a fixed number of rows": (
        lambda: JaxPolicy(
            lambda params, obs: jnp.stack([row @ params for row in obs]), jnp.zeros((6, 3)), output="logits"
        ),
        "any number of environments",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_a_sentence(name: str) -> None:
    make, text = MISTAKES[name]
    with ClusterEnv(make_env(), 5, num_workers=0) as envs, pytest.raises(ValueError, match=text):
        envs.rollout(make(), 2)


def test_donated_parameters_are_told_of() -> None:
    agent = by_linen()
    donate = jax.jit(lambda params: jax.tree_util.tree_map(lambda leaf: leaf + 1, params), donate_argnums=0)
    with ClusterEnv(make_env(), 2, num_workers=0) as envs:
        envs.rollout(agent.policy, 2)
        new = donate(agent.policy.params)
        with pytest.raises(PolicyError, match=r"donate_argnums.*policy\.params"):
            envs.rollout(agent.policy, 2)
        agent.policy.params = new
        check(agent, envs.rollout(agent.policy, 2))
