"""What benchmarks/gpu.sh runs after the build, tried on the CPU: steps, limits of time, the two files."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from benchmarks import gpu  # noqa: E402
from benchmarks.gpu import Step, perform  # noqa: E402

ROOT = Path(__file__).parents[1]


def python(code: str, seconds: float = 60, **options) -> Step:
    return Step("a step", (sys.executable, "-c", code), seconds, **options)


def test_how_a_step_ends():
    good = perform(python("print('one'); print('two')"), 60)
    assert good["status"] == "good" and good["last"] == "two" and "output" not in good
    bad = perform(python("import sys; print('why', file=sys.stderr); sys.exit(3)"), 60)
    assert bad["status"] == "FAILED" and bad["output"] == "why\n"
    late = perform(python("import time; print('begun', flush=True); time.sleep(60)"), 1)
    assert late["status"] == "OUT OF TIME" and late["last"] == "begun" and late["seconds"] < 30
    variable = perform(python("import os; print(os.environ['NAME'])", environment=(("NAME", "value"),)), 60)
    assert variable["last"] == "value"


def test_what_is_not_run_says_why():
    assert perform(python("", needs="no-such-program"), 60)["last"] == "there is no no-such-program here"
    assert perform(python(""), 0)["status"] == "OUT OF TIME"


def test_both_files(tmp_path, monkeypatch, capsys):
    """The real check and a real, small benchmark; a step that fails does not keep the next from running."""
    every_step = gpu.steps

    def steps(device, folder):
        every = {step.name: step for step in every_step(device, folder)}
        bench = every["benchmarks of the ops, bfloat16"]
        small = ("--op", "ngram_hash", "--shape", "A1", "--seconds", "0", "--no-compiler")
        return [every["every op against the float64 reference"], python("import sys; sys.exit('broken')"),
                Step(bench.name, (*bench.command, *small), 60), python("", needs="no-such-program")]

    monkeypatch.setattr(gpu, "steps", steps)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--built-in", "12"]) == 1
    assert "not good:; a step" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "cpu.json").read_text().splitlines()]
    ended = [record["status"] for record in records if record["kind"] == "step"]
    assert ended == ["good", "good", "FAILED", "good", "skipped"]
    assert [record["kind"] for record in records].count("machine") == 1
    assert any(record["kind"] == "row" and record["op"] == "ngram_hash" for record in records)
    text = (tmp_path / "cpu.md").read_text()
    assert "| every op against the float64 reference | good |" in text and re.search(r"check: (\d+) of \1 good", text)
    assert "```text\nbroken\n```" in text and "### ngram_hash" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_steps_name_what_exists(device, tmp_path):
    """Test files that are there, and options that the benchmarks take."""
    for step in gpu.steps(device, tmp_path):
        arguments = list(step.command)
        files = [part for part in arguments if part.startswith("tests/")]
        assert all((ROOT / file).exists() for file in files)
        if "benchmarks.run" in arguments:
            parsed = gpu.run.parser_of("bench").parse_args(arguments[arguments.index("benchmarks.run") + 1:])
            assert parsed.device == device and parsed.json.parent == tmp_path
    assert sum(step.seconds for step in gpu.steps(device, tmp_path)) > gpu.TOTAL_SECONDS    # the whole is limited


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit) as exit:
        gpu.main([])
    assert exit.value.code == 2 and "device cuda cannot be used" in capsys.readouterr().err
    done = subprocess.run(["bash", ROOT / "benchmarks" / "gpu.sh"], env=os.environ | dict(PYTHON=sys.executable),
                          capture_output=True, text=True)
    assert done.returncode == 2 and "gpu.sh: torch sees no GPU here" in done.stdout
