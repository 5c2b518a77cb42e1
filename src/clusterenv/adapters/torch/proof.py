"""Proof that a user's method does nothing but call its networks.

A fast path replaces the user's method only if comparing numbers on one batch would show every difference. That holds
when the method always computes the same thing: it reads nothing but its networks, and branches on nothing but whether
an action was given.
"""

from __future__ import annotations

import dis
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn

# What CleanRL's get_action_and_value calls on tensors and distributions. None of it has a memory.
_HARMLESS = frozenset({"sample", "log_prob", "entropy", "expand_as", "exp", "sum", "float", "squeeze", "flatten"})
_KNOWN = (torch, torch.distributions.Categorical, torch.distributions.Normal)


def is_plain(module: nn.Module, method: str, networks: frozenset[str]) -> bool:
    """Say whether a method surely computes the same function of its input at every call.

    Args:
        module: The user's.
        method: The name of the method.
        networks: The attributes it may read: submodules and parameters.
    """
    function = getattr(module, method, None)
    if (
        method in vars(module)
        or not isinstance(function, MethodType)
        or not isinstance(function.__func__, FunctionType)
    ):
        return False
    code = function.__func__.__code__
    around = function.__func__.__globals__
    known_globals = {name for name in code.co_names if any(around.get(name) is known for known in _KNOWN)}
    return (
        set(code.co_names) <= networks | _HARMLESS | known_globals
        and not code.co_freevars
        and not code.co_cellvars
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        and _count_branches(code) <= 1
        and not any(_is_hooked(module, name) for name in ("", *networks))
    )


def _count_branches(code: CodeType) -> int:
    branches = 0
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "FOR_ITER" or "BACKWARD" in name:
            return 2  # A loop: as bad as many branches.
        branches += "JUMP" in name and "IF" in name
    return branches


def _is_hooked(module: nn.Module, name: str) -> bool:
    target = getattr(module, name, None) if name else module
    return isinstance(target, nn.Module) and bool(target._forward_hooks or target._forward_pre_hooks)
