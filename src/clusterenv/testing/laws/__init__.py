"""The laws, by topic. Each is a function that raises Broken or NotApplicable; its docstring is the law."""
