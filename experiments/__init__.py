"""Experiments whose results are part of the documentation."""
