"""Recipes for starting workers somewhere. They know only the ticket and the worker command."""
