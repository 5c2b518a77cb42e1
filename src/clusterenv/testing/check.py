"""check_vector_env: checks a vector environment against Gymnasium's laws."""

from __future__ import annotations

import contextlib
import difflib
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import gymnasium as gym

from clusterenv.errors import ConfigError
from clusterenv.testing.deadline import DeadlinePassed, deadline
from clusterenv.testing.laws import (
    asynchrony,
    attributes,
    autoreset,
    buffers,
    closing,
    faults,
    form,
    infos,
    mistakes,
    seeds,
)
from clusterenv.testing.report import LawsBroken, Report, Verdict
from clusterenv.testing.subject import Broken, NotApplicable, Subject, render

Law = Callable[[Subject], None]

_FUNCTIONS: tuple[Law, ...] = (
    form.run,
    form.vector_env,
    form.autoreset_mode,
    form.batched_spaces,
    form.step_form,
    form.observation_form,
    form.observation_values,
    buffers.kept_answers,
    buffers.written_answers,
    buffers.actions_untouched,
    seeds.same_seed,
    seeds.seed_again,
    seeds.seed_spread,
    seeds.seed_list,
    seeds.no_seed,
    seeds.reset_mask,
    seeds.options_untouched,
    autoreset.next_step,
    autoreset.same_step,
    autoreset.disabled,
    autoreset.plain_loop,
    infos.info_masks,
    infos.final_obs,
    attributes.call,
    attributes.set_attr,
    attributes.unknown_attribute,
    mistakes.wrong_actions,
    mistakes.refusals,
    mistakes.wrong_seeds,
    asynchrony.async_halves,
    asynchrony.async_order,
    asynchrony.close_pending,
    closing.close_twice,
    closing.use_after_close,
    closing.processes,
    closing.descriptors,
    faults.one_killed,
    faults.all_killed,
    faults.close_after_kill,
)
_WITHOUT_A_RUN = ("run", "vector-env", "autoreset-mode", "batched-spaces")
_LAWS = {law.__name__.replace("_", "-"): law for law in _FUNCTIONS}

LAWS: dict[str, str] = {name: (law.__doc__ or "").strip() for name, law in _LAWS.items()}
"""The laws by name, each described in a sentence."""


def check_vector_env(
    make: Callable[[], Any],
    *,
    factories: Sequence[Callable[[], gym.Env[Any, Any]]] | None = None,
    worker_pids: Callable[[Any], Sequence[int]] | None = None,
    skip: Collection[str] = (),
    seed: int = 0,
    num_steps: int = 200,
    deadline_s: float = 60.0,
    raises: bool = True,
) -> Report:
    """Check that a vector environment keeps Gymnasium's laws.

    The vector environment is made about ten times and stepped with random actions; the same arguments always do the
    same. A law is not applicable if the vector environment lacks a method that `VectorEnv` does not require, is in
    another autoreset mode, or never ends an episode.

    Args:
        make: Returns a new vector environment, the same at every call.
        factories: The factories of its environments, in order, as `SyncVectorEnv` takes them. If given, the vector
            environment is compared with a plain loop over its environments.
        worker_pids: For a vector environment that claims to survive the loss of its workers: returns their process ids,
            given the vector environment. These processes are killed, but only if they descend from this one.
        skip: Names of laws (`LAWS`) that need not be kept.
        seed: The seed of everything random.
        num_steps: The length of the run that most laws examine. Episodes should end within it.
        deadline_s: How many seconds one law may take; if it takes longer, it is broken. Only in the main thread.
        raises: Whether broken laws raise an exception, or are only reported.

    Raises:
        LawsBroken: The vector environment breaks at least one law.
        ConfigError: An argument is wrong.
    """
    _check_arguments(make, skip, num_steps)
    subject = Subject(make, seed=seed, num_steps=num_steps, factories=factories, worker_pids=worker_pids)
    verdicts: list[Verdict] = []
    # Warnings are of no use to the reader of a report, and some test frameworks turn them into errors.
    with warnings.catch_warnings(action="ignore"), contextlib.closing(subject):
        for law in LAWS:
            verdicts.append(Verdict(law, LAWS[law], "skipped") if law in skip else _judge(law, subject, deadline_s))
            subject.check_factories()
            subject.forget(is_all=verdicts[-1].outcome == "broken")
    report = Report(subject.name, tuple(verdicts))
    if raises and report.broken:
        raise LawsBroken(report)
    return report


def _judge(law: str, subject: Subject, deadline_s: float) -> Verdict:
    subject.play = None
    try:
        with deadline(deadline_s):
            if law not in _WITHOUT_A_RUN:
                subject.demand_run()
            _LAWS[law](subject)
    except NotApplicable as reason:
        return Verdict(law, LAWS[law], "not applicable", str(reason))
    except Broken as breach:
        message = str(breach)
        if breach.lines is not None:
            return _broken(law, message, render(breach.lines))
    except DeadlinePassed:
        message = f"It hangs: what was expected at once had not come after {deadline_s:g} s."
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it should not have raised anything
        message = f"It raised {_describe(error)}"
    else:
        return Verdict(law, LAWS[law], "kept")
    return _broken(law, message, None if subject.play is None else subject.play.script)


def _broken(law: str, message: str, script: str | None) -> Verdict:
    again = "" if script is None else f"\nTo see it again:\n{script}"
    return Verdict(law, LAWS[law], "broken", message + again)


def _describe(error: BaseException) -> str:
    """Describe an exception and the last place it passed outside this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f", in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _check_arguments(make: Any, skip: Collection[str], num_steps: int) -> None:
    if not callable(make):
        raise ConfigError(
            f"make must be a function that returns a new vector environment, as it is made many times; got {make!r}."
        )
    if isinstance(skip, str):
        raise ConfigError(f"skip must be a collection of laws, such as [{skip!r}], got {skip!r}.")
    for name in skip:
        if name not in LAWS:
            near = difflib.get_close_matches(name, LAWS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"skip: there is no law {name!r}.{hint} LAWS lists them all.")
    if "run" in skip:
        raise ConfigError("skip: the law 'run' is what all others look at.")
    if num_steps < 10:
        raise ConfigError(f"num_steps must be at least 10, got {num_steps}.")
