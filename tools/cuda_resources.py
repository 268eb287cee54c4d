"""Compiles the CUDA kernels for every architecture; keeps what they need in docs/cuda-resources.md.

    python tools/cuda_resources.py                            # fails on a warning, a new spill, a register jump
    python tools/cuda_resources.py --update --reason "..."    # accepts what is there now

Needs nvcc (CUDA_HOME or PATH), and torch for its header-only scalar types; no GPU and no CUDA build of torch.
"""
import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "cuda-resources.md"
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]  # the last one also as PTX
REGISTER_JUMP = 8

HEADER = """# What the CUDA kernels need

Registers per thread as ptxas reports them, `+n` bytes of spilled registers; bytes of static shared memory. Written by
`tools/cuda_resources.py`, which compiles for sm_{archs} and PTX with warnings as errors; it fails on a
new spill, or on {jump} registers more, unless this file is updated with a reason. Compiler: {compiler}.

## Reasons

{reasons}

## Kernels

| kernel | shared | {columns} |
|---|---|{rule}|
"""
FIRST_REASON = "* First version. More than a few bytes spill in float64, in wide or unaligned rows, in `any` kernels."

Needs = tuple[int, int, int]                    # registers, bytes spilled, bytes of shared memory


def find_nvcc() -> str:
    """Path of the compiler, empty if there is none."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or ""


def compile_kernels(nvcc: str, source: Path, threads: int) -> dict[str, dict[str, Needs]]:
    """Kernel name -> architecture -> needs, for one file: one call, so that its host side is compiled once."""
    torch_folder = importlib.util.find_spec("torch").submodule_search_locations[0]
    codes = {arch: f"sm_{arch}" for arch in ARCHITECTURES}
    codes[ARCHITECTURES[-1]] = f"[sm_{ARCHITECTURES[-1]},compute_{ARCHITECTURES[-1]}]"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            nvcc, "-c", str(source), "-o", f"{folder}/kernel.o", "-O3", "-std=c++20", "-lineinfo", "-DENGRAM_WITH_CUDA",
            *(f"-gencode=arch=compute_{arch},code={code}" for arch, code in codes.items()),
            "-Xptxas=-v", f"--threads={threads}", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror",
            f"-I{ROOT / 'csrc'}", f"-I{torch_folder}/include",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return parse(done.stdout + done.stderr)


def parse(log: str) -> dict[str, dict[str, Needs]]:
    """Kernel name -> architecture -> needs, out of what `ptxas -v` prints."""
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = {name: shorten(text) for name, text in zip(names, plain.splitlines())}
    kernels: dict[str, dict[str, Needs]] = {}
    name, arch, spilled = None, "", 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            name, arch, spilled = short[found[1]], found[2], 0
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(found[1])
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels.setdefault(name, {})[arch] = (int(found[1]), spilled, int(shared[1]) if shared else 0)
            name = None
    for name, by_arch in kernels.items():
        if sorted(by_arch) != sorted(ARCHITECTURES):
            sys.exit(f"cuda_resources: {name} was compiled for {sorted(by_arch)} only")
    return kernels


def shorten(signature: str) -> str:
    text = re.sub(r"\(anonymous namespace\)::|engram::cuda::|engram::|c10::|^void ", "", signature)
    depth = 0
    for i, c in enumerate(text):                # up to the parameter list
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return text[:i].replace("(bool)1", "true").replace("(bool)0", "false").replace("(int)", "")
    return text


def cell(needs: Needs) -> str:
    return f"{needs[0]}" + (f" +{needs[1]}" if needs[1] else "")


def render(kernels: dict[str, dict[str, Needs]], reasons: str, compiler: str) -> str:
    head = HEADER.format(
        archs=", sm_".join(ARCHITECTURES), jump=REGISTER_JUMP, compiler=compiler, reasons=reasons,
        columns=" | ".join(f"sm_{a}" for a in ARCHITECTURES), rule="|".join("---" for _ in ARCHITECTURES),
    )
    rows = []
    for name, by_arch in sorted(kernels.items()):
        shared = max(needs[2] for needs in by_arch.values())
        rows.append(" | ".join([f"| `{name}`", str(shared), *(cell(by_arch[arch]) for arch in ARCHITECTURES)]) + " |")
    return head + "\n".join(rows) + "\n"


def read_document(text: str) -> dict[str, dict[str, tuple[int, int]]]:
    kernels = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            name, _, *cells = (part.strip() for part in line.strip("|").split(" | "))
            pairs = [(c.split(" +") + ["0"])[:2] for c in cells]
            kernels[name.strip("`")] = {a: (int(r), int(s)) for a, (r, s) in zip(ARCHITECTURES, pairs)}
    return kernels


def compare(known: dict, kernels: dict[str, dict[str, Needs]]) -> list[str]:
    worse = []
    for name, by_arch in kernels.items():
        for arch, (registers, spilled, _) in by_arch.items():
            before = known.get(name, {}).get(arch)
            if before is None:
                worse.append(f"{name} sm_{arch}: not in the document")
            elif spilled > before[1]:
                worse.append(f"{name} sm_{arch}: spills {spilled} bytes, {before[1]} before")
            elif registers >= before[0] + REGISTER_JUMP:
                worse.append(f"{name} sm_{arch}: {registers} registers, {before[0]} before")
    return worse + [f"{name}: in the document, but gone" for name in known if name not in kernels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the document")
    parser.add_argument("--reason", help="why it changed; goes into the document")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="architectures at a time")
    parser.add_argument("--skip-without-nvcc", action="store_true", help="say so and succeed where there is no nvcc")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if not nvcc and options.skip_without_nvcc:
        print("cuda_resources: SKIPPED, there is no nvcc here: the CUDA kernels were not compiled")
        return
    if not nvcc:
        sys.exit("cuda_resources: no nvcc; set CUDA_HOME")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    compiler = "nvcc " + re.search(r"release [\d.]+, V([\d.]+)", version)[1]
    kernels: dict[str, dict[str, Needs]] = {}
    for source in sorted((ROOT / "csrc/kernels/cuda").glob("*.cu")):
        begin, found = time.perf_counter(), compile_kernels(nvcc, source, options.jobs)
        seconds = time.perf_counter() - begin
        print(f"{source.name}: {len(found)} kernels for sm_{', sm_'.join(ARCHITECTURES)}, {seconds:.0f} s", flush=True)
        kernels |= found

    old = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if options.update:
        known_reasons = re.search(r"## Reasons\n\n(.*?)\n\n## Kernels", old, re.S)
        reasons = known_reasons[1] if known_reasons else FIRST_REASON
        if known_reasons and not options.reason:
            sys.exit("cuda_resources: --update needs --reason")
        if known_reasons:
            reasons += f"\n* {options.reason}"
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(render(kernels, reasons, compiler))
        return
    worse = compare(read_document(old), kernels)
    if compiler not in old:
        print(f"cuda_resources: the document was written with another compiler than {compiler}; compiled, not compared")
    elif worse:
        sys.exit("cuda_resources: docs/cuda-resources.md says otherwise\n  " + "\n  ".join(worse))


if __name__ == "__main__":
    main()
