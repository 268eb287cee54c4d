"""The tool that keeps docs/cuda-resources.md: what it reads out of the compiler, and what it refuses."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import cuda_resources as tool  # noqa: E402

KERNELS = {"_ZN6engram4cuda11gate_kernelIfLi4EEEvPKf": (40, 0, 64), "_ZN6engram4cuda11hash_kernelEv": (24, 0, 0)}


def log(kernels: dict, architectures=tool.ARCHITECTURES) -> str:
    """What ptxas -v prints."""
    text = ""
    for arch in architectures:
        for name, (registers, spilled, shared) in kernels.items():
            text += (
                f"ptxas info    : Compiling entry function '{name}' for 'sm_{arch}'\n"
                f"ptxas info    : Function properties for {name}\n"
                f"    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
                f"ptxas info    : Used {registers} registers, used 1 barriers" +
                (f", {shared} bytes smem" if shared else "") + ", 400 bytes cmem[0]\n"
            )
    return text


@pytest.fixture
def known():
    """What is in the document, by way of the document."""
    if shutil.which("c++filt") is None:
        pytest.skip("names of kernels are read with c++filt, and there is none")
    text = tool.render(tool.parse(log(KERNELS)), tool.FIRST_REASON, "nvcc 1.2.3")
    return tool.read_document(text)


def changed(**changes) -> dict:
    gate, plain = KERNELS
    return tool.parse(log({gate: changes.get("gate", KERNELS[gate]), plain: KERNELS[plain]}))


def test_the_document_keeps_what_ptxas_says(known):
    assert known == {name: {arch: needs for arch in tool.ARCHITECTURES}
                     for name, needs in {"gate_kernel<float, 4>": (40, 0), "hash_kernel": (24, 0)}.items()}
    assert tool.compare(known, changed()) == []


@pytest.mark.parametrize("needs, complaint", [
    ((40, 4, 64), "gate_kernel<float, 4> sm_80: spills 4 bytes, 0 before"),
    ((40 + tool.REGISTER_JUMP, 0, 64), f"gate_kernel<float, 4> sm_80: {40 + tool.REGISTER_JUMP} registers, 40 before"),
])
def test_a_spill_and_a_jump_are_refused(known, needs, complaint):
    worse = tool.compare(known, changed(gate=needs))
    assert worse[0] == complaint and len(worse) == len(tool.ARCHITECTURES)
    assert tool.compare(known, changed(gate=(40 + tool.REGISTER_JUMP - 1, 0, 64))) == []


def test_new_and_lost_kernels_are_refused(known):
    kernels = changed()
    kernels["other"] = kernels.pop("hash_kernel")
    worse = tool.compare(known, kernels)
    assert "other sm_80: not in the document" in worse and "hash_kernel: in the document, but gone" in worse


def test_every_architecture_is_needed(known):
    with pytest.raises(SystemExit, match="was compiled for"):
        tool.parse(log(KERNELS, tool.ARCHITECTURES[:-1]))


def test_no_compiler_is_said(tmp_path):
    """With the option it succeeds and says that nothing was compiled, without it it fails."""
    code = "import cuda_resources as tool; tool.find_nvcc = lambda: ''; tool.main()"
    for options, status, said in ((["--skip-without-nvcc"], 0, "SKIPPED"), ([], 1, "no nvcc; set CUDA_HOME")):
        done = subprocess.run([sys.executable, "-c", code, *options], cwd=Path(tool.__file__).parent,
                              capture_output=True, text=True)
        assert done.returncode == status and said in done.stdout + done.stderr
