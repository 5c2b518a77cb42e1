"""Evaluations: a table of episodes, where it is kept while it is made, and what it was made with."""
