"""Summary: a training in plain words, whatever it reached."""

from __future__ import annotations

from examples.demo.course import SOLVED, WINDOW, Course


def summarise(course: Course, *, is_interrupted: bool = False) -> list[str]:
    """Say what was done, what was learned and what it took; a paragraph each."""
    if not course.points:
        return ["Nothing was learned yet: not one update was made."]
    last = course.points[-1]
    workers = _count(course.num_workers, "worker")
    did = (
        f"In {course.seconds:.0f} seconds {workers} flew {len(course.returns):,} times, {last.env_steps:,} steps, "
        f"and the learner learned from them in {_count(len(course.points), 'update')}: "
        f"{course.steps_per_second:,.0f} steps a second, learning included."
    )
    every = last.pulls + last.pulls_saved
    saved = (
        f"The workers chose all actions themselves, with copies of the policy. They pulled weights {last.pulls} "
        f"times, the first copies included: mostly when their copy had diverged from the newest policy by more than "
        f"{course.threshold:g} nats. After every update it would have been {every} times, so "
        f"{last.pulls_saved / max(1, every):.0%} of the pulls were saved."
    )
    return [did, _learned(course, is_interrupted), saved]


def _learned(course: Course, is_interrupted: bool) -> str:
    if len(course.returns) < 2 * WINDOW:
        return f"That is too short to learn to land: only {len(course.returns)} flights have ended."
    rose = (
        f"The mean return went from {course.first_return:.0f} (the first {WINDOW} flights) to {course.mean_return:.0f} "
        f"(the last {WINDOW})"
    )
    if course.is_solved:
        return f"{rose}. {SOLVED:.0f} counts as solved: it has learned to land."
    if is_interrupted:
        return f"{rose} when it was stopped; {SOLVED:.0f} counts as solved."
    return (
        f"{rose}; {SOLVED:.0f} counts as solved, so it was not solved in this time. A busy or small machine needs "
        "longer: try --seconds 300."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
