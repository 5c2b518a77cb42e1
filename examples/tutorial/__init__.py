"""The scripts of docs/tutorials/four-steps.md: a plain Gymnasium PPO, and what becomes of it in four steps."""
