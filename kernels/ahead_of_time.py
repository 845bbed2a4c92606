"""Builds the TileLang kernels into shared libraries with a C interface, and loads them where TileLang and nvcc are missing.

A library holds one family's kernel for one page size.  TileLang writes the CUDA source, nvcc compiles it with the flags that
TileLang's own just-in-time build uses; no GPU is needed for that.  The library says what it was built from, so that a stale
one is refused, and loading it takes ctypes and the CUDA driver alone.

TileLang's launcher for C libraries lets a kernel start while the one before it in the stream still runs (programmatic stream
serialisation), although its kernels never wait for that one: should that one signal early, its results might be read before
they are written.  The libraries built here launch in plain stream order.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from oracle.kernels.tilelang_families import AnyFamily

ARCH = "sm_90a"  # the only target: wgmma and setmaxnreg exist there alone
_EARLY = """		cudaLaunchAttribute attribute[1];
		attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
		attribute[0].val.programmaticStreamSerializationAllowed = 1;
		config.attrs = attribute;
		config.numAttrs = 1;
"""
_IN_ORDER = """		config.attrs = nullptr;
		config.numAttrs = 0;
"""
_TYPES: dict[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_float, "pointer": ctypes.c_void_p}


class BuildError(RuntimeError):
    """A library could not be built, or is not one that this program built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A loaded library."""

    path: Path
    family: AnyFamily
    page_size: int
    arguments: tuple[tuple[str, str], ...]  # name and type ("int", "float", "pointer") of each argument of the launch
    handle: ctypes.CDLL

    def prepare(self) -> None:
        """Readies the kernel on the current device; once for each device, before the first launch.

        Raises: RuntimeError with the driver's message.
        """
        if self.handle.init():
            raise RuntimeError(f"{self.path}: got {self._message()}; expected a GPU of compute capability 9.0")

    def launch(self, values: Mapping[str, Tensor | int | float], stream: int) -> None:
        """Queues one run on `stream` (a cudaStream_t) of the current device; `values` has every argument by name.

        Raises: RuntimeError with the driver's message.
        """
        given = (values[name] for name, _ in self.arguments)
        if self.handle.call(*(x.data_ptr() if isinstance(x, Tensor) else x for x in given), stream):
            raise RuntimeError(f"{self.path}: the launch failed: {self._message()}")

    def _message(self) -> str:
        said: bytes = self.handle.get_last_error()
        return said.decode(errors="replace")


def file_name(family: AnyFamily, page_size: int) -> str:
    """The name of a library's file in its folder."""
    return f"{family.name}-page{page_size}-{ARCH}.so"


def fingerprint(family: AnyFamily, page_size: int) -> str:
    """What a library is built from: the family's row, the page size and the generator's source, as 16 hex digits."""
    generator = Path(__file__).with_name(f"{family.generator}.py").read_bytes()
    return hashlib.sha256(repr((family, page_size, ARCH)).encode() + generator).hexdigest()[:16]


def unavailable() -> str:
    """Why nothing can be built here, or "" where it can."""
    try:
        import tilelang  # noqa: F401
    except ImportError:
        return "tilelang is not installed; pip install tilelang==0.1.15"
    return "" if shutil.which("nvcc") else "nvcc is not on the PATH; install the CUDA toolkit, version 12.8 or later"


def source(family: AnyFamily, page_size: int) -> tuple[str, list[tuple[str, str]]]:
    """The CUDA source of a library, its launcher included, and the launcher's arguments but for the stream.

    Raises: BuildError where TileLang's launcher is not the one that this module knows how to mend.
    """
    import tilelang
    from tilelang import tvm
    from tilelang.jit.adapter.wrapper import TLCUDASourceWrapper

    generator = importlib.import_module(f"oracle.kernels.{family.generator}")
    function, configs = generator.prefill(family, page_size), generator.pass_configs()
    target = tvm.target.Target({"kind": "cuda", "arch": ARCH})
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        lowered = tilelang.lower(function, target=target)
    module = tvm.IRModule({function.attrs["global_symbol"]: function})
    code: str = TLCUDASourceWrapper(module, lowered.kernel_source, target, lowered.device_mod, lowered.host_mod, configs).lib_code
    head = re.findall(r'extern "C" TL_EXPORT int call\((.*), cudaStream_t stream=cudaStreamDefault\) \{', code)
    if code.count(_EARLY) != 1 or code.count("cudaLaunchKernelEx") != 1 or len(head) != 1:
        raise BuildError(
            f"kernels/ahead_of_time.py {family.name}: got a launcher of another form from tilelang {tilelang.__version__}; "
            "expected that of 0.1.15; pip install tilelang==0.1.15"
        )
    arguments = []
    for argument in head[0].split(", "):
        kind, name = argument.rsplit(" ", 1)
        arguments.append((name, "pointer" if "*" in kind else kind))
    return code.replace(_EARLY, _IN_ORDER), arguments


def build(family: AnyFamily, page_size: int, folder: Path) -> Path:
    """Builds one library into `folder`, which is made where missing, and returns its path.

    Raises: BuildError where TileLang or nvcc is missing, or nvcc fails.
    """
    if why := unavailable():
        raise BuildError(f"kernels/ahead_of_time.py {family.name}: {why}")
    import tilelang
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    code, arguments = source(family, page_size)
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    about = {
        "family": family.name,
        "page_size": page_size,
        "fingerprint": fingerprint(family, page_size),
        "arguments": arguments,
        "tilelang": tilelang.__version__,
        "nvcc": re.findall(r"V([\d.]+)", nvcc)[-1],
    }
    said = json.dumps(json.dumps(about))  # a JSON string literal is a C string literal: names and numbers are ASCII
    number = ARCH.removeprefix("sm_")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(family, page_size)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # beside the library, which is moved into place whole
        text, made = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.so"
        text.write_text(f'{code}\nextern "C" TL_EXPORT const char* describe() {{\n    return {said};\n}}\n')
        command = [
            *("nvcc", "-O3", "-std=c++20", "--use_fast_math", "-lineinfo", "-w"),
            *("-gencode", f"arch=compute_{number},code={ARCH}"),
            *("--shared", "--compiler-options", "-fPIC"),
            *(f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}", str(text), "-o", str(made)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise BuildError(f"kernels/ahead_of_time.py {family.name}: nvcc failed: {said}")
        made.replace(path)
    return path


def load(folder: Path, family: AnyFamily, page_size: int) -> Library:
    """The library of `family` and `page_size` in `folder`.  Needs no GPU; `prepare` does.

    Raises: BuildError where there is none, or one built from another row or another generator.
    """
    path = folder / file_name(family, page_size)
    try:
        handle = ctypes.CDLL(str(path))
        handle.describe.restype = handle.get_last_error.restype = ctypes.c_char_p
        about = json.loads(handle.describe())
    except (OSError, AttributeError, ValueError) as error:
        raise BuildError(f"{path}: got {error}; expected a library; oracle build-kernels --arch {ARCH}") from error
    if about["fingerprint"] != (expected := fingerprint(family, page_size)):
        raise BuildError(
            f"{path}: got a library built from {about['fingerprint']}, expected {expected}; oracle build-kernels --arch {ARCH}"
        )
    arguments = tuple((name, kind) for name, kind in about["arguments"])
    handle.call.argtypes = [*(_TYPES[kind] for _, kind in arguments), ctypes.c_void_p]
    return Library(path=path, family=family, page_size=page_size, arguments=arguments, handle=handle)
