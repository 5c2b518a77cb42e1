"""Tests whether a vector environment keeps Gymnasium's laws, and whether a training script survives losing workers.

`check_vector_env` works for any vector environment, not only ours, and needs no test framework.
"""

from clusterenv.testing.check import LAWS, check_vector_env
from clusterenv.testing.report import LawsBroken, Report, Verdict

__all__ = ["LAWS", "LawsBroken", "Report", "Verdict", "check_vector_env"]
