"""The compiled kernel of decode attention: built once with the machine's C compiler, then cached.

Without a compiler, or on a GPU, the engine does the same with tensor operations; it says which.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from loopwise.config import cache_root

_SOURCE = "decode_attention.c"
# What lets sums over a head vectorise. Not -ffast-math: a library linked with it turns denormal
# numbers off for the whole process.
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_DTYPES = (torch.float32, torch.bfloat16)


def can_fuse(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernel serves such pools here."""
    return device.type == "cpu" and dtype in _DTYPES and _library() is not None


def decode_attention(
    q: Tensor, key_pool: Tensor, value_pool: Tensor, read: Tensor, bias: Tensor
) -> Tensor:
    """Attention of single rows.

    Args:
        q: ``(rows, n_kv_heads, shared, head_dim)``, dtype of the pools.
        key_pool, value_pool: contiguous, of ``head_dim`` per head of an entry.
        read: ``(rows * n_kv_heads * seen,)`` int64, heads of entries.
        bias: ``(rows, seen)`` float32, 0 or -inf; what a row may not read comes last.
    Returns:
        Like ``q``.
    Raises:
        MemoryError: no room for the weights of one row.
    """
    library = _library()
    assert library is not None, "ask can_fuse first"
    rows, n_kv, shared, head_dim = q.shape
    asked = q.float().contiguous()
    out = torch.empty_like(asked)
    failed = library.decode_attention(
        asked.data_ptr(),
        out.data_ptr(),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        int(key_pool.dtype == torch.bfloat16),
        read.data_ptr(),
        bias.data_ptr(),
        rows,
        n_kv,
        shared,
        head_dim,
        read.numel() // (rows * n_kv),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("decode attention found no room for the weights of one row")
    return out.to(q.dtype)


@cache
def _library() -> ctypes.CDLL | None:
    """The built kernel; None where it cannot be built."""
    compiler = next((c for name in ("cc", "gcc", "clang") if (c := shutil.which(name))), None)
    if compiler is None:
        return None
    source = (resources.files("loopwise.engine") / _SOURCE).read_text(encoding="utf-8")
    identity = "\n".join((source, *_FLAGS, compiler, platform.platform(), _cpu()))
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    built = cache_root() / "kernels" / f"{name}.so"
    try:
        if not built.exists():
            _build(compiler, source, built)
        library = ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.decode_attention.argtypes = (
        *[pointer] * 4,
        ctypes.c_int,
        *[pointer] * 2,
        *[long] * 5,
        ctypes.c_int,
    )
    library.decode_attention.restype = ctypes.c_int
    return library


def _build(compiler: str, source: str, built: Path) -> None:
    """Compile aside and move: two processes may do it at once."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as aside:
        code, made = Path(aside, _SOURCE), Path(aside, "kernel.so")
        code.write_text(source, encoding="utf-8")
        command = [compiler, *_FLAGS, "-shared", "-fPIC", str(code), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(made, built)


def _cpu() -> str:
    """What ``-march=native`` depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
