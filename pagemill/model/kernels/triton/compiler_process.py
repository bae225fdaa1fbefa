"""`serve`: a process that compiles kernels for the one that started it, and leaves them in Triton's folder on disk.

It has no torch and no GPU. Whatever goes wrong is a problem that it answers with: its parent then compiles the kernel
itself, and is told by Triton what there is to tell.
"""

import hashlib
import importlib
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec

from pagemill.model.kernels.triton.absent_torch import leave_out_torch
from pagemill.model.kernels.triton.kernel_order import Answer, CompilerSpec, KernelOrder
from pagemill.utils.processes import LENGTH, Report


def serve(payload: bytes, report: Report) -> None:
    """Answer orders, one after the other, until there is no one who gives any. Prints nothing: Triton writes out what
    does not compile, and will again where it counts."""
    spec = msgspec.msgpack.decode(payload, type=CompilerSpec)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    leave_out_torch()
    _prepare(spec)
    with os.fdopen(spec.orders, "rb") as orders:
        while (order := _next(orders)) is not None:
            try:
                _compile(order)
                answer = Answer(None)
            except Exception as error:
                answer = Answer(repr(error))
            report(msgspec.msgpack.encode(answer))


def _next(orders: BinaryIO) -> KernelOrder | None:
    head = orders.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(orders.read(LENGTH.unpack(head)[0]), type=KernelOrder)


def _prepare(spec: CompilerSpec) -> None:
    from triton import knobs  # deferred, as all of Triton: not before torch is left out
    from triton.runtime import build, cache

    knobs.cache.dir = spec.cache_dir
    cache.triton_key = lambda: spec.compiler_key
    # Launchers are loaded where there is a device.
    build._load_module_from_path = lambda name, path: SimpleNamespace(launch=None)


def _compile(order: KernelOrder) -> None:
    """Raises what Triton raises, and ValueError for a kernel that would not be the one that was asked for."""
    import triton  # deferred: see _prepare
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_key

    kernel = getattr(importlib.import_module(order.module), order.function)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    attributes = {place: [list(pair) for pair in pairs] for place, pairs in order.attributes}
    source = make_source(kernel, order.signature, dict(order.constants), attributes)
    target = GPUTarget(*order.target)
    options = {name: _tuples(value) for name, value in order.options.items()}
    backend = make_backend(target)
    variables = _variables()
    key = get_cache_key(source, backend, backend.parse_options(dict(options)), variables)
    if hashlib.sha256(key.encode()).hexdigest() != order.key:
        raise ValueError(f"{order.function} would be another kernel here")
    compiled = triton.compile(source, target=target, options=options, _env_vars=variables)
    if target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher  # deferred: see _prepare

        with suppress(Exception):  # such as no compiler for C: who launches the kernel will say so
            CudaLauncher(source, compiled.metadata)


def _variables() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars  # deferred: see _prepare

    variables: dict[str, str] = get_cache_invalidating_env_vars()
    return variables


def _tuples(value: Any) -> Any:
    """As Triton has options: lists are tuples that were on their way."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
