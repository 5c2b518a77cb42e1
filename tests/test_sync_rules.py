"""When workers pull: every rule's decisions, and the trap that must not close."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv.errors import ConfigError
from clusterenv.policy.sync import (
    AdaptiveSync,
    Case,
    EveryUpdate,
    NeverSync,
    PeriodicSync,
    Reason,
    SyncBudget,
    SyncRule,
    Tracker,
    Verdict,
)

pytestmark = pytest.mark.quick

RULES: list[SyncRule] = [AdaptiveSync(), EveryUpdate(), PeriodicSync(3), NeverSync()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def judge_all(rule: SyncRule, divergences: list[float]) -> list[Verdict]:
    """Hold version 1 while versions 2, 3, ... are measured, until a pull."""
    tracker = rule.start()
    verdicts: list[Verdict] = []
    for newest, divergence in enumerate(divergences, start=2):
        verdicts.append(tracker.judge(Case(1, newest, divergence)))
        if verdicts[-1].pulls:
            break
    return verdicts


def count_pulls(rule: SyncRule, divergence_at_lag: list[float], updates: int) -> list[Reason]:
    """Simulate one worker whose divergence depends only on its lag; the last entry holds for ever."""
    tracker, own, pulls = rule.start(), 1, []
    for newest in range(2, updates + 2):
        lag = newest - own
        divergence = divergence_at_lag[min(lag, len(divergence_at_lag)) - 1]
        verdict = tracker.judge(Case(own, newest, divergence))
        if verdict.pulls:
            own = newest
            pulls.append(verdict.reason)
    return pulls


@every_rule
def test_a_worker_without_weights_pulls_whatever_the_rule(rule: SyncRule) -> None:
    assert rule.start().judge(Case(0, 5)) == Verdict(True, Reason.FIRST)


@every_rule
def test_a_worker_with_the_newest_weights_does_not_pull(rule: SyncRule) -> None:
    assert rule.start().judge(Case(5, 5, 9.0)) == Verdict(False, Reason.CURRENT)
    assert rule.start().judge(Case(0, 0)) == Verdict(False, Reason.CURRENT)


def test_only_the_adaptive_rule_compares() -> None:
    assert [rule.compares for rule in RULES] == [True, False, False, False]


def test_trackers_of_one_rule_share_nothing() -> None:
    rule = AdaptiveSync()
    one, two = rule.start(), rule.start()
    one.judge(Case(1, 2, 0.02))
    assert one.judge(Case(1, 3, 0.02)).reason is Reason.PLATEAU
    assert two.judge(Case(1, 3, 0.02)).reason is Reason.BELOW


@pytest.mark.parametrize(
    ("rule", "expected"), [(EveryUpdate(), 12), (PeriodicSync(1), 12), (PeriodicSync(5), 2), (NeverSync(), 0)]
)
def test_fixed_rules_pull_by_lag_alone(rule: SyncRule, expected: int) -> None:
    assert len(count_pulls(rule, [99.0], updates=12)) == expected


def test_a_divergence_over_the_threshold_pulls_and_one_at_it_does_not() -> None:
    assert AdaptiveSync(threshold=0.05).start().judge(Case(1, 2, 0.05)) == Verdict(False, Reason.BELOW)
    assert AdaptiveSync(threshold=0.05).start().judge(Case(1, 2, 0.0501)) == Verdict(True, Reason.DIVERGED)


@pytest.mark.parametrize("divergence", [math.inf, math.nan])
def test_an_infinite_or_meaningless_divergence_pulls(divergence: float) -> None:
    assert AdaptiveSync().start().judge(Case(1, 2, divergence)) == Verdict(True, Reason.DIVERGED)


def test_a_divergence_that_cannot_be_measured_pulls_and_says_so() -> None:
    verdict = AdaptiveSync().start().judge(Case(1, 2, None))
    assert verdict == Verdict(True, Reason.UNMEASURED)
    assert verdict.advice is not None
    assert "distribution" in verdict.advice


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_steady_or_accelerating_growth_is_no_plateau(power: float) -> None:
    """A policy that drifts at random has a divergence linear in time, one that moves straight ahead a quadratic one."""
    verdicts = judge_all(AdaptiveSync(max_lag=100), [0.001 * lag**power for lag in range(1, 100)])
    assert verdicts[-1].reason is Reason.DIVERGED


def test_the_trap_of_a_clipping_learner_does_not_close() -> None:
    """Measured with plain PPO and workers that never pull: the divergence rises, then stays where the clip holds it."""
    trap = [0.0037, 0.0068, 0.0074, 0.0111, 0.0143, 0.0133, 0.0136, 0.0158, 0.0172, 0.0156, 0.0165, 0.0174]
    naive = AdaptiveSync(plateau=None, max_lag=10**6)
    assert count_pulls(naive, trap, updates=25) == []
    pulls = count_pulls(AdaptiveSync(), trap, updates=25)
    assert len(pulls) >= 6
    assert set(pulls) == {Reason.PLATEAU}


def test_a_learner_that_is_not_held_back_pays_nothing_for_the_protection() -> None:
    """Measured with decoupled PPO."""
    free = [0.0028, 0.0079, 0.0165, 0.0265, 0.0382, 0.0645]
    assert count_pulls(AdaptiveSync(), free, updates=24) == [Reason.DIVERGED] * 4


def test_a_converged_learner_costs_a_pull_only_when_the_lag_bound_is_reached() -> None:
    still = [0.0004, 0.0006, 0.0003, 0.0005, 0.0004]
    assert count_pulls(AdaptiveSync(max_lag=20), still, updates=60) == [Reason.LAG] * 3


def test_a_shrinking_divergence_is_a_plateau() -> None:
    assert judge_all(AdaptiveSync(plateau=0.0), [0.03, 0.031, 0.02])[-1] == Verdict(True, Reason.PLATEAU)


def test_the_first_version_after_a_pull_is_never_a_plateau() -> None:
    tracker = AdaptiveSync(plateau=0.9).start()
    for own, newest in [(1, 2), (2, 3), (3, 4), (7, 9)]:
        assert tracker.judge(Case(own, newest, 0.02)).reason is Reason.BELOW


def cross(rule: SyncRule, times: int) -> tuple[Tracker, int]:
    """Let a worker pull over the threshold at every version, so many times; returns its tracker and version."""
    tracker = rule.start()
    for own in range(1, times + 1):
        assert tracker.judge(Case(own, own + 1, 0.06)).reason is Reason.DIVERGED
    return tracker, times + 1


def pause(tracker: Tracker, own: int, versions: int) -> list[Reason]:
    """Let the divergence rise once after a pull, and then stand still."""
    return [tracker.judge(Case(own, own + lag, 0.02)).reason for lag in range(1, versions + 2)]


@pytest.mark.parametrize(("crossings", "patience"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_a_learner_that_crossed_the_threshold_often_may_pause_as_often(crossings: int, patience: int) -> None:
    tracker, own = cross(AdaptiveSync(), crossings)
    assert pause(tracker, own, patience) == [Reason.BELOW] * patience + [Reason.PLATEAU]


def test_growth_between_two_pauses_begins_the_count_anew() -> None:
    tracker, own = cross(AdaptiveSync(), 2)
    for lag, divergence in enumerate([0.01, 0.01, 0.03, 0.03], start=1):
        assert tracker.judge(Case(own, own + lag, divergence)).reason is Reason.BELOW
    assert tracker.judge(Case(own, own + 5, 0.03)).reason is Reason.PLATEAU


@pytest.mark.parametrize("reason", [Reason.PLATEAU, Reason.LAG])
def test_a_pull_below_the_threshold_ends_the_patience(reason: Reason) -> None:
    tracker, own = cross(AdaptiveSync(max_lag=4), 3)
    divergences = [0.02] * 4 if reason is Reason.PLATEAU else [0.001 * lag for lag in range(1, 5)]
    verdicts = [tracker.judge(Case(own, own + lag, divergence)) for lag, divergence in enumerate(divergences, start=1)]
    assert verdicts[-1].reason is reason
    assert pause(tracker, own + 4, 1) == [Reason.BELOW, Reason.PLATEAU]


def test_a_pull_over_the_threshold_that_is_asked_for_twice_counts_once() -> None:
    tracker = AdaptiveSync().start()
    for newest in (2, 3, 4):
        assert tracker.judge(Case(1, newest, 0.06)).reason is Reason.DIVERGED
    assert pause(tracker, 4, 1) == [Reason.BELOW, Reason.PLATEAU]


def test_growth_is_counted_per_version_when_versions_are_skipped() -> None:
    tracker = AdaptiveSync(plateau=0.5).start()
    tracker.judge(Case(1, 2, 0.01))
    # Three versions later, at a third of the pace per version: a plateau although it grew as much in total.
    assert tracker.judge(Case(1, 5, 0.02)).reason is Reason.PLATEAU
    tracker = AdaptiveSync(plateau=0.5).start()
    tracker.judge(Case(1, 3, 0.01))
    assert tracker.judge(Case(1, 4, 0.015)).reason is Reason.BELOW


def test_measuring_one_version_twice_says_nothing_about_growth() -> None:
    tracker = AdaptiveSync().start()
    tracker.judge(Case(1, 2, 0.01))
    assert tracker.judge(Case(1, 2, 0.01)).reason is Reason.BELOW
    assert tracker.judge(Case(1, 2, 0.06)).reason is Reason.DIVERGED
    assert tracker.judge(Case(1, 3, 0.02)).reason is Reason.BELOW


def test_a_pull_that_is_still_on_its_way_is_asked_for_again_or_not_but_never_forgotten() -> None:
    tracker = AdaptiveSync().start()
    assert tracker.judge(Case(1, 2, 0.2)).pulls
    assert tracker.judge(Case(1, 3, 0.3)).pulls
    assert not tracker.judge(Case(3, 4, 0.01)).pulls


def test_lag_is_bounded_and_the_remedy_named() -> None:
    verdicts = judge_all(AdaptiveSync(max_lag=4), [0.001, 0.002, 0.003, 0.004, 0.005])
    assert [verdict.reason for verdict in verdicts] == [Reason.BELOW] * 3 + [Reason.LAG]
    for reason, switch, other in (
        (Reason.LAG, "max_lag=math.inf", "plateau"),
        (Reason.PLATEAU, "plateau=None", "max_lag"),
    ):
        advice = Verdict(True, reason).advice
        assert advice is not None
        assert "decoupled" in advice
        assert "AdaptiveSync.off_policy()" in advice
        assert switch in advice
        assert other not in advice
    assert Verdict(True, Reason.DIVERGED).advice is None


@given(st.lists(st.floats(0, 0.1), min_size=1, max_size=60), st.integers(1, 30), st.floats(0, 0.99))
@settings(max_examples=150, deadline=None)
def test_no_worker_is_ever_more_than_the_lag_bound_behind_or_over_the_threshold(
    divergences: list[float], max_lag: int, plateau: float
) -> None:
    rule = AdaptiveSync(threshold=0.05, max_lag=max_lag, plateau=plateau)
    tracker, own = rule.start(), 1
    for newest, divergence in enumerate(divergences, start=2):
        if tracker.judge(Case(own, newest, divergence)).pulls:
            own = newest
        else:
            assert newest - own < max_lag
            assert divergence <= 0.05


@pytest.mark.parametrize(
    "arguments",
    [
        {"threshold": 0.0},
        {"threshold": -1.0},
        {"threshold": math.nan},
        {"threshold": math.inf},
        {"threshold": "small"},
        {"threshold": True},
        {"measure": "KL"},
        {"measure": None},
        {"max_lag": 0},
        {"max_lag": 2.5},
        {"max_lag": True},
        {"max_lag": math.nan},
        {"plateau": "half"},
        {"everywhere": "yes"},
        {"plateau": -0.1},
        {"plateau": 1.0},
        {"plateau": math.nan},
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        AdaptiveSync(**arguments)


@pytest.mark.parametrize("wrong", [0, -3, 1.5, 4.0, True, math.inf, math.nan, "all", None])
def test_a_period_is_a_whole_number_of_versions(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"PeriodicSync\.k must be at least 1 version, a whole number"):
        PeriodicSync(wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    assert PeriodicSync(np.int64(3)).max_lag == 3  # type: ignore[arg-type]  # as users have them
    assert AdaptiveSync(np.float32(0.05), max_lag=np.int64(4)).max_lag == 4  # type: ignore[arg-type]  # as above


def test_the_threshold_is_the_one_argument_everybody_gives() -> None:
    assert AdaptiveSync(0.02) == AdaptiveSync(threshold=0.02)
    with pytest.raises(TypeError):
        AdaptiveSync(0.02, 5)  # type: ignore[call-arg, arg-type]  # that is the point


def test_an_off_policy_learner_pulls_when_diverged_and_for_no_other_reason() -> None:
    still = [0.02] * 500
    assert count_pulls(AdaptiveSync.off_policy(), still, updates=500) == []
    assert AdaptiveSync.off_policy(0.01).start().judge(Case(1, 2, 0.02)) == Verdict(True, Reason.DIVERGED)
    chosen = AdaptiveSync.off_policy(0.01, measure="ess", everywhere=True)
    assert (chosen.measure, chosen.everywhere, chosen.max_lag) == ("ess", True, math.inf)


PULL_BYTES = 36_736


def spend(rule: SyncBudget, num_workers: int, updates: list[tuple[float, bool]]) -> list[int]:
    """Run so many workers under a budget; returns how many pulled at each update.

    Args:
        rule: The budget.
        num_workers: All of them begin with version 1.
        updates: How long each took, and whether the policy changed by it at all.
    """
    tracker, held, spent, now_s, moved = rule.start(), {1: num_workers}, [], 0.0, [0.0, 0.0]
    tracker.judge(Case(1, 2, 0.0, num_workers, pull_bytes=PULL_BYTES, now_s=now_s))  # The clock starts.
    for newest, (seconds, is_moving) in enumerate(updates, start=3):
        now_s += seconds
        moved += [moved[-1] + is_moving]
        pulled = 0
        for own in sorted(held, key=lambda own: -(moved[-1] - moved[min(own, newest) - 1])):
            divergence = 0.01 * (moved[-1] - moved[own - 1])
            verdict = tracker.judge(Case(own, newest, divergence, held[own], pull_bytes=PULL_BYTES, now_s=now_s))
            count = min(held[own], verdict.at_most or 0) if verdict.pulls else 0
            held[own] -= count
            pulled += count
        held = {own: count for own, count in {**held, newest: pulled}.items() if count}
        spent.append(pulled)
    return spent


@given(
    st.floats(0.05, 40.0),
    st.booleans(),
    st.lists(st.tuples(st.floats(0.5, 2.0), st.booleans()), min_size=40, max_size=80),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_budget_is_never_exceeded_over_any_20_updates(
    pulls_per_update: float, is_in_bytes: bool, updates: list[tuple[float, bool]]
) -> None:
    """By more than a tenth, that is, or by the one pull that cannot be split."""
    rule = (
        SyncBudget(bytes_per_second=pulls_per_update * PULL_BYTES)
        if is_in_bytes
        else SyncBudget(pulls_per_update=pulls_per_update)
    )
    spent = spend(rule, 64, updates)
    for start in range(len(spent) - 19):
        budget = pulls_per_update * (sum(update[0] for update in updates[start : start + 20]) if is_in_bytes else 20)
        assert sum(spent[start : start + 20]) <= max(1.1 * budget, budget + 1) + 1e-2


@given(st.floats(0.05, 40.0), st.booleans(), st.lists(st.floats(0.5, 2.0), min_size=40, max_size=80))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_budget_is_spent_while_the_policy_changes(
    pulls_per_update: float, is_in_bytes: bool, seconds: list[float]
) -> None:
    rule = (
        SyncBudget(bytes_per_second=pulls_per_update * PULL_BYTES)
        if is_in_bytes
        else SyncBudget(pulls_per_update=pulls_per_update)
    )
    spent = spend(rule, 256, [(each, True) for each in seconds])
    for start in range(len(spent) - 19):
        budget = pulls_per_update * (sum(seconds[start : start + 20]) if is_in_bytes else 20)
        assert sum(spent[start : start + 20]) >= min(0.9 * budget, budget - 1) - 1e-2


def test_a_budget_of_bytes_buys_as_many_pulls_as_the_weights_are_small() -> None:
    for pull_bytes, expected in ((1000, 10), (5000, 2), (20_000, 0)):
        tracker = SyncBudget(bytes_per_second=1e4).start()
        tracker.judge(Case(1, 2, 0.1, 50, pull_bytes=pull_bytes, now_s=100.0))
        verdict = tracker.judge(Case(1, 3, 0.1, 50, pull_bytes=pull_bytes, now_s=101.0))
        assert (verdict.at_most or 0) == expected


def test_versions_that_were_never_judged_are_paid_for_all_the_same() -> None:
    tracker = SyncBudget(pulls_per_update=2).start()
    assert tracker.judge(Case(1, 2, 0.1, 50)).at_most == 2
    assert tracker.judge(Case(1, 7, 0.1, 50)).at_most == 10


def test_a_budget_goes_to_the_most_diverged_who_are_judged_first_and_then_is_gone() -> None:
    tracker = SyncBudget(pulls_per_update=3).start()
    assert tracker.judge(Case(1, 4, 0.5, 2)) == Verdict(True, Reason.BUDGET, 2)
    assert tracker.judge(Case(2, 4, 0.2, 5)) == Verdict(True, Reason.BUDGET, 1)
    assert not tracker.judge(Case(3, 4, 0.1, 1)).pulls
    assert tracker.judge(Case(2, 5, 0.3, 9)).at_most == 3


@pytest.mark.parametrize("name", ["pulls_per_update", "bytes_per_second"])
@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan, "all", True])
def test_a_budget_that_makes_no_sense_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"SyncBudget\.{name} must be a positive number"):
        SyncBudget(**{name: wrong})


@pytest.mark.parametrize("both", [{}, {"pulls_per_update": 1, "bytes_per_second": 1e6}])
def test_a_budget_is_of_one_kind(both: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"takes one of .*got (neither|both)"):
        SyncBudget(**both)


def take_turns(num_workers: int, updates: int, growth: float) -> tuple[list[list[int]], list[Reason]]:
    """Let workers diverge evenly; returns what each held at every version, and why they pulled."""
    tracker, held, history, reasons = AdaptiveSync(0.05).start(), [1] * num_workers, [], []
    for newest in range(2, updates + 2):
        for own in sorted(set(held)):
            holders = [worker for worker, version in enumerate(held) if version == own]
            verdict = tracker.judge(Case(own, newest, growth * (newest - own), len(holders), num_all=num_workers))
            if verdict.pulls:
                for worker in holders[: verdict.at_most]:
                    held[worker] = newest
                    reasons.append(verdict.reason)
        history.append(list(held))
    return history, reasons


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_workers_take_turns_so_that_never_all_data_is_old(num_workers: int) -> None:
    history, reasons = take_turns(num_workers, updates=100, growth=0.0049)  # The threshold is reached in 11 versions.
    assert reasons.count(Reason.STAGGERED) == num_workers // 2  # Once, and then in turn.
    assert set(reasons) == {Reason.STAGGERED, Reason.DIVERGED}
    freshest = [newest - max(held) for newest, held in enumerate(history, start=2)]
    assert max(freshest[11:]) <= 6
    assert len(reasons) <= num_workers * 100 / 11 + num_workers / 2


def test_a_worker_alone_has_nobody_to_take_turns_with() -> None:
    _, reasons = take_turns(1, updates=100, growth=0.0049)
    assert reasons == [Reason.DIVERGED] * 9


def test_turns_do_not_make_the_rule_more_patient_with_a_plateau() -> None:
    """Two groups that cross in turn have crossed as often as one that crosses alone."""
    tracker = AdaptiveSync().start()
    first, second = 1, 3
    for newest in (5, 9, 13):
        assert tracker.judge(Case(first, newest, 0.06, 1, num_all=2)).reason is Reason.DIVERGED
        assert tracker.judge(Case(second, newest + 2, 0.06, 1, num_all=2)).reason is Reason.DIVERGED
        first, second = newest, newest + 2
    assert pause(tracker, second, 3) == [Reason.BELOW] * 3 + [Reason.PLATEAU]
