"""Policies: what turns observations into decisions on a worker, in terms of numpy arrays.

A user's own policy is a subclass of `BasePolicy` with `distribution` (or `act`), and `weights` if it has any:

    class Linear(BasePolicy):
        def __init__(self) -> None:
            self.matrix = np.zeros((4, 2), np.float32)

        def distribution(self, obs, state=None):
            return Categorical(logits=obs @ self.matrix)

        def weights(self):
            return {"matrix": self.matrix}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import ArrayKind
from clusterenv.policy.contents import Contents, Delivered
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.weights import Weights, WeightsSpec

Tree: TypeAlias = "Array | tuple[Tree, ...] | dict[str, Tree]"
State: TypeAlias = dict[str, Array]


class Decision(NamedTuple):
    """What a policy decided for n environments.

    Attributes:
        action: One array `[n, ...]`, or a dict or tuple of them, nested like the action space.
        extras: Further outputs for the learner, each `[n, ...]`: "logprob", "value", ...
        state: The recurrent state after this step, each `[n, ...]`; None if the policy has none.
        distribution: The distribution the actions were drawn from, if available: it then need not be evaluated again to
            be compared with another version's.
    """

    action: Tree
    extras: dict[str, Array]
    state: State | None = None
    distribution: Distribution | None = None


@runtime_checkable
class Policy(Protocol):
    """What a worker needs from a policy, which is pickled to the workers once; after that only its weights are sent."""

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        """Decide for every environment of a batch.

        Args:
            obs: Observations `[n, ...]`, nested like the observation space; valid only during the call.
            state: The state that the last decision returned, or `initial_state`, with the rows of new episodes already
                reset to their initial values (`start_episodes`).
            call: Per-call values such as epsilon.

        Returns:
            Arrays that the policy will not write to again.
        """

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        """Return the action distributions for a batch without sampling; None if the policy cannot provide them."""

    def weights(self) -> dict[str, Array]:
        """Return the weights by name, always in the same order. They may be live: encode or copy them immediately."""

    def load(self, weights: Weights) -> None:
        """Overwrite the weights in place.

        Raises:
            PolicyError: Names, shapes or dtypes differ from those of `weights()`.
        """

    def stamp(self) -> Hashable:
        """Return a value that differs from the last one returned if the weights may have changed since.

        None means that the policy cannot tell: announce changes with `envs.publish(agent)`.
        """

    def seed(self, seed: int) -> None:
        """Make all further random choices depend on this seed alone."""

    def initial_state(self, num_envs: int) -> State | None:
        """Return the recurrent state at an episode's start, each `[num_envs, ...]`; None if the policy has none."""


class BasePolicy:
    """Base class for policies in numpy: define `distribution` or `act`, and `weights` if there are any."""

    _rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The random generator; unseeded until `seed` is called."""
        if self._rng is None:
            self._rng = np.random.default_rng()
        return self._rng

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        """Sample from `distribution`; "logprob" is among the extras if the family has one."""
        distribution = self.distribution(obs, state)
        if distribution is None:
            raise PolicyError(f"{type(self).__name__} must define act() or distribution().")
        return draw(distribution, self.rng, call)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        """Return None: not every policy can describe its distribution."""
        return None

    def weights(self) -> dict[str, Array]:
        """Return an empty dict: a policy without weights."""
        return {}

    def load(self, weights: Weights) -> None:
        """Copy the given weights into the arrays that `weights()` returns."""
        own = self.weights()
        WeightsSpec.of(own).check(weights)
        for name, array in own.items():
            np.copyto(array, weights[name])

    def stamp(self) -> Hashable:
        """Return a hash of every array."""
        return tuple(hash(array.tobytes()) for array in self.weights().values())

    def seed(self, seed: int) -> None:
        """Replace the random generator with one that has this seed."""
        self._rng = np.random.default_rng(seed)

    def use_generator(self, rng: np.random.Generator) -> None:
        """Draw from this generator from now on."""
        self._rng = rng

    def initial_state(self, num_envs: int) -> State | None:
        """Return None: a policy without recurrent state."""
        return None


class FunctionPolicy(BasePolicy):
    """A plain function over numpy arrays: `f(obs)`, `f(obs, rng)`, `f(obs, epsilon)`.

    A parameter named `rng` receives the worker's seeded generator; any other is a per-call value. Whatever the function
    refers to by value (a network in its closure, a global of the script) counts as the policy's weights.

    Args:
        function: Returns the actions, or a `Decision`.
        kinds: The frameworks whose arrays the function may refer to.
    """

    can_remember = True

    def __init__(self, function: Callable[..., Tree | Decision], kinds: Sequence[ArrayKind] = ()) -> None:
        self._function = function
        self._signature = Signature(function, num_positional=1, offered="rng")
        self._kinds = kinds
        self._contents: Contents | None = None
        self.delivered: Delivered | None = None

    @property
    def contents(self) -> Contents:
        """What the function carries by value."""
        if self._contents is None:
            self._contents = Contents(self._function, self._kinds)
        return self._contents

    @property
    def takes(self) -> frozenset[str]:
        """The per-call values that the function has parameters for."""
        return self._signature.values

    @property
    def generation(self) -> int:
        """How often the function's contents, other than arrays and plain values, have changed."""
        return self.contents.generation

    def announce(self) -> None:
        """Treat whatever cannot be compared as changed."""
        self.contents.announce()

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        arguments = self._signature.bind(self.rng, call)
        try:
            answer = self._function(obs, **arguments)
        except Exception as error:
            if isinstance(obs, np.ndarray):
                error.add_note(f"It was given a batch of observations of shape {obs.shape}, a row per environment.")
            raise
        return answer if isinstance(answer, Decision) else Decision(answer, {})

    def weights(self) -> dict[str, Array]:
        """Return the arrays and plain values that the function refers to."""
        return self.contents.weights() if self.delivered is None else self.delivered.weights()

    def load(self, weights: Weights) -> None:
        """Overwrite what the function refers to, on a worker."""
        if self.delivered is not None:
            self.delivered.load(weights)

    def stamp(self) -> Hashable:
        """Return a value that changes whenever something the function refers to changes."""
        return self.contents.stamp()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function without the values of its arrays."""
        return _rebuild_function, (self.contents.pack(),)


class TrackedPolicy:
    """A user's own policy whose attributes reach the workers too, not only its weights.

    Args:
        policy: Has its own `weights` and `load`; whatever else its pickle carries by value is added to its weights.
        kinds: The frameworks whose arrays may be among its attributes.
    """

    def __init__(self, policy: Policy, kinds: Sequence[ArrayKind] = ()) -> None:
        self._policy = policy
        self.contents = Contents(policy, kinds, own=policy.weights)
        self.act, self.distribution = policy.act, policy.distribution
        self.seed, self.initial_state = policy.seed, policy.initial_state
        self.announce = self.contents.announce

    @property
    def generation(self) -> int:
        """How often the policy's contents, other than weights and plain values, have changed."""
        return self.contents.generation

    def weights(self) -> dict[str, Array]:
        return {**self._policy.weights(), **self.contents.weights()}

    def load(self, weights: Weights) -> None:
        raise PolicyError("Only a worker's copy of a policy is loaded.")

    def stamp(self) -> Hashable:
        return self._policy.stamp(), self.contents.stamp()

    def __reduce__(self) -> tuple[Any, ...]:
        return _DeliveredPolicy, (self.contents.pack(),)


class _DeliveredPolicy:
    """A tracked policy on its worker."""

    can_remember = True

    def __init__(self, packed: bytes) -> None:
        self.delivered = Delivered(packed)
        self._policy: Policy = self.delivered.payload
        self.act, self.distribution = self._policy.act, self._policy.distribution
        self.seed, self.initial_state = self._policy.seed, self._policy.initial_state
        self.stamp = self._policy.stamp
        self.takes: frozenset[str] = frozenset(getattr(self._policy, "takes", ()))
        if isinstance(self._policy, BasePolicy):
            self.use_generator = self._policy.use_generator

    @property
    def chance(self) -> object:
        """The state of the random source that the policy's own code uses, if declared; changes with every draw."""
        return getattr(self._policy, "chance", None)

    def weights(self) -> dict[str, Array]:
        return {**self._policy.weights(), **self.delivered.weights()}

    def load(self, weights: Weights) -> None:
        carried = self.delivered.weights()
        self.delivered.load({name: weights[name] for name in carried if name in weights})
        self._policy.load({name: array for name, array in weights.items() if name not in carried})


class Selected:
    """A policy of which only some extras are wanted in rollouts; the others need not be computed or sent.

    Args:
        policy: Any policy.
        wanted: The names of the wanted extras.
    """

    def __init__(self, policy: Any, wanted: tuple[str, ...]) -> None:
        self._policy = policy
        self.wanted = wanted
        self.act, self.distribution, self.initial_state = policy.act, policy.distribution, policy.initial_state
        self.weights, self.load, self.stamp, self.seed = policy.weights, policy.load, policy.stamp, policy.seed
        self.takes: frozenset[str] = frozenset(getattr(policy, "takes", ()))
        if hasattr(policy, "wanted"):
            policy.wanted = wanted

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the policy: whether it is fast, how often its structure has changed."""
        if name.startswith("__") or name == "_policy":
            raise AttributeError(name)
        return getattr(self._policy, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Selected, (self._policy, self.wanted)


def _rebuild_function(packed: bytes) -> FunctionPolicy:
    """Make the policy on a worker; its arrays are zeros until weights are loaded."""
    delivered = Delivered(packed)
    policy = FunctionPolicy(delivered.payload)
    policy.delivered = delivered
    return policy


class Signature:
    """The keyword arguments that a user's function takes: one that ClusterEnv offers, and per-call `values`.

    Args:
        function: The user's function.
        num_positional: How many leading parameters are passed by position, of which the last is the observations.
        offered: The name of the parameter that ClusterEnv fills if the function has it.

    Raises:
        PolicyError: The function has fewer parameters than that.
    """

    def __init__(self, function: Callable[..., object], num_positional: int, offered: str) -> None:
        self._name = getattr(function, "__name__", type(function).__name__)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # A builtin without a signature checks its own arguments.
            parameters = []
        else:
            self._check_positional(parameters, num_positional)
        named = {p.name: p for p in parameters[num_positional:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self._offered = offered if named.pop(offered, None) else None
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.values = frozenset(named)
        self._required = {name for name, p in named.items() if p.default is p.empty}

    def _check_positional(self, parameters: Sequence[inspect.Parameter], expected: int) -> None:
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < expected and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            given = "the agent and the observations" if expected > 1 else "the observations"
            raise PolicyError(f"The policy function {self._name}() must have a parameter for {given}.")

    def bind(self, offer: object, call: Call) -> dict[str, object]:
        """Return the keyword arguments for one call.

        Raises:
            PolicyError: A per-call value is missing, or one is given that the function does not take.
        """
        if missing := self._required - call.keys():
            raise PolicyError(
                f"The policy function {self._name}() needs {', '.join(sorted(missing))}: give it with the call, "
                f'as in envs.rollout(agent, num_steps, values={{"{min(missing)}": ...}}).'
            )
        if not self._takes_any and (unknown := call.keys() - self.values):
            raise PolicyError(
                f"The policy function {self._name}() takes no {', '.join(sorted(unknown))}. "
                f"Per-call values it takes: {', '.join(sorted(self.values)) or 'none'}."
            )
        return dict(call) if self._offered is None else {self._offered: offer, **call}


def draw(
    distribution: Distribution,
    rng: np.random.Generator,
    call: Call = NO_VALUES,
    extras: Mapping[str, Array] | None = None,
) -> Decision:
    """Sample a decision, with its log-probability if the family has one.

    Raises:
        PolicyError: `call` holds a value that this family of distributions does not read.
    """
    if call and (unknown := call.keys() - distribution.reads):
        raise PolicyError(
            f"A {distribution.family} policy takes no {', '.join(sorted(unknown))}. "
            f"Per-call values it takes: {', '.join(sorted(distribution.reads))}."
        )
    action, logprob = distribution.sample(rng, call)
    named: dict[str, Array] = {} if logprob is None else {"logprob": logprob}
    return Decision(action, named if extras is None else {**named, **extras}, None, distribution)


def start_episodes(state: State, initial: State, starts: NDArray[np.bool_]) -> State:
    """Return the state with the rows where an episode starts (`starts`, shape `[n]`) reset to their initial values.

    `state` itself is not written to.
    """
    if not starts.any():
        return state
    fresh = {name: array.copy() for name, array in state.items()}
    for name, array in fresh.items():
        array[starts] = initial[name][starts]
    return fresh


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf of nested dicts and tuples."""
    if isinstance(tree, dict):
        return {name: map_tree(function, part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, part) for part in tree)
    return function(tree)
