"""What a vector environment says about itself, and the form of what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clusterenv.testing.subject import Broken, Subject

_KINDS: dict[str, type[np.generic]] = {"rewards": np.floating, "terminations": np.bool_, "truncations": np.bool_}


def run(subject: Subject) -> None:
    """It can be made, reset and stepped with actions of its action space."""
    subject.record()


def vector_env(subject: Subject) -> None:
    """It is a `gymnasium.vector.VectorEnv`."""
    envs = subject.shared().envs
    if not isinstance(envs, VectorEnv):
        raise Broken(f"It is a {type(envs)}, which does not descend from VectorEnv, so wrappers refuse it.")


def autoreset_mode(subject: Subject) -> None:
    """`metadata["autoreset_mode"]` is a member of `AutoresetMode`."""
    metadata = subject.shared().envs.metadata
    if not isinstance(said := metadata.get("autoreset_mode"), AutoresetMode):
        raise Broken(f'metadata["autoreset_mode"] is {said!r}, which is none of {list(AutoresetMode)}.')


def batched_spaces(subject: Subject) -> None:
    """`observation_space` and `action_space` are the spaces of one environment, batched for all."""
    envs = subject.shared().envs
    for name in ("observation_space", "action_space"):
        single, batched = getattr(envs, f"single_{name}"), getattr(envs, name)
        expected = batch_space(single, envs.num_envs)
        is_free = name == "observation_space" and getattr(envs, "observation_mode", "same") != "same"
        # Environments whose bounds differ have a different batched space of the same form.
        is_right = not list(_misfits(expected, batched.sample(), name)) if is_free else batched == expected
        if not is_right:
            raise Broken(f"{name} is {batched}, but single_{name} batched for {envs.num_envs} is {expected}.")


def step_form(subject: Subject) -> None:
    """Each environment has a reward, a floating-point number, and two flags, bools; infos are a dict."""
    shape = (subject.shared().num_envs,)
    for moment in subject.recording:
        if not isinstance(moment.answer[-1], dict):
            raise Broken(f"The infos of {moment.name} are a {type(moment.answer[-1])}, not a dict.", moment.lines)
    for moment in subject.steps:
        for (name, kind), values in zip(_KINDS.items(), moment.answer[1:4], strict=True):
            if not isinstance(values, np.ndarray):
                raise Broken(f"The {name} of {moment.name} are a {type(values)}, not an array.", moment.lines)
            if values.shape != shape or not np.issubdtype(values.dtype, kind):
                found, expected = f"{values.dtype}{values.shape}", f"{kind.__name__}{shape}"
                raise Broken(f"The {name} of {moment.name} are {found}, expected {expected}.", moment.lines)


def observation_form(subject: Subject) -> None:
    """Observations have the structure, shapes and dtypes of `observation_space`."""
    space = subject.shared().envs.observation_space
    for moment in subject.recording:
        for problem in _misfits(space, moment.answer[0], "observations"):
            raise Broken(f"{moment.name} returned {problem}", moment.lines)


def observation_values(subject: Subject) -> None:
    """Observations lie in `observation_space`."""
    play = subject.shared()
    space, single = play.envs.observation_space, play.envs.single_observation_space
    for moment in subject.recording:
        observations = moment.answer[0]
        if space.contains(observations):
            continue
        rows = play.rows(observations)
        outside = next((index for index, row in enumerate(rows) if not single.contains(row)), None)
        which = f"{observations}" if outside is None else f"{rows[outside]} of environment {outside}"
        raise Broken(f"{moment.name} returned the observation {which}, which is not in {space}.", moment.lines)


def _misfits(space: spaces.Space[Any], value: Any, path: str) -> Iterator[str]:
    """Yield what is wrong with the form of a value; values of unusual kinds of spaces are not checked."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            yield f"{path} {_describe(value)}, expected a dict with the keys {list(space.spaces)}."
            return
        for key, inner in space.spaces.items():
            yield from _misfits(inner, value[key], f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            yield f"{path} {_describe(value)}, expected a tuple of {len(space.spaces)}."
            return
        for place, inner in enumerate(space.spaces):
            yield from _misfits(inner, value[place], f"{path}[{place}]")
    elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        form = (value.dtype, value.shape) if isinstance(value, np.ndarray) else None
        if form != (space.dtype, space.shape):
            yield f"{path} {_describe(value)}, expected an array {space.dtype}{space.shape}."


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"of the form {value.dtype}{value.shape}"
    if isinstance(value, Mapping):
        return f"as a dict with the keys {list(value)}"
    return f"as a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
