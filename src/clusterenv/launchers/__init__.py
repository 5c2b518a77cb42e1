"""Recipes for starting workers somewhere, which know only the ticket and the worker command."""
