"""A GPU that is not there: tensors of ``cuda:0`` that lie in the CPU's memory.

Within `pretended` the branches for CUDA run on a CPU. A tensor on the device, `OnGPU`, holds one of
the CPU; a dispatch mode does the work on that, and refuses to mix the two devices. No kernel of
CUDA runs and there are no streams, so that neither their rounding nor their races are tested.
Autocast on CUDA does nothing. Backward passes are computed, but their devices are not looked at.
"""

import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STANDARD = "-std=c++20"


def _compiler():
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
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
FILLING = {aten.fill_, aten.masked_fill, aten.masked_fill_}


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

    def __init__(self):
        super().__init__()
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


def _require_one_device(func, tensors):
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


@cache
def load_guard():
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
def pretended():
    """Context in which there is a GPU; modules and tensors go to it by ``.to("cuda")``."""
    load_guard()
    tensor = torch.tensor

    def made(data, *, device=None, **options):
        return tensor(data, **options) if device is None else tensor(data, **options).to(device)

    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    with (
        mock.patch.object(torch.cuda, "_lazy_init"),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch, "tensor", made),
        mock.patch("embedgeo.capture.probe.without_modes", nullcontext),  # the device is one
        _Mode(),
    ):
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwritten)
