"""`engram train` by several ranks: launched by torchrun, stopped, resumed by another number, killed, contradicting."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

for module in ("tokenizers", "safetensors", "tqdm", "matplotlib"):
    pytest.importorskip(module)

SMALL = ("--vocab-size 300 --tokens 64 --length 16 --hidden-size 16 --heads 2 --layers 2 --table-size 101 --threads 1 "
         "--optimizer row-wise-adam").split()
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        lines = (f"def function_{i}_{j}(value): return value + {i * j}  # Value\n" for j in range(60))
        (folder / f"{i:02}.py").write_text("".join(lines))
    return folder


def train(texts: Path, out: Path, *options: object, ranks: int = 0) -> dict:
    """The record of a run, by torchrun where ranks are given."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "engram", "train", "--text", texts, "--out", out, *SMALL, "--json", *options]
    run = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def by_hand(texts: Path, out: Path, *options: list) -> list[subprocess.Popen]:
    """One process a list of options, as torchrun would start them; each of them can be killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank, own in enumerate(options):
        place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=len(options), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, "-m", "engram", "train", "--text", texts, "--out", out, *SMALL, *own]
        processes.append(subprocess.Popen(
            list(map(str, command)), env=ENVIRONMENT | {name: str(value) for name, value in place.items()}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return processes


def ends(processes: list[subprocess.Popen], seconds: float = 60) -> list[tuple[int, str]]:
    """Exit status and last line of stderr of each, which must end in time."""
    try:
        found = []
        for process in processes:
            _, errors = process.communicate(timeout=seconds)
            lines = [line for line in errors.splitlines() if line.startswith("engram: ")]
            found.append((process.returncode, lines[-1] if lines else errors))
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_two_ranks_train_like_one(texts, tmp_path):
    """The same held-out losses up to float32 order, also when two ranks stop half-way and three go on."""
    one = train(texts, tmp_path / "one", "--steps", 12)
    train(texts, tmp_path / "many", "--steps", 7, ranks=2)
    many = train(texts, tmp_path / "many", "--steps", 12, "--resume", ranks=3)
    assert many["ranks"] == 3 and many["step"] == 12 and many["parameters"] == one["parameters"]
    for name, loss in one["held_out"].items():
        assert abs(many["held_out"][name] - loss) < 1e-5 * loss
    assert sorted(path.name for path in (tmp_path / "many" / "checkpoint").iterdir()) == ["latest", "step-12"]


@pytest.mark.slow
def test_a_rank_that_is_killed(texts, tmp_path):
    """The other one ends soon, says why, and the last checkpoint is whole."""
    processes = by_hand(texts, tmp_path / "run", *[["--steps", "100000", "--save-every", "2"]] * 2)
    latest = tmp_path / "run" / "checkpoint" / "latest"
    deadline = time.monotonic() + 90
    while not latest.exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[1].kill()
    (status, message), (killed, _) = ends(processes)
    assert killed == -signal.SIGKILL and status in (1, 2)
    assert re.search(r"^engram: (rank 0 has lost another rank|error: .*cannot write)", message), message
    step = json.loads(latest.read_text())["step"]
    record = train(texts, tmp_path / "run", "--resume", "--steps", step + 1, ranks=2)
    assert record["step"] == step + 1


@pytest.mark.slow
def test_contradicting_ranks(texts, tmp_path):
    """Refused by both, at once."""
    for number, (options, message) in enumerate((
        ((["--table-size", "101"], ["--table-size", "103"]), "the same table_size, got 101 on rank 0 and 103 on rank 1"),
        (([], ["--resume"]), "the same resume, got False on rank 0 and True on rank 1"),
    )):
        for status, line in ends(by_hand(texts, tmp_path / str(number), *options)):
            assert status == 2 and message in line, line


def test_a_signal_while_ranks_ask_each_other():
    """It is for the next time they do, on all of them: neither lost nor seen by one alone."""
    from engram.cli.train import Signals

    class Two:
        comes = True

        def device_type(self):
            return "cpu"

        def gather(self, own):
            if self.comes:
                signals.note(signal.SIGTERM, None)
            return [own, torch.zeros_like(own)]

    signals, peers = Signals(), Two()
    assert signals.anywhere(peers) is None
    peers.comes = False
    assert signals.anywhere(peers) is signals.anywhere(peers) is signal.SIGTERM


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(texts, tmp_path):
    processes = by_hand(texts, tmp_path / "run", *[["--steps", "100000", "--save-every", "2"]] * 2)
    latest = tmp_path / "run" / "checkpoint" / "latest"
    deadline = time.monotonic() + 90
    while not latest.exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert [status for status, _ in ends(processes)] == [143, 143]


def test_no_destroyed_group_outlives_the_interpreter():
    """A thread of one that frees a tensor while the interpreter ends aborts the process, after everything went well."""
    script = """if True:
        import atexit
        import weakref
        import torch.distributed as dist
        group = None
        atexit.register(lambda: print("left" if group() else "gone"))  # before engram's, so it runs after it
        from engram.distributed.peers import Peers
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        peers = Peers()
        peers.cycle = peers
        group = weakref.ref(peers.group)
        dist.destroy_process_group()
        print("left" if group() else "gone")
    """
    run = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["left", "gone"]
