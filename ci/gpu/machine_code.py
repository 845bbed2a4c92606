"""Why NVRTC gives other bits than nvcc: what each makes of the floating-point arithmetic of the TileLang kernel hd512.

    PYTHONPATH=. python3 ci/gpu/machine_code.py OUT

writes OUT/machine_code.json.  Needs TileLang, nvcc and cuobjdump, and no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from pairs import write

from oracle.kernels.ahead_of_time import ARCH
from oracle.kernels.tilelang_families import FAMILIES

FAST = "--use_fast_math"
FLOATING = ("F2FP", "FADD", "FFMA", "FMUL", "FMNMX", "FSETP", "FSEL", "FCHK", "HGMMA", "MUFU", "I2F", "F2F")  # first letters


def source() -> str:
    """The CUDA source of hd512 for pages of 64, as TileLang writes it."""
    import tilelang
    from tilelang import tvm

    from oracle.kernels.tilelang_body import pass_configs, prefill

    target = tvm.target.Target({"kind": "cuda", "arch": ARCH})
    with tvm.transform.PassContext(opt_level=3, config=pass_configs()), target:
        text: str = tilelang.lower(prefill(FAMILIES["hd512"], 64), target=target).kernel_source
    return text


def by_nvcc(text: str, folder: Path, *flags: str) -> bytes:
    """What nvcc makes of it with the flags of `oracle build-kernels` but for fast arithmetic."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    (folder / "kernel.cu").write_text(text)
    made = folder / "kernel.cubin"
    target = ("-gencode", f"arch=compute_{ARCH.removeprefix('sm_')},code={ARCH}")
    include = (f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}")
    command = ["nvcc", "-O3", "-std=c++20", "-w", "-cubin", *flags, *target, *include, str(folder / "kernel.cu"), "-o", str(made)]
    subprocess.run(command, check=True)
    return made.read_bytes()


def by_nvrtc(text: str, folder: Path, *flags: str) -> bytes:
    """What NVRTC makes of it as TileLang calls it, with further flags."""
    from tilelang.contrib.nvrtc import compile_cuda
    from tilelang.env import CUDA_HOME, CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
    from tilelang.jit.adapter.nvrtc.include_paths import discover_cuda_include_paths

    include = (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, *discover_cuda_include_paths(CUDA_HOME or "/usr/local/cuda"))
    options = [*(f"-I{path}" for path in include), "-D__CUDACC_VER_MAJOR__=13", *flags]
    return bytes(compile_cuda(text, "cubin", int(re.sub(r"\D", "", ARCH)), options, verbose=True))


def floating_point(cubin: bytes, folder: Path) -> Counter[str]:
    """How many instructions of each name, among those of floating-point arithmetic, the machine code has."""
    path = folder / "some.cubin"
    path.write_bytes(cubin)
    text = subprocess.run(["cuobjdump", "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", text)
    return Counter(name for name in names if name.startswith(FLOATING))


def main() -> None:
    """Writes what each way of compiling gives, and in what it differs from nvcc with fast arithmetic."""
    text, found = source(), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, make, flags in (
            ("nvcc, fast arithmetic", by_nvcc, [FAST]),
            ("nvcc", by_nvcc, []),
            ("NVRTC, fast arithmetic", by_nvrtc, [FAST]),
            ("NVRTC", by_nvrtc, []),
        ):
            found[name] = floating_point(make(text, folder, *flags), folder)
            print(name, dict(found[name]), flush=True)
    wanted = found["nvcc, fast arithmetic"]
    report: dict[str, Any] = {"versions": _versions()}
    report["found"] = {
        name: {
            "floating_point": sum(counts.values()),
            "other_than_nvcc_fast": {n: counts[n] - wanted[n] for n in sorted({*counts, *wanted}) if counts[n] != wanted[n]},
        }
        for name, counts in found.items()
    }
    write(report, Path(sys.argv[1]) / "machine_code.json")


def _versions() -> dict[str, str]:
    import tilelang
    from tilelang.contrib.nvrtc import get_nvrtc_version

    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "tilelang": tilelang.__version__,
        "nvcc": re.findall(r"V([\d.]+)", said)[-1],
        "nvrtc": ".".join(map(str, get_nvrtc_version())),
        "command": "PYTHONPATH=. python3 ci/gpu/machine_code.py OUT",
    }


if __name__ == "__main__":
    main()
