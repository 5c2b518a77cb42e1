"""`make demo`: PPO learns to land on the moon within two minutes, and you can watch it."""
