"""Dependent launch in Gluon, whose language is not Triton's: what launch.py says, for kernels that say which of their
warps do what. Knows no kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    """With dependent launch: the next kernel may start."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """With dependent launch: wait until what earlier kernels wrote is there. Each group of warps waits for itself."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
