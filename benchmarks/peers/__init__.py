"""Comparisons with other libraries and with the bare limits: `step` and `rollout`."""
