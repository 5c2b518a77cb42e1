"""Recipes: other libraries' learners on a ClusterEnv, in short. docs/learners.md says what to install."""
