"""The benchmark tool on works of a millisecond: what it times, what it judges, what it writes."""
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tool is no part of the installed package

from benchmarks import accuracy, goals, limits, peers, report, run, shapes, steps, works  # noqa: E402
from benchmarks.timing import Contender, GpuTime, interleave, summary  # noqa: E402
import engram  # noqa: E402
from engram import cli, nn  # noqa: E402

TINY = shapes.Shape(batch=2, tokens=12, width=32, branches=2, columns=16, row_width=8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A shape and a table that cost nothing, and buffers for the copy limit to match."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setitem(shapes.TABLES, "64MB", 2**16)
    monkeypatch.setitem(shapes.TABLES, "1GB", 2**16)
    monkeypatch.setattr(works, "MODULE_TABLE_BYTES", 2**16)
    monkeypatch.setattr(works, "TOUCHED_BYTES", 2**14)
    monkeypatch.setattr(limits, "COPY_BYTES", 2**16)


def tool(*arguments) -> int:
    return run.main(["--shape", "tiny", "--no-compiler", "--seconds", "0", *map(str, arguments)])


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def choice(*ops, dtypes=(torch.float32,), compiler=False, device="cpu") -> works.Choice:
    directions = (works.FORWARD, works.BOTH)
    return works.Choice(ops, ("tiny",), dtypes, ("64MB",), ("uniform", "zipf"), directions, compiler, device)


def test_contenders_take_turns_and_never_share_an_index():
    calls = []
    contenders = [Contender(name, lambda i, name=name: calls.append((name, i))) for name in "abc"]
    times = interleave(contenders, 0, least=3, first=5)
    assert [i for _, i in calls] == list(range(5, 14))
    rounds = ["".join(name for name, _ in calls[at : at + 3]) for at in (0, 3, 6)]
    assert all(sorted(names) == list("abc") for names in rounds) and len(set(rounds)) > 1
    assert {name: len(values) for name, values in times.items()} == dict(a=3, b=3, c=3)


def test_seconds_and_most_end_the_rounds():
    contender = Contender("a", lambda i: None)
    assert len(interleave([contender], 60, most=20)["a"]) == 20
    assert len(interleave([contender], 1e-9, least=2)["a"]) == 2


class FakeGpu:
    """torch.cuda as far as GpuTime needs it; notes what it is asked for, and whose events are how far apart."""

    def __init__(self):
        self.log = []

    def Event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self.log)

    def _sleep(self, cycles):
        self.log.append("hold")


class FakeEvent:
    def __init__(self, log):
        self.log = log

    def record(self):
        self.log.append("record")
        self.at = len(self.log)

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, end):
        return 1.0 * (end.at - self.at)             # milliseconds


def test_gpu_time(monkeypatch):
    """Flush, hold the GPU, then the call alone between the events, then wait: events without a wait give nonsense."""
    monkeypatch.setattr(GpuTime, "FLUSH_BYTES", 16)
    gpu = FakeGpu()
    timer = GpuTime(gpu)
    timer.flushed.fill_(7)

    def call(i=None):
        assert not timer.flushed.any()
        gpu.log.append("call")

    assert timer(call) == pytest.approx(0.002)
    assert gpu.log == ["hold", "record", "call", "record", "wait"]
    times = interleave([Contender("a", call), Contender("b", call)], 0, least=2, timer=timer)
    assert times == dict(a=[0.002] * 2, b=[0.002] * 2)


def test_summary():
    assert summary([0.003, 0.001, 0.002, 0.010, 0.004]) == dict(
        median_ms=3.0, min_ms=1.0, p10_ms=1.4, p90_ms=7.6, runs=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", works.DEFAULT_SHAPES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")     # of torch.optim.Adagrad
def test_every_peer_agrees_with_ours(op, dtype, monkeypatch):
    monkeypatch.setattr(steps, "FLAT_ROWS", (1_000_000, 2_000_000))
    if op == "table_step" and dtype != torch.float32:
        assert not list(works.works(choice(op, dtypes=(dtype,))))       # the peers have it in float32 only
        return
    prepared = [run.prepare(work) for work in works.works(choice(op, dtypes=(dtype,)))]
    assert prepared and all(len(contenders) >= 2 and contenders[0].name == "ours" for contenders in prepared)


@pytest.mark.parametrize("op", works.DEFAULT_SHAPES)
def test_works_of_another_device_live_there(op):
    """Of tensors without data, which no op accepts beside those of a CPU."""
    for work in works.works(choice(op, device="meta")):
        if op == "table_step" or (op, work.direction) == ("module", works.BOTH):
            assert next(work.contenders(work)).name == "ours"       # without data, nobody knows how many rows are touched
            continue
        names = []
        for contender in work.contenders(work):
            if "sparse" in contender.name:
                continue                # torch has no sparse tensors without data
            results = contender.call(0)
            for tensor in torch.utils._pytree.tree_leaves(results):
                assert tensor.device.type == "meta", f"{work}: {contender.name}"
            names.append(contender.name)
        assert names[0] == "ours" and len(names) >= 2 and run.description(work)["device"] == "meta"


def test_a_wrong_peer_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "demo_gate_conv", lambda hidden, *tensors, **options: hidden)
    with pytest.raises(AssertionError, match="gate_conv, forward, tiny, float32: demo differs from ours"):
        run.prepare(next(works.works(choice("gate_conv"))))


@pytest.mark.parametrize("wrong", [torch.nan, 1.0])
def test_a_wrong_compiled_peer_is_left_out_with_a_note(monkeypatch, wrong):
    def ways(around, compiler, **options):
        right = peers.bind(engram.reference.gate_conv, **options)
        return [("eager", "eager", right), ("smart, compiled", "smart", lambda *tensors: right(*tensors) + wrong)]

    monkeypatch.setattr(peers, "gate_convs", ways)
    work = next(works.works(choice("gate_conv", compiler=True)))
    assert [contender.name for contender in run.prepare(work)] == ["ours", "ours, packed", "eager"]
    assert len(work.notes) == 1 and work.notes[0].startswith("smart, compiled is left out: its results differ from ours")


def test_smart_is_the_same_formula():
    for dtype in (torch.float32, torch.bfloat16):
        errors = accuracy.measure("tiny", TINY, dtype)["errors"]
        assert max(errors["smart"].values()) < (1e-4 if dtype == torch.float32 else 3e-3)


def test_accuracy_is_met_by_ours_and_missed_by_the_bfloat16_demo():
    record = accuracy.measure("tiny", TINY, torch.bfloat16)
    assert record["met"] and record["errors"]["ours"]["y"] < record["errors"]["demo"]["y"]
    assert record["errors"]["demo"]["dk"] > record["limits"]["dk"]


def test_rows_cover_their_columns():
    settings = shapes.config(TINY, 2**16, torch.float32)
    constants = nn.NgramHash(settings, shapes.token_map())
    begin, size = constants.offsets[0], constants.moduli[0]
    for ids in ("uniform", "zipf"):
        work = works.Work("embedding", works.FORWARD, "tiny", TINY, torch.float32, None, table="64MB", ids=ids)
        rows = torch.cat(works.row_sets(work, settings))
        assert ((rows >= begin) & (rows < begin + size)).all() and len(rows.unique()) > rows.shape[-1]


def test_token_stream_is_real_text_and_repeatable():
    stream = shapes.token_stream(5000)
    assert stream.shape == (5000,) and 0 <= stream.min() and stream.max() < shapes.VOCAB_SIZE
    assert len(stream.unique()) < 2500 and torch.equal(stream[:100], shapes.token_stream(100))


def test_huge_table_is_aligned_and_equal():
    small, huge = (shapes.make_table(2**22, 64, torch.float32, huge=pages) for pages in (False, True))
    assert torch.equal(small, huge) and huge.data_ptr() % shapes.HUGE_PAGE == 0
    assert shapes.huge_page_share(small) == 0 and 0 <= shapes.huge_page_share(huge) <= 1


def test_loop_gathers():
    if limits.loops() is None:
        pytest.skip("the machine limits are measured by a C++ program, and there is no g++")
    table, rows = torch.randn(50, 9), torch.randint(50, (4, 5))
    assert torch.equal(limits.gather(table, rows), table[rows])


def test_files(tmp_path, capsys):
    lines, document = tmp_path / "rows.jsonl", tmp_path / "docs" / "benchmarks.md"
    assert tool("--op", "gate_conv", "ngram_hash", "accuracy", "--dtype", "float32", "--threads", 1,
                "--json", lines, "--markdown", document) == 0
    machine, limit, *rows = records(lines)
    assert machine["kind"] == "machine" and machine["torch"] == torch.__version__ and machine["isa"]
    assert limit["copy_gbs"] > 0 and limit["threads"] == 1
    assert [(r["kind"], r["op"]) for r in rows] == [
        ("row", "gate_conv"), ("row", "gate_conv"), ("row", "ngram_hash"), ("accuracy", "gate_conv")]
    forward = rows[0]
    assert [r["name"] for r in forward["results"]] == ["ours", "ours, packed", "eager", "demo"]
    elements = (3 * 2 + 2) * 32 * 24
    ours = forward["results"][0]
    assert ours["gbs"] == pytest.approx(elements * 4 / ours["median_ms"] / 1e6, rel=1e-3)
    text = document.read_text()
    assert "### gate_conv" in text and "## Accuracy" in text and "copy" in text
    assert "gate_conv, forward, tiny (B2 T12 D32 G2 C16 d8), float32, 1 thread" in capsys.readouterr().out

    again = tmp_path / "again.md"
    assert run.main(["--rows", str(lines), "--markdown", str(again)]) == 0
    assert again.read_text() == text


def test_against(tmp_path, capsys):
    lines, slower = tmp_path / "rows.jsonl", tmp_path / "slower.jsonl"
    tool("--op", "ngram_hash", "--json", lines)
    assert run.main(["--rows", str(lines), "--against", str(lines)]) == 0
    earlier = records(lines)
    earlier[-1]["results"][0]["median_ms"] /= 1.2
    slower.write_text("\n".join(map(json.dumps, earlier)))
    capsys.readouterr()
    assert run.main(["--rows", str(lines), "--against", str(slower)]) == 1
    assert "SLOWER  1.200x the earlier time: ngram_hash" in capsys.readouterr().out
    assert run.main(["--rows", str(lines), "--against", str(slower), "--threshold", "1.25"]) == 0
    slower.write_text(json.dumps(earlier[0]))
    assert run.main(["--rows", str(lines), "--against", str(slower)]) == 1     # nothing to compare is no success


def row(**medians) -> dict:
    results = [dict(name=name, group=name.split("_")[0], runs=9, gbs=10.0,
                    **dict.fromkeys(("median_ms", "min_ms", "p10_ms", "p90_ms"), value))
               for name, value in medians.items()]
    return dict(kind="row", op="gate_conv", direction=works.FORWARD, shape="A", sizes="sizes", dtype="float32",
                threads=2, table="", ids="", tokens=1024, output_bytes=2**22, copy_gbs=20.0, notes=[], results=results)


def test_goals_take_the_better_of_a_group():
    verdicts = {v["goal"]: v for v in goals.judge(row(ours=1, eager=20, compile_a=9, compile_b=6))}
    assert set(verdicts) == {"against eager", "against compile", "share of copy bandwidth"}   # smart was not measured
    assert verdicts["against eager"]["met"] and verdicts["against eager"]["got"] == 20
    assert not verdicts["against compile"]["met"] and verdicts["against compile"]["got"] == 6
    assert verdicts["share of copy bandwidth"]["got"] == 50
    assert report.judgement(verdicts["against compile"]) == "short by 14 %"
    assert goals.judge(row(ours=1, eager=20) | dict(threads=1)) == []


@pytest.mark.parametrize("changes, wanted", [
    (dict(op="gate"), {"share of copy bandwidth": 80, "against eager": 6}),
    (dict(op="short_conv", direction=works.BOTH), {"backward: share of copy bandwidth": 70, "against eager": 8}),
    (dict(op="gate_conv"), {"share of copy bandwidth": 80, "against eager": 6, "against compile": 2.5}),
    (dict(op="gate_conv", direction=works.BOTH, branches=1),
     {"backward: share of copy bandwidth": 70, "against eager": 5, "against compile": 3}),
    (dict(op="embedding", row_bytes=128), {"share of copy bandwidth": 85}),
    (dict(op="embedding", row_bytes=64), {"share of copy bandwidth": 70}),
    (dict(op="embedding", direction=works.BACKWARD), {}),
    (dict(op="embedding_fp8"), {"share of copy bandwidth": 70}),
    (dict(op="embedding_int8"), {"share of copy bandwidth": 70}),
    (dict(op="module"), {}),
])
def test_goals_of_a_gpu(changes, wanted):
    """Whatever the number of CPU threads."""
    on_gpu = row(ours=1, eager=20, compile_a=9) | dict(device="cuda", threads=7, branches=4, row_bytes=256) | changes
    on_gpu["results"].append(dict(name=goals.BACKWARD_ALONE, group=goals.BACKWARD_ALONE, median_ms=1, gbs=15.0))
    assert {goal.text: goal.wanted for goal in goals.goals_of(on_gpu)} == pytest.approx(wanted)
    got = {"share of copy bandwidth": 50, "backward: share of copy bandwidth": 75, "against eager": 20,
           "against compile": 9}
    assert {verdict["goal"]: verdict["got"] for verdict in goals.judge(on_gpu)} == {goal: got[goal] for goal in wanted}


def test_the_document_of_a_gpu():
    facts = dict(name="Test GPU", capability="9.0", multiprocessors=4, memory_bytes=2**34, l2_bytes=2**25,
                 cuda="13.0", driver="580.1", clocks=[], kernels="9.0")
    one = row(ours=1, eager=20, compile_a=9) | dict(device="cuda", branches=4, row_bytes=256)
    records = [run.machine() | dict(gpu=facts), dict(kind="limits", device="cuda", threads=2, copy_gbs=4000.0),
               one | dict(goals=goals.judge(one))]
    text = report.markdown(records)
    assert "GPU: Test GPU, compute capability 9.0" in text and "driver 580.1, kernels for 9.0" in text
    assert "Limits, cuda: copy 4000.0 GB/s" in text and "2 of 3 met, on cuda." in text
    assert "| forward | A | float32 | cuda |" in text and "float32, cuda" in report.title(one)


def test_goals_alone_are_measured(monkeypatch, capsys):
    monkeypatch.setitem(goals.TABLE, ("gate_conv", works.BOTH, "tiny", "float32"), [goals.times_faster("eager", 1e-3)])
    assert tool("--op", "gate_conv", "gate", "--goals", "--threads", 2) == 0
    out = capsys.readouterr().out
    assert "gate_conv, forward + backward, tiny" in out and "met   against eager" in out
    assert "gate_conv, forward, tiny" not in out and "gate, " not in out


def test_ceilings():
    goal = goals.nanoseconds_per_token(12)
    assert not goal.judge(dict(tokens=1000, results=[dict(group="ours", median_ms=0.015)]))["met"]
    verdict = goal.judge(dict(tokens=1000, results=[dict(group="ours", median_ms=0.010)]))
    assert verdict["met"] and report.verdict_line(verdict) == "time per token: 10 ns, wanted at most 12 ns: met"


def test_the_document_says_what_falls_short_and_where_time_goes():
    short = row(ours=1, eager=20, compile_a=9, compile_b=6)
    text = report.markdown([short | dict(goals=goals.judge(short), profile={"engram::gate_conv": 0.97})])
    assert "1 of 3 met" in text and "| short by 14 % |" in text and "engram::gate_conv 97%" in text
    assert "| 1 (1-1; 9) | 10.0, 50% | 20.00x | 6.00x |" in text


def test_guard_fails_on_a_missed_ratio(monkeypatch, capsys):
    def only(factor):
        wanted = [goals.times_faster("torch", factor)]
        monkeypatch.setattr(goals, "GUARDS", [("ngram_hash", works.FORWARD, "tiny", "float32", wanted)])

    only(1e-3)
    assert run.main(["--guard"]) == 0
    only(1e6)
    threads = torch.get_num_threads()
    assert run.main(["--guard"]) == 1 and torch.get_num_threads() == threads
    assert "MISSED ngram_hash" in capsys.readouterr().out
    assert run.main(["--guard", "--json"]) == 1
    output, error = capsys.readouterr()
    record = json.loads(output)
    assert not record["ok"] and [guard["met"] for guard in record["guards"]] == [False] and "MISSED ngram_hash" in error


def test_profile_shows_our_ops(capsys):
    assert run.main(["--profile", "--op", "gate_conv", "--shape", "tiny", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "engram::gate_conv_backward" in out and "gate_conv, forward + backward, tiny, float32" in out


def test_profile_names_the_stages_of_the_layer(capsys):
    assert run.main(["--profile", "--op", "module", "--shape", "tiny", "--dtype", "float32",
                     "--direction", "forward"]) == 0
    out = capsys.readouterr().out
    assert "engram.projections" in out and "engram::embedding" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("way", [run.main, lambda arguments: cli.main(["bench", *arguments])])
def test_no_gpu_to_measure(way, capsys):
    assert way(["--device", "cuda"]) == 2
    assert "error: device cuda cannot be used: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    (["--device", "cuda", "--threads", "2"], "--threads has no meaning beside --device cuda"),
    (["--guard", "--device", "cuda"], "--device has no meaning beside --guard"),
    (["--guard", "--op", "gate"], "--op has no meaning beside --guard"),
    (["--profile", "--json", "file"], "--json has no meaning beside --profile"),
    (["--profile", "--json"], "--json has no meaning beside --profile"),
    (["--guard", "--json", "file"], "--json has no meaning beside --guard"),
    (["--rows", "file", "--quick"], "--quick has no meaning beside --rows"),
    (["--rows", "file", "--guard"], "not allowed with"),
    (["--op", "nothing"], "invalid choice"),
])
def test_wrong_usage(arguments, message, capsys):
    assert run.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_engram_bench_is_the_same_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))      # gives sys.path back afterwards
    assert cli.main(["bench", "--shape", "tiny", "--no-compiler", "--seconds", "0", "--op", "ngram_hash"]) == 0
    assert "ngram_hash, forward, tiny" in capsys.readouterr().out
    monkeypatch.setattr(engram, "__file__", str(tmp_path / "engram" / "__init__.py"))
    assert cli.main(["bench"]) == 2 and "pip install -e" in capsys.readouterr().err
