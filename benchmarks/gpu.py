"""Checks and measures on a GPU within minutes, step by step: `bash benchmarks/gpu.sh` builds, then runs this.

A step that fails, or that its time is over for, does not keep the next from running; exit status 1 says that there was
one. What was seen goes to docs/gpu/<device>.json, one JSON line a record as of `benchmarks.run --json`, and to .md.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import engram
from benchmarks import report, run

ROOT = Path(__file__).parents[1]
TOTAL_SECONDS = 450                 # of the 8 minutes; the build counts
KEPT = 3000                         # characters of a failed step's output


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take; `needs`: a program without which the step is skipped."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def steps(device: str, folder: Path) -> list[Step]:
    """Everything to do, what matters most first; the benchmarks write their records into the folder."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", device)
    check = (python, "-m", "engram", "check", "--device", device)
    bench = (python, "-m", "benchmarks.run", "--device", device, "--seconds", "0.5")
    single_ops = ("--op", "gate_conv", "gate", "short_conv", "embedding", "embedding_fp8", "embedding_int8", "ngram_hash",
                  "accuracy")
    # Without torch's own cache every tensor is an allocation with edges that can be seen.
    uncached = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all", "--tool")
    return [
        Step("every op against the float64 reference", check, 60),
        Step("tests of the CUDA kernels: row ids, graphs, side streams", (*tests, "tests/test_cuda.py"), 60),
        Step("tests: float64 references, determinism",
             (*tests, "tests/ops", "tests/test_forward.py", "tests/test_determinism.py", "tests/test_nn.py",
              "tests/test_optim.py"), 90),
        Step("tests: gradients, gradcheck", (*tests, "tests/test_gradients.py"), 120),
        Step("benchmarks of the ops, bfloat16",
             (*bench, *single_ops, "--dtype", "bfloat16", "--json", str(folder / "1.jsonl")), 150),
        Step("benchmarks of the ops, float32",
             (*bench, *single_ops, "--dtype", "float32", "--no-compiler", "--json", str(folder / "2.jsonl")), 60),
        Step("benchmarks of the layer",
             (*bench, "--op", "module", "decode", "table_step", "--no-compiler", "--json", str(folder / "3.jsonl")), 60),
        Step("tests: opcheck, torch.compile, torch.export", (*tests, "tests/test_registration.py"), 90),
        Step("compute-sanitizer memcheck", (*sanitizer, "memcheck", *check), 90, "compute-sanitizer", uncached),
        Step("compute-sanitizer racecheck", (*sanitizer, "racecheck", *check), 90, "compute-sanitizer", uncached),
    ]


def perform(step: Step, seconds: float) -> dict:
    """Run a step for at most so many seconds; its record."""
    record = dict(kind="step", name=step.name, command=" ".join(step.command))
    if step.needs and shutil.which(step.needs) is None:
        return record | dict(status="skipped", seconds=0, last=f"there is no {step.needs} here")
    if seconds <= 0:
        return record | dict(status="OUT OF TIME", seconds=0, last="no time was left to begin it")
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(step.command, cwd=ROOT, env=os.environ | dict(step.environment), stdout=output,
                                  stderr=subprocess.STDOUT, timeout=seconds)
            status = "good" if done.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            status = "OUT OF TIME"
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.strip()]
    record |= dict(status=status, seconds=round(time.monotonic() - begin, 1), last=lines[-1] if lines else "")
    return record if status == "good" else record | dict(output=text[-KEPT:])


def markdown(records: list[dict]) -> str:
    """The document: what was run and how it ended, then the tables of the benchmarks."""
    done = [record for record in records if record["kind"] == "step"]
    lines = [f"| {step['name']} | {step['status']} | {step['seconds']:.0f} | {step['last']} |" for step in done]
    text = "# On " + next((r["gpu"]["name"] for r in records if "gpu" in r), "this machine") + "\n\n"
    text += "Written by `benchmarks/gpu.sh`; do not edit.\n\n| step | | seconds | its last line |\n|---|---|---|---|\n"
    text += "\n".join(lines) + "\n"
    for step in done:
        if step.get("output"):
            text += f"\n{step['name']} ({step['command']}) ended with\n\n```text\n{step['output'].rstrip()}\n```\n"
    if any(record["kind"] == "row" for record in records):
        text += "\n" + report.body(records)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps and write both files; returns 0 if none of them failed, 1 if one did, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this program")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu", metavar="DIR", help="default: docs/gpu")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, metavar="S",
                        help=f"for everything, the build included (default: {TOTAL_SECONDS})")
    parser.add_argument("--built-in", type=float, default=0, metavar="S", help="seconds that the build has taken")
    options = parser.parse_args(argv)
    if options.device == "cuda":
        run.require_gpu(parser)
    machine = run.machine(options.device)
    end = time.monotonic() + options.seconds - options.built_in
    name = re.sub(r"[^a-z0-9]+", "-", machine["gpu"]["name"].lower()).strip("-") if "gpu" in machine else "cpu"
    records = [machine, dict(kind="step", name="build", command="setup.py build_ext --inplace", status="good",
                             seconds=options.built_in, last=f"CUDA kernels for {engram.build_info()['cuda']}")]
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(options.device, Path(folder)):
            print(f"{step.name} ...", flush=True)
            done = perform(step, min(step.seconds, end - time.monotonic()))
            print(f"    {done['status']}, {done['seconds']:.0f} s: {done['last']}", flush=True)
            records.append(done)
        for path in sorted(Path(folder).glob("*.jsonl")):
            records += [record for record in report.read(path) if record["kind"] != "machine"]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    (options.out / f"{name}.md").write_text(markdown(records))
    failed = [record["name"] for record in records if record.get("status") in ("FAILED", "OUT OF TIME")]
    print(f"{options.out / name}.json and .md; " + ("; ".join(["not good:", *failed]) if failed else "all good"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
