"""examples/compare.py on a tiny setting: the grid, resuming, what the report holds, wrong usage."""
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

import engram  # noqa: E402
from engram.models.corpus import IGNORE  # noqa: E402
from engram.models.lm import LanguageModel, ManifoldResidual, Residual  # noqa: E402
from engram.models.training import Trainee  # noqa: E402

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("compare", ROOT / "examples" / "compare.py")
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)

MODELS = ("vanilla", "vanilla-total", "streams+capacity1", "streams+engram")
TINY = ["--steps", "4", "--tokens", "64", "--length", "16", "--vocab-size", "300", "--hidden-size", "16", "--heads",
        "2", "--layers", "2", "--table-size", "101", "--lr", "0.01", "--device", "cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        lines = (f"def function_{i}_{j}(value): return value + {i * j}  # Value\n" for j in range(60))
        (folder / f"{i:02}.py").write_text("".join(lines))
    return folder


def run(text, out, *options):
    return compare.main([*TINY, "--text", str(text), "--out", str(out), *map(str, options)])


def lines(out):
    return (out / compare.RUNS).read_text().splitlines()


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert run(text, out, "--seeds", 0, 1, "--models", *MODELS) == 0
    return out


# The report


def test_the_table_holds_what_was_run(finished):
    page = (finished / compare.TABLE).read_text()
    records = [json.loads(line) for line in lines(finished)]
    assert [(r["seed"], r["model"]) for r in records] == [(seed, name) for seed in (0, 1) for name in MODELS]
    for name in MODELS:
        losses = [record["held_out"] for record in records if record["model"] == name]
        size = next(record["parameters"] for record in records if record["model"] == name)
        loss = f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
        assert f"| {name} | {size['total']:,} | {size['active']:,} | {loss} |" in page and f"* **{name}**" in page
    of = {(record["model"], record["seed"]): record["held_out"] for record in records}
    percent = [100 * (of["streams+engram", seed] / of["vanilla", seed] - 1) for seed in (0, 1)]
    row = f"{np.mean(percent):+.2f} ± {np.std(percent, ddof=1):.2f} | {percent[0]:+.2f}, {percent[1]:+.2f}"
    assert f"| streams+engram | vanilla | {row} | {sum(x < 0 for x in percent)} of 2 |" in page
    assert "vanilla+engram" not in page.split("## What this is not")[0]
    given = page.replace("\n", " ")
    assert "Seeds 0, 1." in given and records[-1]["date"] in given and records[0]["machine"] in given
    assert f"`python examples/compare.py --models {' '.join(MODELS)} --seeds 0 1 --text PATH --steps 4" in given
    assert str(finished) not in page and max(map(len, page.splitlines())) < 200


def test_the_figure_is_a_small_picture(finished):
    from PIL import Image

    with Image.open(finished / compare.FIGURE) as picture:
        assert picture.format == "PNG" and picture.width > 900
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 5
    assert (finished / compare.FIGURE).stat().st_size < 100_000


def test_a_record_adds_up(finished):
    for record in map(json.loads, lines(finished)):
        share = record["known_share"]
        assert 0 < share < 1
        assert math.isclose(share * record["known"] + (1 - share) * record["new"], record["held_out"], rel_tol=1e-4)
        assert record["curve"][-1] == [4, record["held_out"]] and record["step_ms"] > 0
        assert record["curve"][0][1] > record["curve"][-1][1]


@pytest.mark.parametrize("values, words", [
    ((-1.0, -1.2), "helps against streams: 1.10 % lower, with every seed"),
    ((1.0, 1.2), "does not help against streams: 1.10 % higher, with every seed"),
    ((-1.0, 0.4), "against streams: no clear difference, -0.30 %, lower with 1 of 2 seeds"),
    ((-0.1, -4.0), "no clear difference, -2.05 %, lower with 2 of 2 seeds"),  # the spread is wider than the mean
    ((-0.01, -0.01), "no clear difference"),
    ((-2.0,), "helps against streams: 2.00 % lower"),
])
def test_verdicts(values, words):
    of = dict(model="streams+engram", against="streams", **compare.statistic(list(values)))
    of |= dict(known=compare.statistic([-2.0]), new=compare.statistic([0.5]))
    said = compare.verdict(of)
    assert words in said and "Known targets -2.00 %, new ones +0.50 %" in said
    assert said.endswith("where it does not help.") == ("** helps" in said)


# Resuming


def test_an_interrupted_command_goes_on(text, finished, tmp_path, monkeypatch, capsys):
    steps, train_step = [], Trainee.train_step

    def interrupted(self, *arguments):
        steps.append(self.name)
        if len(steps) == 11:
            raise KeyboardInterrupt
        return train_step(self, *arguments)

    options = ("--seeds", 0, 1, "--models", *MODELS)
    monkeypatch.setattr(Trainee, "train_step", interrupted)
    assert run(text, tmp_path, *options) == 130
    assert "the same command goes on" in capsys.readouterr().err
    before = lines(tmp_path)
    assert len(before) == 2 and not (tmp_path / compare.TABLE).exists()
    with open(tmp_path / compare.RUNS, "a") as stream:
        stream.write('{"model": "vani')  # what a power cut may leave behind
    steps[:] = [None] * 11
    assert run(text, tmp_path, *options, "--report", tmp_path / "docs", "--json") == 0
    assert steps[11:] == [name for name in (*MODELS[2:], *MODELS) for _ in range(4)]
    assert lines(tmp_path)[:2] == before
    ours, theirs = ([json.loads(line) for line in lines(folder)] for folder in (tmp_path, finished))
    for key in ("model", "seed", "held_out", "curve", "known", "new", "parameters", "settings"):
        assert [record[key] for record in ours] == [record[key] for record in theirs]
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results["models"]) == set(MODELS) and results["seeds"] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "docs").iterdir()) == [compare.TABLE, compare.FIGURE]
    assert not (tmp_path / compare.TABLE).exists()

    # Started once more it trains nothing and writes the same page.
    page = (tmp_path / "docs" / compare.TABLE).read_text()
    del steps[11:]
    assert run(text, tmp_path, *options, "--report", tmp_path / "docs") == 0
    assert len(steps) == 11 and (tmp_path / "docs" / compare.TABLE).read_text() == page


def test_runs_older_than_a_setting(text, finished, tmp_path):
    """A setting that came later had its default in the runs before."""
    records = [json.loads(line) for line in lines(finished)]
    for record in records:
        del record["settings"]["warmup"]
    (tmp_path / compare.RUNS).write_text("".join(json.dumps(record) + "\n" for record in records))
    common = json.loads(lines(finished)[0])["settings"]
    assert len(compare.read_runs(tmp_path / compare.RUNS, common)) == len(records)
    with pytest.raises(compare.UsageError, match="runs with another warmup; use another --out"):
        compare.read_runs(tmp_path / compare.RUNS, common | {"warmup": 41})


def test_runs_of_other_settings_are_refused(text, finished, capsys):
    before = (finished / compare.RUNS).read_bytes()
    assert run(text, finished, "--steps", 5, "--embed-dim-per-head", 8) == 2
    assert "runs with another embed_dim_per_head, steps; use another --out" in capsys.readouterr().err
    assert run(ROOT / "csrc", finished) == 2
    assert "runs with another corpus; use another --out" in capsys.readouterr().err
    assert (finished / compare.RUNS).read_bytes() == before


def test_a_file_of_something_else_is_refused(text, tmp_path, capsys):
    (tmp_path / compare.RUNS).write_text('{"model": "vanilla"}\n')
    assert run(text, tmp_path) == 2
    assert "line 1, is no run of compare.py" in capsys.readouterr().err


# Wrong usage


@pytest.mark.parametrize("options, message", [
    (["--streams", "1"], "--streams must be at least 2, got 1"),
    (["--text-mib", "0"], "--text-mib must be at least 1, got 0"),
    (["--threads", "0"], "--threads must be at least 1, got 0"),
    (["--seeds", "1", "1"], "--seeds and --models must name each one once"),
    (["--seeds", "0", "-1"], "seed must not be negative, got -1"),
    (["--steps", "0"], "steps must be at least 1, got 0"),
    (["--mixing", "dynamic"], "mixing must be one of static, manifold, got dynamic"),
    (["--engram-layers", "2"], "engram_layers must lie in \\[0, layers = 2\\)"),
    (["--max-ngram-size", "1"], "max_ngram_size must be an integer >= 2, got 1"),
    (["--text", "nowhere"], "no such file or folder: nowhere"),
])
def test_wrong_settings(text, tmp_path, capsys, options, message):
    assert compare.main([*TINY, "--text", str(text), "--out", str(tmp_path), *options]) == 2
    captured = capsys.readouterr()
    assert re.search("compare.py: error: .*" + message, captured.err) and "Traceback" not in captured.err
    assert not (tmp_path / compare.RUNS).exists()


@pytest.mark.parametrize("options", [["--models", "other"], ["--steps", "many"], ["--seeds"], ["--no-such-flag"]])
def test_wrong_flags(options, capsys):
    with pytest.raises(SystemExit) as caught:
        compare.main(options)
    assert caught.value.code == 2 and "usage: compare.py" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_it(text, tmp_path, capsys):
    assert run(text, tmp_path, "--lr", 1e30, "--models", "vanilla") == 1
    assert "the vanilla's loss is" in capsys.readouterr().err


def test_help_needs_no_text():
    command = [sys.executable, str(ROOT / "examples" / "compare.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert all(part in done.stdout for part in ("vanilla-active", "--report", "--seeds", "--mixing", "--json"))


# The models


@pytest.fixture(scope="module")
def models():
    """At the default sizes."""
    options = compare.build_parser().parse_args([])
    token_map = engram.TokenMap([i % 3000 for i in range(4096)])
    return compare.model_configs(compare.settings(options), options, token_map), token_map


def test_parameters_match(models):
    configs, token_map = models
    size = {name: compare.parameters(config, token_map) for name, config in configs.items()}
    full = size["streams+engram"]
    assert full["total"] > 2 * full["active"]
    assert abs(size["vanilla-total"]["total"] / full["total"] - 1) < 0.005
    assert abs(size["vanilla-active"]["total"] / full["active"] - 1) < 0.005
    assert size["streams+capacity1"]["active"] == full["active"] == size["streams+capacity1"]["total"]
    assert size["vanilla"]["active"] < size["streams"]["active"] < full["active"]
    assert size["vanilla"]["total"] < size["vanilla+engram"]["active"] < full["active"]
    widths = [configs[name].hidden_size for name in ("vanilla", "vanilla-active", "vanilla-total")]
    assert widths[0] == widths[1] < widths[2]


@pytest.mark.parametrize("name", compare.MODELS)
def test_parameters_are_counted(models, name):
    configs, token_map = models
    model = LanguageModel(configs[name], token_map)
    assert compare.parameters(configs[name], token_map)["total"] == sum(p.numel() for p in model.parameters())
    wide = name.startswith("streams")
    kinds = {type(block.attention_residual) for block in model.blocks}
    assert kinds == {ManifoldResidual if wide else Residual} and model.config.branches == (4 if wide else 1)
    assert bool(model.engrams) == name.endswith(("+engram", "+capacity1"))


def test_capacity_one_remembers_nothing(models):
    configs, token_map = models
    layer = LanguageModel(configs["streams+capacity1"], token_map).engrams["1"]
    rows = layer.hash(torch.randint(4096, (2, 50)))
    assert (rows == torch.arange(rows.shape[-1])).all() and len(layer.embedding.weight) == rows.shape[-1]


def test_familiar_is_a_set_of_trigrams():
    draw = np.random.default_rng(0)

    def batch(rows):
        stream = torch.from_numpy(draw.integers(0, 4, (rows, 13)))
        targets = stream[:, 1:].clone()
        targets[torch.from_numpy(draw.random((rows, 12)) < 0.2)] = IGNORE
        return stream[:, :-1].contiguous(), targets, torch.zeros_like(targets)

    held_out, training = [batch(3), batch(2)], [batch(1) for _ in range(4)]
    familiar = compare.Familiar(held_out, vocab_size=4)
    for each in training:
        familiar.note(each)

    def trigrams(tokens, targets):
        for row, goals in zip(tokens.tolist(), targets.tolist()):
            for t, goal in enumerate(goals):
                yield (row[t - 1], row[t], goal) if t and goal != IGNORE else None

    seen = {trigram for tokens, targets, _ in training for trigram in trigrams(tokens, targets)} - {None}
    assert 5 < len(seen) < 60
    counted = marked = 0
    for (tokens, targets, _), (_, known, _), (_, new, _) in zip(held_out, *familiar.split(held_out)):
        expected = torch.tensor([trigram in seen for trigram in trigrams(tokens, targets)]).view_as(targets)
        assert torch.equal(known, targets.where(expected, IGNORE))
        assert torch.equal(new, targets.where(~expected, IGNORE))
        counted, marked = counted + int((targets >= 0).sum()), marked + int(expected.sum())
    assert familiar.share(held_out) == marked / counted
