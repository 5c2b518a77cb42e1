"""Runnable examples, one file each."""
