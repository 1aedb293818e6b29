"""What the machine under a training run can do: dtype, compiler, matmul peak, memory."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path
from typing import Literal

import torch

from loopwise.errors import ConfigError

DtypeName = Literal["auto", "bf16", "fp32"]
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "avx10_2")


def pick_dtype(name: DtypeName, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to compute in, and one line that says why.

    ``auto`` takes bfloat16 only where the hardware multiplies it natively; elsewhere on a CPU it is
    many times slower than float32.
    """
    native = has_native_bf16(device)
    if name == "fp32":
        return torch.float32, "float32, as asked"
    if name == "bf16":
        why = "as asked" if native else "as asked; this machine has no bfloat16 units: slow"
        return torch.bfloat16, f"bfloat16, {why}"
    if native:
        return torch.bfloat16, "bfloat16: the machine multiplies it natively"
    return torch.float32, "float32: the machine has no bfloat16 units"


def has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(unit, False) for unit in _BF16_UNITS)


def pick_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU.

    Raises:
        ConfigError: a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as err:
        reason = str(err).splitlines()[0]
        raise ConfigError(f"device {name!r} is not available ({reason}); use cpu or auto") from None
    return device


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has what it needs here: a C++ compiler, or Triton on a GPU."""
    if device.type == "cuda":
        return True
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.3) -> float:
    """Measured FLOP/s of a large matrix product in ``dtype``: the yardstick of a training run."""
    a, b = torch.randn(4096, 1024), torch.randn(1024, 2048)
    a, b = a.to(device, dtype), b.to(device, dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or best == 0.0:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * a.shape[0] * a.shape[1] * b.shape[1] / (time.perf_counter() - start))
    return best


def free_memory_gib(device: torch.device) -> float | None:
    """Memory a new run can have, GiB, swap included; None where the machine does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 1024**3
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return (kib["MemAvailable"] + kib["SwapFree"]) / 1024**2
    except (OSError, ValueError, KeyError, IndexError):  # not Linux
        pass
    try:  # all there is, free or not
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3
    except (OSError, ValueError):
        return None


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory this process has held so far, GiB (1024^3)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1024**3
    try:  # ru_maxrss would start at what the parent process held
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024**2
    except (OSError, IndexError):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
