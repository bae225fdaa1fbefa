"""`Compilers`: processes that compile kernels for this one, each for one of its threads.

In one process, compiling on many threads is slow: nearly all of it runs without Python's lock, but asks for it again
and again. All that comes back is that a kernel is on disk, where Triton finds it.
"""

import hashlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
from triton import knobs
from triton.runtime.cache import triton_key

from pagemill.log import get_logger
from pagemill.model.kernels.triton.kernel_order import Answer, CompilerSpec, KernelOrder
from pagemill.utils.processes import LENGTH, Child

logger = get_logger(__name__)

ENTRY = "pagemill.model.kernels.triton.compiler_process:serve"
OURS = "pagemill."
"""How the modules of our kernels begin."""
LIMIT_S = 120.0
"""For one kernel."""


class Compiler:
    """A process, which the thread that started it gives orders, one after the other. It ends with this process, and
    where the system can do so with the thread."""

    def __init__(self) -> None:
        """Raises OSError where the machine has no more processes or files, and RuntimeError without more threads."""
        reader, self._orders = os.pipe()
        try:
            spec = CompilerSpec(reader, knobs.cache.dir, triton_key())
            self._child = Child(ENTRY, "pagemill: compiler", msgspec.msgpack.encode(spec), [reader])
        except BaseException:
            os.close(self._orders)
            raise
        finally:
            os.close(reader)

    def compile(self, order: KernelOrder) -> str | None:
        """Put a kernel on disk; why not. Raises OSError and EOFError where the process is gone, or takes too long."""
        message = msgspec.msgpack.encode(order)
        message = LENGTH.pack(len(message)) + message
        while message:
            message = message[os.write(self._orders, message) :]
        answer = self._child.report(LIMIT_S)
        if answer is None:
            raise EOFError(f"nothing came in {LIMIT_S:.0f} s")
        return msgspec.msgpack.decode(answer, type=Answer).problem

    def kill(self) -> None:
        """End the compiling process, while a thread may wait for it: what it has begun is lost."""
        self._child.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the compiling process; what it has begun is lost."""
        os.close(self._orders)
        self._child.kill()


class Compilers:
    """One for each thread that compiles, from when it first has something to compile."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[Compiler] = []
        self._killed = False

    def start(self) -> None:
        """That of this thread. Where it cannot be started, the thread compiles by itself."""
        if not hasattr(self._of_thread, "compiler"):
            self._of_thread.compiler = None
            try:
                compiler = Compiler()
            except Exception as error:  # whatever it is, the thread has kernels to compile that others wait for
                logger.debug("no process to compile kernels: %s", error)
                return
            self._of_thread.compiler = compiler
            self._all.append(compiler)
            if self._killed:
                compiler.kill()

    def kill(self) -> None:
        """Have no more compiled: threads that wait for their process do not wait any longer."""
        self._killed = True
        for compiler in tuple(self._all):
            compiler.kill()

    def compile(self, order: KernelOrder) -> None:
        """Have this thread's process put a kernel on disk. If it does not, Triton will compile the kernel here, and say
        what is wrong with it."""
        self.start()
        compiler = self._of_thread.compiler
        if compiler is None:
            return
        try:
            problem = compiler.compile(order)
        except Exception as error:
            self._of_thread.compiler = None
            problem = str(error)
        if problem is not None:
            logger.debug("%s is compiled by this process: %s", order.function, problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all; the threads have ended."""
        for compiler in self._all:
            compiler.close()


def order_of(kernel: Any, compile_fn: Callable[[], Any], key: str) -> KernelOrder | None:
    """What another process needs to compile a kernel as Triton's `compile_fn` does; `key` is Triton's, of the kernel.
    None for one that is not ours, whose module may do what it likes when it is imported, for one that is not found by
    the name of its function, or whose constants are not plain; and where the compiler is to do more than compile."""
    if knobs.compilation.always_compile or knobs.runtime.add_stages_inspection_hook is not None:
        return None
    module, name = getattr(kernel, "__module__", ""), getattr(kernel, "__name__", "")
    if not module.startswith(OURS) or getattr(sys.modules.get(module), name, None) is not kernel:
        return None
    given = inspect.getclosurevars(compile_fn).nonlocals
    if not given.keys() >= {"src", "target", "options"}:
        return None
    source, target = given["src"], given["target"]
    order = KernelOrder(
        module,
        name,
        hashlib.sha256(key.encode()).hexdigest(),
        source.signature,
        list(source.constants.items()),
        list(source.attrs.items()),
        vars(given["options"]),
        (target.backend, target.arch, target.warp_size),
    )
    try:
        return msgspec.convert(msgspec.to_builtins(order), KernelOrder)
    except (TypeError, msgspec.ValidationError) as error:
        logger.debug("%s is compiled by this process: %s", name, error)
        return None
