"""Builds engram._C. Everything else about the package is in pyproject.toml.

Environment:
  ENGRAM_CUDA=0|1        never / always build the CUDA kernels (default: when torch and a toolkit have CUDA)
  TORCH_CUDA_ARCH_LIST   GPU architectures (default: the visible GPUs, else what torch itself was built for)
  CUDA_HOME, MAX_JOBS    as usual for torch.utils.cpp_extension
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
TORCH_REQUIREMENT = "torch>=2.11"
STABLE_ABI = "0x020b000000000000"  # libtorch 2.11: one build runs on every torch >= 2.11


def find_torch():
    """The torch to compile against: importable, or borrowed from the environment pip installs into, or None."""
    try:
        import torch
    except ModuleNotFoundError:
        sys.path.append(sysconfig.get_path("purelib"))  # pip's isolated build hides it, but keeps sys.prefix
        try:
            import torch
        except ModuleNotFoundError:
            sys.path.pop()
            return None
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        sys.exit(f"engram: needs {TORCH_REQUIREMENT}, but torch {torch.__version__} is installed: upgrade it first")
    return torch


def find_cuda_home():
    """A CUDA toolkit with headers; a bare nvcc wrapper on PATH is not one."""
    nvcc = shutil.which("nvcc")
    around_nvcc = nvcc and Path(nvcc).resolve().parents[1]
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), around_nvcc, "/usr/local/cuda"]
    for home in filter(None, candidates):
        if (Path(home) / "include" / "cuda_runtime_api.h").exists() and (Path(home) / "bin" / "nvcc").exists():
            return str(home)
    return None


def choose_cuda(torch):
    """Whether to build the CUDA kernels; sets what cpp_extension reads from the environment."""
    wanted = os.environ.get("ENGRAM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"engram: ENGRAM_CUDA must be 0, 1 or unset, got {wanted!r}")
    home = find_cuda_home()
    sources = list(ROOT.glob("csrc/kernels/cuda/*.cu"))
    able = torch.version.cuda is not None and home is not None and bool(sources)
    if wanted == "0" or (wanted == "auto" and not able):
        return False
    if not able:
        sys.exit(
            f"engram: ENGRAM_CUDA=1 needs a CUDA build of torch and a CUDA toolkit with headers; "
            f"found torch {torch.__version__} with CUDA {torch.version.cuda}, toolkit at {home} (set CUDA_HOME), "
            f"{len(sources)} CUDA sources"
        )
    os.environ["CUDA_HOME"] = home
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        # torch's own detection raises IndexError without a GPU.
        flags = torch._C._cuda_getArchFlags().split()
        archs = sorted({int(flag[3:]) for flag in flags if flag.startswith("sm_") and flag[3:].isdigit()})
        archs = [arch for arch in archs if arch >= 80] or [80]
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(f"{arch // 10}.{arch % 10}" for arch in archs) + "+PTX"
    return True


def extension(torch, with_cuda):
    import pybind11
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sources = sorted(ROOT.glob("csrc/bindings/*.cpp")) + sorted(ROOT.glob("csrc/kernels/cpu/*.cpp"))
    defines = [f"-DTORCH_TARGET_VERSION={STABLE_ABI}", f"-DENGRAM_BUILT_WITH_TORCH={torch.__version__}"]
    cxx = ["-O3", "-std=c++20", "-fvisibility=hidden", "-g0", "-Wno-psabi"]
    nvcc = ["-O3", "-std=c++20", "-lineinfo"]
    if with_cuda:
        sources += sorted(ROOT.glob("csrc/kernels/cuda/*.cu"))
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "native").replace(";", " ")
        # USE_CUDA: the stable ABI declares the current-stream getter only with it, up to torch 2.12.
        defines += ["-DENGRAM_WITH_CUDA", "-DUSE_CUDA"]
        cxx += [f"-DENGRAM_CUDA_ARCHS={archs.replace(' ', ',')}"]
    kind = CUDAExtension if with_cuda else CppExtension
    headers = sorted(ROOT.glob("csrc/**/*.h")) + sorted(ROOT.glob("csrc/**/*.cuh"))
    return kind(
        "engram._C",
        [str(source.relative_to(ROOT)) for source in sources],
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        depends=[str(header.relative_to(ROOT)) for header in headers],
        extra_compile_args={"cxx": cxx + defines, "nvcc": nvcc + defines},
    )


torch = find_torch()
if torch is None:
    setup(setup_requires=[TORCH_REQUIREMENT])  # nothing to borrow: ask pip for one, which runs this file again
else:
    with_cuda = choose_cuda(torch)  # before cpp_extension is imported: it reads CUDA_HOME once
    from torch.utils.cpp_extension import BuildExtension

    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "the visible GPUs")
    kernels = f"CPU and CUDA kernels ({archs})" if with_cuda else "CPU kernels"
    print(f"engram: building {kernels} against torch {torch.__version__}", file=sys.stderr)
    setup(ext_modules=[extension(torch, with_cuda)], cmdclass={"build_ext": BuildExtension})
