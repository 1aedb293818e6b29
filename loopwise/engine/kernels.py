"""The compiled kernel of attention: built once with the machine's C compiler, then cached.

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    written: Tensor,
    read: Tensor,
    sizes: Tensor,
    span: Tensor,
    out: Tensor,
) -> None:
    """Write the entries of all rows, then attend for the first of them.

    Those come in runs that read the same entries, each row a part of them.

    Args:
        q: ``(rows, n_heads, head_dim)``, dtype of the pools, as all that is no index.
        k, v: ``(rows, n_kv_heads, head_dim)``.
        key_pool, value_pool: contiguous, ``(entries, n_kv_heads, head_dim)``.
        written: the entry of each row, ``(rows,)`` int64.
        read: entries, ``(runs * seen,)`` int64.
        sizes: rows of each run, ``(runs,)`` int64.
        span: first and end of what each of them reads of its run's, ``(2, rows of runs)`` int64,
            flat; at least one entry each.
        out: like ``q``, contiguous; the rows of runs are written to.
    Raises:
        MemoryError: no room for the weights of a few rows.
    """
    library = _library()
    assert library is not None, "ask can_fuse first"
    # The kernel takes all for what the pools are, and would read past the end of narrower values.
    assert q.dtype == k.dtype == v.dtype == key_pool.dtype, "one dtype for queries and pools"
    rows, n_kv, head_dim = k.shape
    runs = len(sizes)
    q, k, v = (_whole_rows(x) for x in (q, k, v))
    failed = library.decode_attention(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        out.data_ptr(),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        int(key_pool.dtype == torch.bfloat16),
        written.data_ptr(),
        read.data_ptr(),
        sizes.data_ptr(),
        span.data_ptr(),
        span[len(span) // 2 :].data_ptr(),
        rows,
        runs,
        n_kv,
        q.shape[1] // n_kv,
        head_dim,
        read.numel() // runs,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("decode attention found no room for the weights of a few rows")


def _whole_rows(x: Tensor) -> Tensor:
    """``x (rows, heads, head_dim)`` with contiguous rows."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


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
    pointer, long, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.decode_attention.argtypes = (
        *(pointer, long, pointer, long, pointer, long, pointer),
        *(pointer, pointer, whole),
        *[pointer] * 5,
        *[long] * 6,
        whole,
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
