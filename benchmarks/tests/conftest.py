"""What holds for the tests in `tests/` holds here: deadlines, and nothing left behind."""

from tests.conftest import libraries_are_warm, nothing_is_left_behind, pytest_configure

__all__ = ["libraries_are_warm", "nothing_is_left_behind", "pytest_configure"]
