"""The scripts of docs/tutorial.md: a plain Gymnasium PPO, and what becomes of it in four steps."""
