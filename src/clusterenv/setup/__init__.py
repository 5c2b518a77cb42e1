"""From a user's arguments to running workers."""
