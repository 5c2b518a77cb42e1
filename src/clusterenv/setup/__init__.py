"""Turns a user's arguments into running workers."""
