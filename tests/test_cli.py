"""The command line, in this process and, for signals, in one of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engram
from samples import DIFFERENTIABLE
from engram import cli, ops
from engram.cli import check
from engram.cli import train as train_command
from engram.cli.errors import UsageError

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

SMALL = "--vocab-size 300 --tokens 64 --length 16 --hidden-size 16 --heads 2 --layers 2 --table-size 101".split()


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        lines = (f"def function_{i}_{j}(value): return value + {i * j}  # Value\n" for j in range(60))
        (folder / f"{i:02}.py").write_text("".join(lines))
    return folder


def call(capsys, *arguments):
    """Exit status, lines of stdout, stderr."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def call_json(capsys, *arguments):
    """Exit status, the one JSON object that stdout must be, lines of stderr."""
    status, lines, error = call(capsys, *arguments, "--json")
    assert len(lines) == 1, lines
    return status, json.loads(lines[0], parse_constant=pytest.fail), error.splitlines()


def train_arguments(texts, out, *arguments):
    return ["train", "--text", texts, "--out", out, *SMALL, *arguments]


def train(capsys, texts, out, *arguments):
    return call(capsys, *train_arguments(texts, out, *arguments))


def no_difference(one, other):
    """Whether two checkpoints hold the same tensors, bit for bit."""
    from safetensors.torch import load_file

    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_plan(capsys):
    arguments = ["--preset", "demo", "--ranks", 3, "--tokens", 100, "--dtype", "float32"]
    status, record, lines = call_json(capsys, "plan", *arguments)
    assert status == 0 and [plan["sharding"] for plan in record["plans"]] == ["rows", "heads", "strided-heads"]
    assert "demo: layers 1, 15, 16 heads each, 20,692,406 rows of 64 x float32, 5.3 GB" in lines[0]
    assert any(line.split()[-6:] == ["1.77", "GB", "1.99", "GB", "1.99", "GB"] for line in lines)
    status, lines, _ = call(capsys, "plan", "--preset", "deepseek-v4.1-flash", "--ranks", 8, "--tokens", 32768)
    text = "\n".join(lines)
    assert status == 0 and text.strip() in (Path(__file__).parents[1] / "docs/distributed.md").read_text()
    assert "768,022,850 rows of 256 x float8_e4m3fn, 203 GB" in text and text.count("25.3 GB") == 3
    for options, message in (
        (["--preset", "nope"], "preset must be one of"), (["--ranks", 0], "ranks must be at least 1, got 0"),
        (["--optimizer", "adam"], "optimizer must be one of"), (["--bandwidth", 0], "bandwidth must be positive"),
    ):
        status, _, error = call(capsys, "plan", *options)
        assert status == 2 and message in error and error.count("\n") == 1


# what all commands have in common


COMMANDS = {  # arguments, keys of the record, and a part of the text
    "report": ([], {"version", "torch", "compiler", "cpu", "cuda"}, "threads"),
    "check": (["--device", "cpu"], {"ok", "checks"}, " good"),
    "train": ([*SMALL, "--steps", 1, "--text", "texts", "--out", "run"], {"held_out", "step"}, "held-out loss after 1"),
    "inspect": (["demo"], {"config", "sizes"}, "table bytes"),
    "plan": (["--preset", "demo"], {"config", "plans"}, "backward, sends"),
    "bench": (["--op", "ngram_hash", "--shape", "tiny", "--no-compiler", "--seconds", 0], {"records"}, "ngram_hash"),
    "all": ([*SMALL, "--steps", 1, "--text", "texts", "--out", "run"], {"build", "check", "train"}, "held-out loss"),
}


def test_the_commands_are_all():
    (commands,) = (action for action in cli.build_parser()._actions if action.dest == "COMMAND" or action.choices)
    assert set(commands.choices) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_of_every_command(capsys, texts, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(engram.__file__).parents[1]))  # where the benchmarks are
    benchmarks = pytest.importorskip("benchmarks.run") if command == "bench" else None
    if benchmarks is not None:
        monkeypatch.setitem(benchmarks.SHAPES, "tiny", replace(benchmarks.SHAPES["A"], batch=1, tokens=12))
        monkeypatch.setattr(benchmarks.limits, "COPY_BYTES", 2**16)
        monkeypatch.setitem(benchmarks.TABLES, "1GB", 2**16)
    arguments, keys, words = COMMANDS[command]
    status, record, text = call_json(capsys, command, *arguments)
    assert status == 0 and record.keys() >= keys and "error" not in record
    assert any(words in line for line in text)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_of_every_command(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    status, record, text = call_json(capsys, command, "--no-such-option")
    assert status == 2 and record.keys() == {"error"} and len(text) == 1 and text[0].endswith(record["error"])
    status, lines, error = call(capsys, command, "--no-such-option")
    assert status == 2 and not lines and error == text[0] + "\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error, status, message", [
    (UsageError("not so"), 2, "not so"),
    (RuntimeError("broken"), 1, "RuntimeError: broken"),
    (KeyboardInterrupt(), 130, "interrupted"),
])
def test_what_goes_wrong_is_json_too(capsys, monkeypatch, error, status, message):
    def run(options):
        print("begun")
        raise error

    monkeypatch.setattr(cli.report, "run", run)
    got, record, text = call_json(capsys, "report")
    assert (got, record) == (status, {"error": message}) and text[0] == "begun" and message in text[-1]


def test_json_has_no_nan(capsys, monkeypatch):
    record = {"nan": float("nan"), "list": [float("inf"), 1.5, (-float("inf"),)], "none": None, "text": "nan"}
    monkeypatch.setattr(cli.report, "run", lambda options: (0, record))
    assert call_json(capsys, "report")[1] == {"nan": None, "list": [None, 1.5, [None]], "none": None, "text": "nan"}


def test_only_the_first_rank_prints_json(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert call(capsys, "plan", "--ranks", 0, "--json")[:2] == (2, [])
    monkeypatch.setenv("RANK", "0")
    assert call_json(capsys, "plan", "--ranks", 0)[0] == 2


# report and check


def test_report(capsys):
    status, record, lines = call_json(capsys, "report")
    assert status == 0 and record == engram.build_info()
    text = "\n".join(lines)
    for part in (engram.__version__, torch.__version__, engram.build_info()["compiler"], engram.build_info()["cpu"]):
        assert part in text


def test_check_covers_every_operator_and_dtype(capsys):
    status, record, lines = call_json(capsys, "check", "--device", "cpu")
    assert status == 0 and record["ok"] and len(lines) == len(record["checks"]) + 1
    done = {(entry["op"], entry["dtype"]) for entry in record["checks"]}
    floats = {"float64", "float32", "bfloat16", "float16"}
    integer = {"ngram_hash", "row_plan"}
    expected = {(op, d) for op in ops.__all__ for d in (["int64"] if op in integer else floats)}
    assert done == expected
    assert {e["op"] for e in record["checks"] if e["gradients"] is not None} == set(DIFFERENTIABLE)


@pytest.mark.parametrize("what", ["forward", "gradient", "raises", "nan"])
def test_check_finds_a_fault(capsys, monkeypatch, what):
    good = ops.gate

    def faulty(hidden, key, value, *weights, **options):
        if what == "raises":
            raise RuntimeError("no such kernel")
        out = good(hidden, key, value, *weights, **options)
        if what == "forward":
            return out * 1.05
        if what == "nan":
            return out * torch.nan
        return out + 0.05 * (value - value.detach()).unsqueeze(-2)

    monkeypatch.setattr(ops, "gate", faulty)
    status, record, lines = call_json(capsys, "check")
    entries = record["checks"]
    assert status == 1
    assert {entry["op"] for entry in entries if not entry["ok"]} == {"gate"}
    assert all(not entry["ok"] for entry in entries if entry["op"] == "gate")
    assert "4 FAILED" in lines[-1]


def test_check_finds_a_wrong_row(capsys, monkeypatch):
    good = ops.ngram_hash

    def faulty(*arguments, **options):
        rows = good(*arguments, **options)
        rows[0, 0, 0, 0] += 1
        return rows

    monkeypatch.setattr(ops, "ngram_hash", faulty)
    status, lines, _ = call(capsys, "check")
    assert status == 1 and [line.split()[0] for line in lines if line.endswith("FAILED")][0] == "ngram_hash"


@pytest.mark.skipif(torch.cuda.is_available() and bool(engram.build_info()["cuda"]), reason="CUDA can be used here")
def test_a_device_that_is_not_there(capsys, texts, tmp_path):
    for arguments in (["check", "--device", "cuda"], ["train", "--text", texts, "--device", "cuda", "--out", tmp_path]):
        status, _, error = call(capsys, *arguments)
        assert status == 2 and error.startswith("engram: error: device cuda cannot be used: ")


# train


def test_train_writes_everything_and_resumes_bit_for_bit(capsys, texts, tmp_path):
    status, record, lines = call_json(capsys, *train_arguments(texts, tmp_path / "straight", "--steps", 6))
    assert status == 0
    assert record["step"] == 6 and record["parameters"]["engram"] > record["parameters"]["baseline"]
    losses = record["held_out"]
    assert record["difference_percent"] == pytest.approx(100 * (losses["engram"] / losses["baseline"] - 1))
    assert any(f"{record['parameters']['baseline']:,} parameters" in line for line in lines)
    assert any(f"{losses['engram']:.4f}" in line for line in lines)
    assert sorted(p.suffix for p in (tmp_path / "straight").iterdir()) == [".json", ".png", ".safetensors"]
    assert (tmp_path / "straight" / "losses.png").read_bytes().startswith(b"\x89PNG")

    out = tmp_path / "resumed"
    assert train(capsys, texts, out, "--steps", 3)[0] == 0
    status, record, lines = call_json(capsys, "train", "--resume", "--steps", 6, "--out", out)
    assert status == 0 and record["held_out"] == losses
    assert any(line.startswith("resumed at step 3") for line in lines)
    assert no_difference(out / "checkpoint.safetensors", tmp_path / "straight" / "checkpoint.safetensors")


def test_resume_refuses_other_settings(capsys, texts, tmp_path):
    status, _, error = call(capsys, "train", "--resume", "--out", tmp_path / "none")
    assert status == 2 and error == f"engram: error: no checkpoint at {tmp_path}/none/checkpoint.safetensors\n"
    train(capsys, texts, tmp_path / "run", "--steps", 2)
    status, _, error = call(capsys, "train", "--resume", "--steps", 1, "--out", tmp_path / "run")
    assert status == 2 and "is at step 2 already, past --steps 1" in error
    status, _, error = call(capsys, "train", "--resume", "--lr", 0.5, "--out", tmp_path / "run")
    assert status == 2 and "--lr 0.5 contradicts" in error and "started with 0.003" in error
    assert call(capsys, "train", "--resume", "--out", tmp_path / "run")[0] == 0  # nothing left to do
    (texts / "00.py").write_text("changed\n")
    status, _, error = call(capsys, "train", "--resume", "--out", tmp_path / "run")
    assert status == 2 and "was trained on another text" in error


def test_an_earlier_checkpoint_is_kept(capsys, texts, tmp_path):
    train(capsys, texts, tmp_path / "run", "--steps", 1)
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    status, lines, _ = train(capsys, texts, tmp_path / "run", "--steps", 2)
    assert status == 0 and any("kept the checkpoint of an earlier run" in line for line in lines)
    assert (tmp_path / "run" / "checkpoint.previous.safetensors").read_bytes() == before


def test_steps_from_the_environment(capsys, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGRAM_TRAIN_STEPS", "2")
    assert call_json(capsys, *train_arguments(texts, tmp_path / "a"))[1]["step"] == 2
    assert call_json(capsys, *train_arguments(texts, tmp_path / "b", "--steps", 1))[1]["step"] == 1
    monkeypatch.setenv("ENGRAM_TRAIN_STEPS", "many")
    status, _, error = train(capsys, texts, tmp_path / "c")
    assert status == 2 and error == "engram: error: ENGRAM_TRAIN_STEPS must be an integer, got 'many'\n"


def test_without_a_command_everything_runs(capsys, texts, tmp_path):
    status, record, lines = call_json(capsys, "--text", texts, "--out", tmp_path / "run", *SMALL, "--steps", 1,
                                      "--branches", 4)
    assert status == 0 and record.keys() == {"build", "check", "train"} and record["check"]["ok"]
    order = [next(i for i, line in enumerate(lines) if line.startswith(start))
             for start in ("engram    ", "check: ", "held-out loss after 1 step")]
    assert order == sorted(order)


def test_a_failed_check_stops_before_training(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "measure", lambda *_: (1.0, 1.0))
    status, _, _ = call(capsys, "--out", tmp_path / "run")
    assert status == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--text", "nowhere"], "no such file or folder: .*nowhere"),
        (["--tokens", 100, "--length", 16], "tokens must be a multiple of length = 16, got 100"),
        (["--steps", 0], "steps must be at least 1, got 0"),
        (["--threads", 0], "--threads must be at least 1, got 0"),
        (["--save-every", 0], "--save-every must be at least 1, got 0"),
        (["--length", 4096, "--tokens", 4096], "too little text: the .* part has .* at least 4097 are needed"),
    ],
)
def test_wrong_usage_is_one_line(capsys, texts, tmp_path, arguments, message):
    status, _, error = call(capsys, "train", "--text", texts, "--out", tmp_path / "run", *arguments)
    assert status == 2 and error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_an_output_folder_that_is_a_file(capsys, texts, tmp_path):
    (tmp_path / "run").write_text("")
    status, _, error = train(capsys, texts, tmp_path / "run")
    assert status == 2 and error == f"engram: error: {tmp_path}/run: File exists\n"


@pytest.mark.parametrize("module", ["tokenizers", "safetensors", "tqdm", "matplotlib"])
def test_a_missing_extra(capsys, monkeypatch, module, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    status, _, error = call(capsys, "train", "--out", tmp_path / "run")
    assert status == 2
    assert error == f"engram: error: {module} is not installed; run: python -m pip install {module}\n"


def test_divergence_is_reported(capsys, texts, tmp_path):
    arguments = train_arguments(texts, tmp_path / "run", "--steps", 60, "--lr", "1e30")
    status, record, lines = call_json(capsys, *arguments)
    assert status == 1 and lines[-1] == f"engram: {record['error']}"
    assert record["error"].startswith("the ") and "try a smaller lr" in record["error"]


def test_help_and_version(capsys):
    status, lines, _ = call(capsys, "train", "--help")
    assert status == 0
    text = "\n".join(lines)
    for part in ("--text", "--steps", "--resume", "--branches", "--json", "ENGRAM_TRAIN_STEPS"):
        assert part in text
    status, lines, _ = call(capsys, "--help")
    assert status == 0 and "report" in "\n".join(lines)
    assert call(capsys, "--version")[1] == [f"engram {engram.__version__}"]
    assert call(capsys, "no-such-command")[0] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_continues_bit_for_bit(capsys, texts, tmp_path, number):
    out = tmp_path / "run"
    options = ["train", "--text", str(texts), *SMALL, "--steps", "100000", "--out", str(out), "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "engram", *options, "--save-every", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "checkpoint.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number and not error
    assert f"stopped by {number.name}; saved step " in output
    step = int(output.split("saved step ")[1].split()[0])
    assert sorted(path.name for path in out.iterdir())[:2] == ["checkpoint.safetensors", "losses.png"]

    threads = torch.get_num_threads()
    try:
        status, lines, _ = call(capsys, "train", "--resume", "--steps", step + 2, "--out", out, "--threads", 1)
        assert status == 0 and any(line.startswith(f"resumed at step {step} ") for line in lines)
        train(capsys, texts, tmp_path / "straight", "--steps", step + 2, "--threads", 1)
    finally:
        torch.set_num_threads(threads)
    assert no_difference(out / "checkpoint.safetensors", tmp_path / "straight" / "checkpoint.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.11, 0.37])
def test_killed_while_saving(texts, tmp_path, delay):
    """Without any warning, in a run that saves all the time: there is a whole checkpoint, and it goes on from there."""
    from engram.models.training import read_metadata
    from safetensors.torch import load_file

    out = tmp_path / "run"
    command = [sys.executable, "-m", "engram", "train", "--text", str(texts), *SMALL, "--out", str(out), "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([*command, "--steps", "100000", "--save-every", "1"], env=environment,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint, deadline = out / "checkpoint.safetensors", time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.wait()
    step = int(read_metadata(checkpoint)["step"])
    assert step >= 1 and load_file(checkpoint)
    again = subprocess.run([*command, "--resume", "--steps", str(step + 1)], env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and f"resumed at step {step} " in again.stdout, again.stderr


def test_a_second_signal_ends_at_once():
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell
    with train_command.Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.caught == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
