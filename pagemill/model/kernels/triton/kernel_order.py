"""`KernelOrder`: what a kernel is compiled from, as bytes for another process of the same machine. Knows no kernel, and
imports nothing of Triton."""

from typing import Any

import msgspec

Constant = bool | int | float | str | None


class KernelOrder(msgspec.Struct, frozen=True):
    """A kernel by where its function is, and the arguments of Triton's compiler."""

    module: str
    function: str
    key: str
    """The SHA-256 of Triton's key of the kernel, by which it is found on disk: what is compiled has the same, or is
    another."""
    signature: dict[str, str]
    constants: list[tuple[tuple[int, ...], Constant]]
    """Of parameters, by their place among the arguments."""
    attributes: list[tuple[tuple[int, ...], list[tuple[str, int]]]]
    options: dict[str, Any]
    target: tuple[str, int, int]
    """Backend, compute capability, threads of a warp."""


class Answer(msgspec.Struct, frozen=True):
    """What became of an order."""

    problem: str | None
    """None: compiled, and on disk."""


class CompilerSpec(msgspec.Struct, frozen=True):
    """What a process that compiles is told at its start."""

    orders: int
    """The descriptor from which it reads orders."""
    cache_dir: str
    compiler_key: str
    """Triton's hash of its compiler, which takes long to make."""
