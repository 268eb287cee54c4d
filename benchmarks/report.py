"""Results as lines for the terminal, as the tables of docs/benchmarks.md, and against an earlier run."""
import json
from pathlib import Path

HEAD = """\
# Benchmarks

Written by `python -m benchmarks.run --markdown docs/benchmarks.md`; do not edit. Rerun it on your machine:
`python -m benchmarks.run --help` has the options, `--quick` takes minutes.
"""
METHOD = """\
All ways to do one work are called in turn, each once a round and every round in another order, in one process, with
outputs allocated by each call, after their results were compared with each other. A time is the median of the runs;
ratios are of medians. "eager" is `engram.reference`, "demo" the official demo's way to write it, "compile" the better of
compiling the reference as one graph or gate and convolution apart, "compiled demo" the demo's way compiled apart,
"smart" our kernels' algebra written in plain torch and compiled. GB/s count necessary bytes: each input read once, each
output written once (`gate_conv` reads `value` twice).
"""


def read(path: Path) -> list[dict]:
    """The records of a --json file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def terminal(record: dict) -> str:
    """One record as text."""
    if record["kind"] == "row":
        lines = [title(record)]
        ours = record["results"][0]["median_ms"]
        for result in record["results"]:
            speed = f"{result['gbs']:8.1f} GB/s" if "gbs" in result else " " * 13
            lines.append(
                f"    {result['name']:30}{result['median_ms']:10.3f} ms   min {result['min_ms']:9.3f}   p10-p90 "
                f"{result['p10_ms']:9.3f} {result['p90_ms']:9.3f}   {result['runs']:3} runs{speed}"
                f"   {result['median_ms'] / ours:7.2f}x ours")
        lines += [f"    {'met  ' if goal['met'] else 'SHORT'} {verdict_line(goal)}" for goal in record["goals"]]
        return "\n".join([*lines, *(f"    note: {note}" for note in record["notes"])])
    if record["kind"] == "accuracy":
        lines = [f"accuracy: {record['op']} {record['shape']} {record['dtype']}: {'met' if record['met'] else 'SHORT'}"]
        for way, errors in record["errors"].items():
            lines.append(f"    {way:10}" + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        return "\n".join(lines)
    return f"{record['kind']}: " + ", ".join(f"{key} {value}" for key, value in record.items() if key != "kind")


def on_gpu(record: dict) -> str:
    """Its device, or nothing for the CPU."""
    device = record.get("device", "cpu")
    return "" if device == "cpu" else device


def title(row: dict) -> str:
    parts = [row["op"], row["direction"], f"{row['shape']} ({row['sizes']})", row["dtype"], row["table"], row["ids"],
             on_gpu(row) or f"{row['threads']} thread{'s' * (row['threads'] > 1)}"]
    return ", ".join(part for part in parts if part)


def verdict_line(verdict: dict) -> str:
    """`against compile: 8.1x, wanted 7x: met`"""
    return f"{verdict['goal']}: {amount(verdict, 'got')}, wanted {wanted(verdict)}: {judgement(verdict)}"


def wanted(verdict: dict) -> str:
    return ("at most " if verdict["at_most"] else "") + amount(verdict, "wanted")


def amount(verdict: dict, key: str) -> str:
    return f"{verdict[key]:.3g}{verdict['unit']}"


def judgement(verdict: dict) -> str:
    if verdict["met"]:
        return "met"
    got, wanted = verdict["got"], verdict["wanted"]
    missing = got / wanted - 1 if verdict["at_most"] else 1 - got / wanted
    return f"short by {100 * missing:.0f} %"


def markdown(records: list[dict]) -> str:
    """The whole document."""
    return f"{HEAD}\n{body(records)}"


def body(records: list[dict]) -> str:
    """How it was measured, on what, and all tables."""
    rows = [record for record in records if record["kind"] == "row"]
    sections = [METHOD, _machines(records)]
    if any(row["goals"] for row in rows):
        sections.append("## Goals\n\n" + _goals(rows))
    if accuracies := [record for record in records if record["kind"] == "accuracy"]:
        sections.append(_accuracy(accuracies))
    sections.append("## All measurements\n")
    for op in dict.fromkeys(row["op"] for row in rows):
        sections.append(f"### {op}\n\n" + _measurements([row for row in rows if row["op"] == op]))
    return "\n".join(sections)


def _machines(records: list[dict]) -> str:
    text = ""
    for record in records:
        if record["kind"] == "machine":
            text += (
                f"Machine: {record['cpu']}, {record['cores']} cores, {record['isa']} kernels, "
                f"{'with' if record['bf16_instructions'] else 'without'} bfloat16 instructions, {record['system']}, "
                f"{record['page_bytes'] // 1024} KiB pages, transparent huge pages \"{record['huge_pages']}\", load "
                f"{record['load']:.1f}; torch {record['torch']}, Python {record['python']}, engram {record['engram']} "
                f"({record['revision']}, {record['compiler']}), {record['date']}.\n\n"
            )
            if gpu := record.get("gpu"):
                text += (
                    f"GPU: {gpu['name']}, compute capability {gpu['capability']}, {gpu['multiprocessors']} "
                    f"multiprocessors, {gpu['memory_bytes'] / 2**30:.0f} GiB, L2 cache {gpu['l2_bytes'] / 2**20:.0f} "
                    f"MiB, CUDA {gpu['cuda']}, driver {gpu['driver']}, kernels for {gpu['kernels']}. Times are between "
                    "two CUDA events, the GPU held busy until the host has issued the whole call, its L2 cache flushed "
                    "before each call, and ids fresh in every one.\n\n"
                )
        elif record["kind"] == "limits":
            where = on_gpu(record) or f"threads {record['threads']}"
            text += f"Limits, {where}: copy {record['copy_gbs']} GB/s (read plus written)"
            if "read_gbs" in record:
                text += f", read {record['read_gbs']} GB/s; a random row of a table of " \
                        f"{record['table_bytes'] // 2**20} MiB, on 4 KiB and on 2 MiB pages: "
                text += ", ".join(f"{width} bytes {pages['4 KiB']} and {pages['2 MiB']} ns"
                                  for width, pages in record["gather_ns_per_row"].items())
            text += ".\n\n"
    return text


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _case(row: dict) -> list[str]:
    where = ", ".join(part for part in (row["shape"], row["table"], row["ids"]) if part)
    return [row["direction"], where, row["dtype"], on_gpu(row) or str(row["threads"])]


def _goals(rows: list[dict]) -> str:
    lines, short = [], []
    for row in rows:
        for verdict in row["goals"]:
            lines.append([row["op"], *_case(row)[:3], verdict["goal"], wanted(verdict), amount(verdict, "got"),
                          judgement(verdict)])
        missed = [verdict for verdict in row["goals"] if not verdict["met"]]
        if missed and row.get("profile"):
            share = ", ".join(f"{name} {part:.0%}" for name, part in row["profile"].items())
            short.append(f"* {title(row)}: {share}")
    met = sum(line[-1] == "met" for line in lines)
    where = ", ".join(dict.fromkeys(on_gpu(row) or "two threads" for row in rows if row["goals"]))
    text = f"{met} of {len(lines)} met, on {where}.\n\n"
    text += _table(["op", "direction", "shape", "dtype", "goal", "wanted", "got", ""], lines)
    if short:
        text += "\nWhere the time of ours goes in the rows that fall short (torch.profiler, own time by op):\n\n"
        text += "\n".join(short) + "\n"
    return text


def _accuracy(records: list[dict]) -> str:
    head = ["shape", "dtype", "way", "y", "dk", "dh", "dv", ""]
    lines = []
    for record in records:
        case = [record["shape"], record["dtype"]]
        for way, errors in record["errors"].items():
            verdict = ("met" if record["met"] else "short") if way == "ours" else ""
            lines.append([*case, way, *(f"{error:.1e}" for error in errors.values()), verdict])
        bounds = [f"{record['limits'][name]:.1e}" if name in record["limits"] else "" for name in errors]
        lines.append([*case, "*at most*", *bounds, ""])
    text = "Error of `gate_conv` against float64 on the rounded inputs, norm-wise: output, and gradients of key, " \
           "hidden and value. Ours in bfloat16 may not be worse than the demo."
    return f"## Accuracy\n\n{text}\n\n{_table(head, lines)}"


def _measurements(rows: list[dict]) -> str:
    """One line a work: ours in milliseconds, and how many times as long the others take."""
    groups = list(dict.fromkeys(result["group"] for row in rows for result in row["results"][1:]))
    place = "device" if any(map(on_gpu, rows)) else "threads"
    head = ["direction", "shape", "dtype", place, "ours, ms (p10-p90; runs)", "GB/s, share of copy", *groups]
    lines = []
    for row in rows:
        ours = row["results"][0]
        speed = f"{ours['gbs']:.1f}, {ours['gbs'] / row['copy_gbs']:.0%}" if "gbs" in ours else ""
        times = f"{ours['median_ms']:.3g} ({ours['p10_ms']:.3g}-{ours['p90_ms']:.3g}; {ours['runs']})"
        ratios = []
        for group in groups:
            best = min((r["median_ms"] for r in row["results"] if r["group"] == group), default=None)
            ratios.append("" if best is None else f"{best / ours['median_ms']:.2f}x")
        lines.append([*_case(row), times, speed, *ratios])
    return _table(head, lines) + "".join(
        f"\n{title(row)}: {note}.\n" for row in rows for note in row["notes"])


def compare(before: list[dict], now: list[dict], threshold: float) -> int:
    """Print our times over the earlier ones; 1 if one is beyond the threshold or nothing could be compared."""
    machines = [next((r for r in records if r["kind"] == "machine"), {}) for records in (before, now)]
    for fact in ("cpu", "cores", "isa", "gpu", "torch"):
        if machines[0].get(fact) != machines[1].get(fact):
            print(f"note: {fact} was {machines[0].get(fact)}, is {machines[1].get(fact)}")
    earlier = {title(row): row["results"][0] for row in before if row["kind"] == "row"}
    compared, slower = 0, 0
    for row in now:
        if row["kind"] != "row" or title(row) not in earlier:
            continue
        ratio = row["results"][0]["median_ms"] / earlier[title(row)]["median_ms"]
        compared, slower = compared + 1, slower + (ratio > threshold)
        print(f"{'SLOWER' if ratio > threshold else '      '} {ratio:6.3f}x the earlier time: {title(row)}")
    print(f"{compared} compared, {slower} slower than {threshold}x")
    return 1 if slower or not compared else 0
