"""Import this before any Triton kernel: on a machine without a GPU, they run in Triton's interpreter from then on."""

import dataclasses
import functools
import math
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _accept_numpy_arrays_as_bounds() -> None:
    """Loop bounds that a kernel loads are arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    from triton.runtime import interpreter  # deferred: only where it is used

    patch = interpreter._patch_lang_tensor

    def patch_and_fix(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_fix


def _multiply_bfloat16() -> None:
    """NumPy has no bfloat16: the interpreter keeps its bits as integers, and its `dot` multiplies these."""
    import triton.language as tl  # deferred: only where it is used
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widen_and_multiply(self: Any, a: Any, b: Any, *args: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return multiply(self, *wide, *args)

    builder.create_dot = widen_and_multiply


def _cast_bfloat16_by_its_bits() -> None:
    """They are the upper half of a float's: the interpreter takes each apart and puts it together again."""
    import numpy as np  # deferred: only where it is used
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def shift(self: Any, value: Any, kind: Any) -> Any:
        of = value.dtype.scalar
        to = kind.scalar
        if of == tl.bfloat16 and to == tl.float32:
            return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), to)
        if of == tl.float32 and to == tl.bfloat16:
            return interpreter.TensorHandle((value.data.view(np.uint32) >> 16).astype(np.uint16), to)
        return cast(self, value, kind)

    builder.cast_impl = shift


def _find_the_largest_at_once() -> None:
    """What a kernel combines by a function of its own is combined one by one: seconds for the largest of a row."""
    import numpy as np  # deferred: only where it is used
    from triton.runtime import interpreter

    from pagemill.model.kernels.triton.limits import larger

    combine = interpreter.ReduceOps.apply_impl

    def apply(self: Any, values: Any) -> Any:
        if self.combine_fn is not larger:
            return combine(self, values)
        found = np.maximum.reduce(values[0].handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, values[0].dtype)

    interpreter.ReduceOps.apply_impl = apply


def _patch_the_language_once() -> None:
    """The interpreter replaces triton.language's functions at every launch and again at every call of a device
    function, which took a good part of the tests' time. Here nothing else uses the language: what is replaced stays."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    seen = set()

    class Kept:
        def restore(self: Any) -> None: ...

    def patch_once(fn: Any) -> Kept:
        if fn not in seen:
            seen.add(fn)
            patch(fn)
        return Kept()

    interpreter._patch_lang = patch_once


def _share_shapes() -> None:
    """Every value of a kernel makes its shape anew, as a tuple of constants with a name, and so does every type:
    another part. Nothing changes a shape."""
    import triton.language as tl

    core = tl.core
    make = core.block_type.__init__
    made: dict[Any, dict[str, Any]] = {}

    @functools.cache
    def constants(shape: tuple[int, ...]) -> Any:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(tuple(type.shape) if type.is_block() else ())

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.__dict__.update(made[key], element_ty=element_ty)

    core.tensor.__init__ = init
    core.block_type.__init__ = init_type


def _look_numpys_types_up() -> None:
    """They are found in a table that is made anew each time."""
    import triton.language as tl
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return find(scalar)
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = look_up


def _omit_what_only_debugging_asserts() -> None:
    """Integers are added, subtracted and multiplied a second time with 64 bits, for an assertion that is left out
    unless kernels are debugged."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if DEVICE == "cpu":
    _patch_the_language_once()
    _share_shapes()
    _look_numpys_types_up()
    _omit_what_only_debugging_asserts()
    _accept_numpy_arrays_as_bounds()
    _cast_bfloat16_by_its_bits()
    _multiply_bfloat16()
    _find_the_largest_at_once()
