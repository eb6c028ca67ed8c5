"""Triton's interpreter, made several times faster, and silent about NaN like a device."""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


def interpret() -> None:
    """Run kernels in the interpreter in this process, if Triton was not imported yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.runtime.interpreter")
    adapt()


def adapt() -> None:
    """Patch the interpreter once, if it is there.

    Work that it repeats at every call of a kernel's function is cached. Padding rows of a batch
    hold arbitrary values: a device computes with them silently, but NumPy warns. Threads take turns,
    because a program's indices are global, and Python 3.11 parses one source at a time.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter._patch_lang, "once"):
        return
    no_changes = getattr(interpreter, "_LangPatchScope", lambda: None)
    interpreter._patch_lang = _once_a_module(
        interpreter._patch_lang, no_changes, interpreter.tl.tensor
    )
    interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)
    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.run = _in_turns(interpreter.InterpretedFunction.run)
    interpreter.InterpreterBuilder.create_dot = _product_by_rows(interpreter.TensorHandle)
    interpreter.ReduceOps.min_max = _of_any_numbers(interpreter.ReduceOps.min_max)


def _once_a_module(
    patch: Callable[[Any], Any], no_changes: Callable[[], Any], tensor: Any
) -> Callable[[Any], Any]:
    """Patch `triton.language` when a module's first kernel runs, and keep the patch."""
    modules: set[str] = set()

    def patch_lang(function: Any) -> Any:
        if function.__module__ not in modules:
            patch(function)
            # the version in Triton 3.6 fails with NumPy 2.4
            tensor.__index__ = lambda self: self.handle.data.item()
            modules.add(function.__module__)
        return no_changes()

    patch_lang.once = True  # pyright: ignore[reportFunctionMemberAccess]
    return patch_lang


def _once_a_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the dict of types by name, because some types cannot be hashed."""
    results: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.name
        if name not in results:
            results[name] = find(dtype)
        return results[name]

    return get_np_dtype


def _product_by_rows(handle: Any) -> Callable[..., Any]:
    """Replace `tl.dot` by a product that computes a row the same at any position in a tile, like a
    GPU.

    The interpreter uses NumPy's matmul: most kernels of OpenBLAS sum a row in an order that
    depends on its position.
    """
    np = importlib.import_module("numpy")

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        whole = np.issubdtype(d.data.dtype, np.integer)
        assert whole or not {a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth} & {8}
        left, right = (np.ascontiguousarray(each.data, dtype=d.data.dtype) for each in (a, b))
        return handle(np.einsum("...ik,...kj->...ij", left, right) + d.data, d.dtype.scalar)

    return create_dot


def _silent(launch: Callable[..., None]) -> Callable[..., None]:
    np = importlib.import_module("numpy")

    def silent(*args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            launch(*args, **kwargs)

    return silent


def _in_turns(run: Callable[..., None]) -> Callable[..., None]:
    turn = threading.RLock()

    def in_turns(*args: Any, **kwargs: Any) -> None:
        with turn:
            run(*args, **kwargs)

    return in_turns


def _of_any_numbers(min_max: Callable[..., Any]) -> Callable[..., Any]:
    """Silence `nanmax` and `nanmin`, which warn about all-NaN input."""
    np = importlib.import_module("numpy")
    others = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def of_any_numbers(
        self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None
    ) -> Any:
        return min_max(self, values, others.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    return of_any_numbers
