"""Checks, before anything is queued, that workers can start, reach the head and run an environment."""
