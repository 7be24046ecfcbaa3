"""A GPU that is not there: tensors of ``cuda:0`` that lie in the CPU's memory, and a count of what
is asked of them.

Within `pretended` the branches for CUDA run on a CPU. A tensor on the device, `OnGPU`, holds one of
the CPU; a dispatch mode does the work on that, refuses to mix the two devices, and counts what a
GPU would have to do. A mode is local to its thread: threads that start within the context enter one
of their own, and count together.

What is counted is an estimate. A launch is an operation that is no view: some take several kernels.
A wait is an operation whose result the host must know before it goes on: a number, a shape that
depends on values, a copy to the CPU, the status of linear algebra, a stream that is waited for.
Copies to the device are counted beside: those that are not ``non_blocking`` wait for what was
launched before, too.

No kernel of CUDA runs and there are no streams, so that neither their rounding nor their races are
tested. Autocast on CUDA does nothing. Backward passes are computed, but their devices are not
looked at.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import embedgeo

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STANDARD = "-std=c++20"


def _compiler() -> str | None:
    """The g++ there is, if it works: too old for torch, or a stub that asks for an installation, it
    is none.
    """
    found = shutil.which("g++")
    tried = [found, STANDARD, "-fsyntax-only", "-x", "c++", os.devnull]
    return (
        found
        if found and not subprocess.run(tried, capture_output=True, check=False).returncode
        else None
    )


COMPILER = _compiler()

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
const Device gpu(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return gpu; }
  Device exchangeDevice(Device) const override { return gpu; }
};
namespace { C10_REGISTER_GUARD_IMPL(CUDA, Guard); }
"""
"""The device guard of CUDA that torch asks for on indexing and on moving, which its builds for CPUs
have not.
"""

aten = torch.ops.aten
PACKAGE = str(Path(embedgeo.__file__).parent)
WITHOUT_LAUNCH = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
}
"""Operations that launch nothing, beside views."""
LINEAR_ALGEBRA = {
    aten._linalg_check_errors,
    aten._linalg_eigh,
    aten._linalg_svd,
    aten.linalg_eig,
    aten.linalg_lstsq,
    aten.linalg_qr,
}
"""Operations after which torch has a look at their status, on the host."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
FILLING = {aten.fill_, aten.masked_fill, aten.masked_fill_}
VALUES_ON_HOST = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Asked(NamedTuple):
    """Totals of what a GPU would be asked for."""

    launches: float
    waits: float
    copies: float  # to the device
    bytes_to_host: float


class Count:
    """What has been asked of the device since the last `clear`: by line of the package, and
    operation.
    """

    def __init__(self) -> None:
        self.launches, self.waits, self.copies, self.bytes_to_host = (
            Counter[str]() for _ in Asked._fields
        )
        self._lock = threading.Lock()

    def add(
        self,
        operation: object,
        *,
        launches: int = 0,
        waits: int = 0,
        copies: int = 0,
        bytes_to_host: int = 0,
    ) -> None:
        place = f"{_line()} {operation}"
        with self._lock:
            self.launches[place] += launches
            self.waits[place] += waits
            self.copies[place] += copies
            self.bytes_to_host[place] += bytes_to_host

    def clear(self) -> None:
        with self._lock:
            for each in (self.launches, self.waits, self.copies, self.bytes_to_host):
                each.clear()

    def asked(self) -> Asked:
        """The totals."""
        with self._lock:
            return Asked(
                *(
                    each.total()
                    for each in (self.launches, self.waits, self.copies, self.bytes_to_host)
                )
            )


def _line() -> str:
    """The innermost line of the package that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(PACKAGE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class OnGPU(Tensor):
    """A tensor on the pretended device; ``memory`` is where it lies."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory):
        size = {
            "strides": memory.stride(),
            "storage_offset": memory.storage_offset(),
            "dtype": memory.dtype,
        }
        self = Tensor._make_wrapper_subclass(
            cls, memory.shape, **size, device="cpu", dispatch_device=True
        )
        self.memory = memory
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on the pretended device, outside of its context")

    def __repr__(self, **options):
        return f"OnGPU({self.memory!r})"

    def tolist(self):
        return self.cpu().tolist()

    def new_tensor(self, data, *, dtype=None, device=None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def backward(self, *args, **kwargs):
        """Gradients, for which autograd takes all tensors for such of the CPU: builds for CPUs have
        no streams.
        """
        mode = _running.mode
        mode.is_backward = True
        try:
            super().backward(*args, **kwargs)
        finally:
            mode.is_backward = False


_running = threading.local()


class _Mode(TorchDispatchMode):
    """Does in one thread what is asked of the pretended device, on the CPU."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count
        self.is_backward = False

    def __enter__(self):
        _running.mode = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CPU if self.is_backward else GPU
        kwargs = kwargs or {}
        tensors = []

        def on_cpu(value):
            if isinstance(value, Tensor):
                tensors.append(value)
                return value.memory if isinstance(value, OnGPU) else value
            return CPU if isinstance(value, torch.device) else value

        on_cpu_args = _map(on_cpu, args)
        on_cpu_kwargs = {name: _map(on_cpu, value) for name, value in kwargs.items()}
        num_on_gpu = sum(isinstance(each, OnGPU) for each in tensors)
        asked = kwargs.get("device")
        if not num_on_gpu and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        kind = func.overloadpacket
        is_copy = kind in (aten._to_copy, aten.copy_)
        if num_on_gpu < len(tensors) and not (is_copy or self.is_backward):
            _require_one_device(func, tensors)
        result = _compute(func, on_cpu_args, on_cpu_kwargs)
        is_other_view = torch.Tag.inplace_view in func.tags
        if is_other_view:
            with torch._C._DisableTorchDispatch():  # the sizes that the tensor itself has
                func(*args, **kwargs)
        stays = self.is_backward or asked is None or asked.type == "cuda"
        if kind is aten.copy_:
            stays = isinstance(args[0], OnGPU)
        if is_copy and stays != isinstance(tensors[-1], OnGPU):
            moved = tensors[-1].nbytes
            blocks = bool(moved) and not (kwargs.get("non_blocking") or args[2:] == (True,))
            counted = {"copies": blocks} if stays else {"waits": blocks, "bytes_to_host": moved}
            self.count.add(func, launches=bool(moved), **counted)
        else:
            is_free = func.is_view or is_other_view or kind in WITHOUT_LAUNCH
            self.count.add(func, launches=not is_free, waits=_must_wait(func, args, kwargs))
        given = {id(each.memory if isinstance(each, OnGPU) else each): each for each in tensors}

        def on_device(value):
            if not isinstance(value, Tensor):
                return value
            before = given.get(id(value))
            if before is None:
                return OnGPU(value) if stays else value
            if before.shape != value.shape:
                raise NotImplementedError(
                    f"{func} gives a tensor on the pretended device another size in place"
                )
            return before

        return _map(on_device, result)


def _map(change, value):
    """The value, or each of those in lists and tuples, changed."""
    return (
        type(value)([_map(change, each) for each in value])
        if isinstance(value, list | tuple)
        else change(value)
    )


def _require_one_device(func, tensors) -> None:
    """Raise RuntimeError as CUDA does; numbers of the CPU may stand beside tensors of the GPU."""
    may_be_number = torch.Tag.pointwise in func.tags or func.overloadpacket in INDEXING | FILLING
    if func._schema.is_mutable and not isinstance(tensors[0], OnGPU):
        raise RuntimeError(
            f"{func}: what is on {GPU} cannot be written to a tensor that is on the CPU"
        )
    for each in tensors:
        if not isinstance(each, OnGPU) and not (may_be_number and each.ndim == 0):
            raise RuntimeError(
                f"{func}: a tensor of shape {tuple(each.shape)} is on the CPU, others on {GPU}"
            )


def _compute(func, args, kwargs):
    """What an operation gives on the CPU, which knows no product of two dtypes."""
    if func is aten.mm.dtype:
        left, right, dtype = args
        return left.to(dtype) @ right.to(dtype)
    return func(*args, **kwargs)


def _must_wait(func, args, kwargs) -> bool:
    """Tell if the host waits for the result of an operation, or for its shape."""
    kind = func.overloadpacket
    if kind in INDEXING:
        masks = [
            each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)
        ]
        is_fill = len(args) > 2 and len(args[1]) == 1 and not isinstance(args[2], OnGPU)
        return bool(masks) and not is_fill
    if kind is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return kind in LINEAR_ALGEBRA or not VALUES_ON_HOST.isdisjoint(func.tags)


@cache
def load_guard() -> None:
    """Compile and load the `GUARD`, once a process, in which it stays; before the first backward
    pass.
    """
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        options = [
            STANDARD,
            "-shared",
            "-fPIC",
            "-w",
            f"-I{torch_folder / 'include'}",
            "-x",
            "c++",
            "-",
            "-x",
            "none",
        ]
        linked = [f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(library)]
        subprocess.run([str(COMPILER), *options, *linked], input=GUARD, text=True, check=True)
        torch.ops.load_library(library)


@contextmanager
def pretended() -> Iterator[Count]:
    """Context in which there is a GPU, and its `Count`; modules and tensors go to it by
    ``.to("cuda")``.
    """
    load_guard()
    count = Count()
    tensor, run = torch.tensor, threading.Thread.run

    def made(data, *, device=None, **options):
        return tensor(data, **options) if device is None else tensor(data, **options).to(device)

    def run_in_mode(thread):
        with _Mode(count):
            run(thread)

    def wait(*_):
        count.add("synchronize", waits=1)

    def stream(*_):
        return SimpleNamespace(wait_stream=lambda _: None, synchronize=wait)

    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for name, replaced in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "Stream": stream,
            "current_stream": stream,
            "stream": nullcontext,
            "synchronize": wait,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replaced))
        stack.enter_context(mock.patch.object(torch, "tensor", made))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_in_mode))
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwritten)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(_Mode(count))
        yield count
