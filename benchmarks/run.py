"""Measure engram against its peers and the machine's limits: `python -m benchmarks.run --help`."""
import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import engram
from benchmarks import accuracy, goals, limits, report
from benchmarks.shapes import SHAPES, TABLES
from benchmarks.timing import Contender, interleave, summary, timer_of
from benchmarks.works import BOTH, DEFAULT_SHAPES, FORWARD, Choice, Work, works
from engram import profiling
from engram.cli.answer import Answer, Parser, answer
from engram.cli.check import devices
from samples import relative_error

DESCRIPTION = """\
Speed of engram's operators and of the whole layer, beside plain PyTorch and the machine's own limits. All ways to do
one work are called in turn in one process, after their results were compared with each other; ratios are of medians. On
a GPU times are between CUDA events, with the L2 cache flushed before every call."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_TABLES, GPU_TABLES = ("64MB", "1GB"), ("1GB", "4GB")
STDOUT = Path("-")                  # what --json without a file means


def add_options(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_argument_group("what to measure")
    chosen.add_argument("--device", choices=["cpu", "cuda"], help="default: cpu")
    chosen.add_argument("--op", nargs="+", choices=[*DEFAULT_SHAPES, "accuracy"], metavar="OP",
                        help=f"out of {', '.join(DEFAULT_SHAPES)}, accuracy; default: all")
    chosen.add_argument("--shape", nargs="+", choices=SHAPES, metavar="SHAPE",
                        help="; ".join(f"{name} = {shape}" for name, shape in SHAPES.items()))
    chosen.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: both")
    chosen.add_argument("--direction", nargs="+", choices=["forward", "both"], help="default: each")
    chosen.add_argument("--threads", nargs="+", type=int, metavar="N", help="default: torch's own number")
    chosen.add_argument("--tables", nargs="+", choices=TABLES,
                        help=f"for the lookup; default: {' '.join(DEFAULT_TABLES)}; on a GPU {' '.join(GPU_TABLES)}")
    chosen.add_argument("--ids", nargs="+", choices=["uniform", "zipf"],
                        help="for the lookup: uniform rows, or those of a real token stream; default: both")
    chosen.add_argument("--goals", action="store_true",
                        help="only what has a goal; on the CPU goals are for two threads")
    chosen.add_argument("--quick", action="store_true", help="shapes A and B, the smallest table, one second a work")
    chosen.add_argument("--seconds", type=float, metavar="S", help="time for the rounds of one work (default: 6)")
    chosen.add_argument("--no-compiler", action="store_true",
                        help="without torch.compile and the gather loop, which need g++ and most of the time")
    written = parser.add_argument_group("what to do with it")
    written.add_argument("--json", type=Path, nargs="?", const=STDOUT, metavar="FILE",
                         help="write one JSON line per result; without FILE print one JSON object of all there is and "
                              "nothing else: the text goes to stderr")
    written.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables of docs/benchmarks.md")
    written.add_argument("--against", type=Path, metavar="FILE",
                         help="print times over those of an earlier --json file; fail beyond --threshold")
    written.add_argument("--threshold", type=float, default=1.15, metavar="X", help="default: 1.15")
    modes = parser.add_argument_group("instead of measuring").add_mutually_exclusive_group()
    modes.add_argument("--rows", type=Path, nargs="+", metavar="FILE",
                       help="take the results of earlier --json files, for --markdown or --against")
    modes.add_argument("--profile", action="store_true",
                       help="run ours alone, a hundred times, under torch.profiler and with the layer's stages named; "
                            "also for `nsys`, `ncu` and `perf record`")
    modes.add_argument("--guard", action="store_true",
                       help="check a few ratios with wide margins within a minute; exit status 1 if one is missed")


def parser_of(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION, allow_abbrev=False)
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "benchmarks.run") -> int:
    """Run the command line; returns the exit status: 0 good, 1 a guard or the threshold was missed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    return answer(prog, partial(command, argv, prog), as_json=asks_for_json(argv))


def asks_for_json(argv: Sequence[str]) -> bool:
    """Whether --json stands there without a file."""
    return any(word == "--json" and after.startswith("-") for word, after in zip(argv, [*argv[1:], "-"]))


def command(argv: Sequence[str], prog: str) -> Answer:
    """Exit status and record. Raises UsageError for what the user can put right."""
    parser = parser_of(prog)
    options = parser.parse_args(argv)
    if meaningless := unused(options):
        parser.error(f"--{meaningless.replace('_', '-')} has no meaning beside --{mode_of(options)}")
    if options.device == "cuda":
        if options.threads:
            parser.error("--threads has no meaning beside --device cuda")
        devices("cuda")                 # a UsageError where engram's ops cannot run on a GPU
    return run(options)


def mode_of(options: argparse.Namespace) -> str | None:
    return next((mode for mode in ("rows", "profile", "guard") if getattr(options, mode)), None)


def unused(options: argparse.Namespace) -> str | None:
    """An option that was given and that the chosen mode has no use for."""
    chosen = ["device", "op", "shape", "dtype", "direction", "threads", "tables", "ids", "quick"]
    timed, results = ["goals", "seconds", "no_compiler"], ["markdown", "against"]
    file = [] if options.json == STDOUT else ["json"]
    refused = {"rows": [*chosen, *timed, *file], "profile": [*timed, "json", *results],
               "guard": [*chosen, *timed, *file, *results]}
    return next((name for name in refused.get(mode_of(options), []) if getattr(options, name)), None)


def run(options: argparse.Namespace) -> Answer:
    """Do what the options say; returns exit status, as `main`, and record."""
    threads = torch.get_num_threads()
    try:
        if options.guard:
            return guard()
        if options.profile:
            profile_all(options)
            return 0, {}
        if options.rows:
            records = [record for path in options.rows for record in report.read(path)]
        else:
            records = list(measure_all(options))
        if options.markdown:
            options.markdown.parent.mkdir(parents=True, exist_ok=True)
            options.markdown.write_text(report.markdown(records))
        status = 0
        if options.against:
            status = report.compare(report.read(options.against), records, options.threshold)
        return status, {"records": records}
    finally:
        torch.set_num_threads(threads)


def choose(options: argparse.Namespace) -> Choice:
    quick, device = options.quick, device_of(options)
    tables = DEFAULT_TABLES if device == "cpu" else GPU_TABLES
    return Choice(
        ops=tuple(op for op in options.op or DEFAULT_SHAPES if op in DEFAULT_SHAPES),
        shapes=tuple(options.shape or (("A", "B") if device == "cpu" else ("H",))) if quick or options.shape else None,
        dtypes=tuple(DTYPES[name] for name in options.dtype or DTYPES),
        tables=tuple(options.tables or (tables[:1] if quick else tables)),
        ids=tuple(options.ids or ("uniform", "zipf")),
        directions=tuple({"forward": FORWARD, "both": BOTH}[name] for name in options.direction or ("forward", "both")),
        compiler=not options.no_compiler,
        device=device,
    )


def device_of(options: argparse.Namespace) -> str:
    return options.device or "cpu"


def seconds_of(options: argparse.Namespace) -> float:
    return options.seconds if options.seconds is not None else 1.0 if options.quick else 6.0


def measure_all(options: argparse.Namespace) -> Iterator[dict]:
    """All chosen results, each written to --json and to the terminal as soon as it is there."""
    choice, seconds = choose(options), seconds_of(options)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(options.json.open("w")) if options.json not in (None, STDOUT) else None

        def put(record: dict) -> dict:
            if lines:
                print(json.dumps(record), file=lines, flush=True)
            print(report.terminal(record), flush=True)
            return record

        yield put(machine(choice.device))
        for threads in options.threads or [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            copy = limits.Copy(choice.device)
            if choice.ops:
                table = TABLES["64MB" if options.quick else "1GB"]
                yield put(limits.measure(copy, seconds / 4, table, compiler=choice.compiler))
            for work in works(choice):
                if not options.goals or goals.goals_of(description(work)):
                    yield put(measure(work, copy, seconds))
        if options.op is None or "accuracy" in options.op:
            for name in choice.shapes or ("A", "B"):
                for dtype in choice.dtypes:
                    yield put(accuracy.measure(name, SHAPES[name], dtype, choice.device))


def machine(device: str = "cpu") -> dict:
    """Where, when and with what; `gpu` where that is measured."""
    def read(path: str) -> str:
        return Path(path).read_text() if Path(path).exists() else ""

    models = re.findall(r"^model name\s*: (.*)$", read("/proc/cpuinfo"), re.MULTILINE)
    root = Path(__file__).parents[1]
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    if revision and _git(root, "status", "--porcelain", "--untracked-files=no"):
        revision += " with changes"
    mode = re.search(r"\[(\w+)\]", read("/sys/kernel/mm/transparent_hugepage/enabled"))
    record = dict(
        kind="machine", date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=models[0] if models else platform.processor(), cores=os.cpu_count(),
        isa=engram.build_info()["cpu"], bf16_instructions=limits.bf16_instructions(), system=platform.platform(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"), huge_pages=mode[1] if mode else "unknown",
        load=os.getloadavg()[0], torch=torch.__version__, python=platform.python_version(),
        engram=engram.__version__, compiler=engram.build_info()["compiler"], revision=revision or "unknown",
    )
    return record | (dict(gpu=gpu()) if device == "cuda" else {})


def gpu() -> dict:
    """The GPU that torch uses, and what it is used with."""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader",
             f"--id=GPU-{facts.uuid}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        driver, *clocks = (part.strip() for part in done.stdout.split(","))
    except (OSError, subprocess.CalledProcessError):
        driver, clocks = "unknown", []
    return dict(
        name=facts.name, capability=f"{facts.major}.{facts.minor}", multiprocessors=facts.multi_processor_count,
        memory_bytes=facts.total_memory, l2_bytes=facts.L2_cache_size, cuda=torch.version.cuda, driver=driver,
        clocks=clocks, kernels=engram.build_info()["cuda"],
    )


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def measure(work: Work, copy: limits.Copy, seconds: float) -> dict:
    """One row: every contender checked against ours, then timed in turn with it; copy bandwidth before and after."""
    torch._dynamo.reset()               # a graph is compiled for one number of threads
    contenders = prepare(work)
    before = copy.gbs()
    times = interleave(contenders, seconds, first=1, timer=timer_of(work.device))
    copied = (before + copy.gbs()) / 2
    row = description(work) | dict(copy_gbs=round(copied, 2), notes=work.notes, results=[])
    for contender in contenders:
        result = dict(name=contender.name, group=contender.group) | summary(times[contender.name])
        moved = contender.bytes or work.bytes
        if moved:
            result["gbs"] = float(f"{moved / result['median_ms'] / 1e6:.4g}")
        row["results"].append(result)
    row["goals"] = goals.judge(row)
    if work.device == "cpu" and not all(verdict["met"] for verdict in row["goals"]):
        row["profile"] = shares(profile(contenders[0], str(work), 20), str(work))
    return row


def description(work: Work) -> dict:
    """What a row says of its work before anything is measured."""
    shape = work.sizes
    return dict(
        kind="row", op=work.op, device=work.device, direction=work.direction, shape=work.shape, sizes=str(shape),
        dtype=str(work.dtype).removeprefix("torch."), threads=torch.get_num_threads(), table=work.table, ids=work.ids,
        tokens=shape.count, branches=shape.branches, row_bytes=shape.row_width * work.dtype.itemsize,
        output_bytes=shape.count * shape.columns * shape.row_width * work.dtype.itemsize,
    )


def prepare(work: Work) -> list[Contender]:
    """The work's contenders, each run twice: once to compare its outputs with ours, once more to be warm.

    What torch.compile made and got wrong is left out, with a note.

    Raises:
        AssertionError: another contender's result is not ours.
    """
    contenders, ours = [], None
    for contender in work.contenders(work):
        result = contender.call(0)
        if contender.compare:
            outputs = contender.compare(result)
            ours = outputs if ours is None else ours
            tolerance = work.tolerance if contender.tolerance is None else contender.tolerance
            assert len(outputs) == len(ours), f"{work}: {contender.name} gives {len(outputs)} tensors"
            errors = [relative_error(theirs, own) for theirs, own in zip(outputs, ours)]
            wrong = not all(error <= tolerance for error in errors)     # so that NaN is wrong, too
            assert contender.compiled or not wrong, f"{work}: {contender.name} differs from ours by {errors}"
            del outputs
            if wrong:
                wrongs = ", ".join(f"{error:.1g}" for error in errors)
                work.notes.append(f"{contender.name} is left out: its results differ from ours by {wrongs}")
                continue
        del result
        contender.call(0)
        contenders.append(contender)
    return contenders


def profile_all(options: argparse.Namespace) -> None:
    """Ours alone, a hundred times under torch.profiler, with the layer's stages; a table per work.

    The table has the host's times. What the GPU does is for nsys and ncu, which see the same ranges through NVTX.
    """
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for work in works(choose(options)):
            averages = profile(next(iter(work.contenders(work))), str(work), 100)
            print(f"{work}, threads {threads}")
            print(averages.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=80), flush=True)


def profile(ours: Contender, label: str, runs: int):
    """Averages by op name of `runs` calls."""
    for i in range(2):
        ours.call(i)
    with profiling.stages(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        for i in range(runs):
            with profiling.named_range(label):
                ours.call(i)
    if torch.cuda.is_available():
        torch.cuda.synchronize()    # or a profiler that ends with the process misses the last ones
    return trace.key_averages()


def shares(averages, label: str) -> dict[str, float]:
    """The five ops with most time of their own, as shares of all; `label` stands for Python between them."""
    own = {"Python" if event.key == label else event.key: event.self_cpu_time_total for event in averages}
    most = sorted(own, key=own.get, reverse=True)[:5]
    return {name: round(own[name] / sum(own.values()), 3) for name in most}


def guard() -> Answer:
    """A few ratios that must hold anywhere, on two threads.

    Of the fastest runs, which other processes on the machine disturb least, and with more chances for a missed one.
    """
    torch.set_num_threads(goals.THREADS)
    missed, begin, record = 0, time.perf_counter(), []
    for op, direction, shape, dtype, wanted in goals.GUARDS:
        choice = Choice((op,), (shape,), (DTYPES[dtype],), DEFAULT_TABLES[:1], ("uniform",), (direction,), False)
        work = next(works(choice))
        contenders = [contender for contender in prepare(work) if contender.group != "demo"]
        for attempt in range(4):
            times = interleave(contenders, 1.5, least=5, first=1)
            row = dict(results=[dict(group=c.group, median_ms=summary(times[c.name])["min_ms"]) for c in contenders])
            verdicts = [goal.judge(row) for goal in wanted]
            if all(verdict["met"] for verdict in verdicts):
                break
        for verdict in verdicts:
            missed += not verdict["met"]
            record.append({"work": str(work), **verdict})
            print(f"{'ok    ' if verdict['met'] else 'MISSED'} {work}: {report.verdict_line(verdict)}", flush=True)
    print(f"{missed} missed, {time.perf_counter() - begin:.0f} s")
    return (1 if missed else 0), {"ok": not missed, "guards": record}


if __name__ == "__main__":
    sys.exit(main())
