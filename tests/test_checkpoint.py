"""Reference checkpoints through files: every dialect, in shards and ranges; whatever is wrong is refused as a whole."""
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_golden import load, part, relative

from engram import EngramConfig, TokenMap, nn
from engram.checkpoint import INDEX, load_reference_checkpoint, read_header, save_reference_checkpoint
from engram.models.hybrid import EngramLayer

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

SMALL = dict(hidden_size=64, vocab_size=50, embed_dim_per_head=32, heads_per_ngram=2, table_size=31, pad_id=1)
DIALECTS = {
    "demo": ("demo", dict(branches=2, layer_ids=(1, 4), conv_init="default")),
    "v41": ("deepseek-v4.1-flash", dict(branches=2, layer_ids=(1, 4), compressed_vocab_size=40)),
    "v41 float": ("deepseek-v4.1-flash", dict(branches=2, compressed_vocab_size=40, table_dtype=torch.float32)),
    "qwen": ("qwen3.8-flash-next", dict(branches=2, eos_id=3, table_dtype=torch.float32)),
    "branch-gate": ("branch-gate", dict(branches=3)),
    "hybrid": ("hybrid-layer", dict(table_size=50, pad_id=0)),
}


def layer_of(dialect, seed=0):
    preset, fields = DIALECTS[dialect]
    config = EngramConfig.preset(preset, **SMALL | fields)
    torch.manual_seed(seed)
    if config.layout == "hybrid":
        layer = EngramLayer.from_config(config)
    else:
        layer = nn.Engram(config, config.layer_ids[0])
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.copy_(torch.randn(tensor.shape))
            elif tensor.dtype == torch.float8_e8m0fnu:
                tensor.copy_(torch.exp2(torch.randint(-3, 4, tensor.shape).float()))
            elif tensor.is_floating_point():
                tensor.normal_()
    return layer


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(bits(one[name]).equal(bits(other[name])) for name in one)


def published(layer, prefix=""):
    return {prefix + name: tensor.contiguous() for name, tensor in layer.to_reference_state_dict().items()}


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 24])
def test_loading_is_load_reference_state_dict(tmp_path, dialect, chunk_bytes):
    source, path = layer_of(dialect), tmp_path / "model.safetensors"
    tensors = published(source, "layers.7.")
    others = {"layers.70.weight": torch.zeros(3), "norm.weight": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors | others, path)
    expected, got = layer_of(dialect, 1), layer_of(dialect, 2)
    expected.load_reference_state_dict({name.removeprefix("layers.7."): value for name, value in tensors.items()})
    assert not same(got, expected)
    calls = []
    progress = lambda *call: calls.append(call)  # noqa: E731
    load_reference_checkpoint(got, path, "layers.7.", chunk_bytes=chunk_bytes, progress=progress)
    assert same(got, expected)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert calls[-1] == (size, size) and [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert len(calls) > 20 or chunk_bytes > 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 24])
def test_saving_is_to_reference_state_dict(tmp_path, dialect, chunk_bytes):
    layer, path = layer_of(dialect), tmp_path / "model.safetensors"
    calls = []
    save_reference_checkpoint(layer, path, "a.", metadata={"format": "pt"}, chunk_bytes=chunk_bytes,
                              progress=lambda *call: calls.append(call))
    expected, got = published(layer, "a."), load_file(path)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]).equal(bits(tensor)), name
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert calls[-1][0] == calls[-1][1] == sum(tensor.nbytes for tensor in expected.values())
    loaded, again = layer_of(dialect, 1), layer_of(dialect, 2)
    load_reference_checkpoint(loaded, path, "a.")
    save_reference_checkpoint(loaded, path, "a.", chunk_bytes=chunk_bytes)
    load_reference_checkpoint(again, path, "a.")
    assert same(again, loaded)  # what has been through a quantised file once comes back as it is
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_both_readers_read_what_either_writer_writes(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int64), "c": torch.zeros(0, 4),
               "d": torch.tensor(2.5), "e": torch.ones(3, dtype=torch.bool), "f": torch.ones(2, dtype=torch.float16)}
    save_file(tensors, tmp_path / "a.safetensors", {"x": "y"})
    found = read_header(tmp_path / "a.safetensors")
    assert {name: entry.shape for name, entry in found.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    with open(tmp_path / "a.safetensors", "rb", buffering=0) as file:
        for name, entry in found.items():
            assert entry.read({entry.file: file}, 0, entry.rows).equal(tensors[name]), name


def test_published_weights(tmp_path):
    golden = load("frankenstein")
    save_file(part(golden, "sd."), tmp_path / "hybrid.safetensors")
    layer = EngramLayer(24, 101, engram_n_heads_per_ngram=2, engram_embed_dim_per_head=4)
    load_reference_checkpoint(layer, tmp_path / "hybrid.safetensors", chunk_bytes=100)
    assert relative(layer(golden["x"], golden["ids"]), golden["out"]) < 1e-5


def test_a_model_of_several_layers_in_shards(tmp_path):
    preset, fields = DIALECTS["demo"]
    config = EngramConfig.preset(preset, **SMALL | fields)
    models = [torch.nn.ModuleList([nn.Engram(config, layer) for layer in config.layer_ids]) for _ in range(3)]
    tensors = {}
    for layer in models[0]:
        tensors |= published(layer, f"model.layers.{layer.layer_id}.engram.")
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number}-of-3.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[number::3], file)
    files = sorted(tmp_path.glob("*.safetensors"))
    prefix = "model.layers.{layer}.engram."
    load_reference_checkpoint(models[1], files, prefix)
    assert same(models[0], models[1])
    load_reference_checkpoint(models[2], tmp_path, prefix)
    assert same(models[0], models[2])
    # An index may name files of other tensors: they are not opened.
    weight_map["model.norm.weight"] = "not-downloaded.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    for path in (tmp_path, str(tmp_path / INDEX)):
        model = torch.nn.ModuleList([nn.Engram(config, layer) for layer in config.layer_ids])
        load_reference_checkpoint(model, path, prefix)
        assert same(models[0], model)
    saved = tmp_path / "all.safetensors"
    save_reference_checkpoint(models[0], saved, prefix)
    assert load_file(saved).keys() == tensors.keys()
    save_reference_checkpoint(models[0], saved, "blocks.{name}.")
    assert "blocks.1.value_proj.weight" in load_file(saved)


def test_a_table_in_numbered_shards(tmp_path):
    source = layer_of("qwen")
    tensors = published(source, "ple.")
    name = "ple.ple_embedding.ngram_embedding.weight"
    table = tensors.pop(name)
    for number, rows in enumerate(table.split([7, 50, len(table) - 57])):
        shard = name.replace("weight", f"shard_{number}.weight")
        save_file({shard: rows.contiguous()}, tmp_path / f"table-{number}.safetensors")
    save_file(tensors, tmp_path / "rest.safetensors")
    layer = layer_of("qwen", 1)
    load_reference_checkpoint(layer, tmp_path, "ple.", chunk_bytes=999)
    assert same(layer, source)
    (tmp_path / "table-1.safetensors").unlink()
    before = layer_of("qwen", 1)
    with pytest.raises(ValueError, match=r"ngram_embedding.weight must be \[256, 32\], got \[7, 32\], \[199, 32\]; in"):
        load_reference_checkpoint(before, tmp_path, "ple.")


def test_from_float_and_half_files(tmp_path):
    source = layer_of("demo")
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in published(source).items()}
    save_file(tensors, tmp_path / "half.safetensors")
    layer = layer_of("demo", 1)
    load_reference_checkpoint(layer, tmp_path / "half.safetensors")
    assert layer.embedding.weight.dtype == torch.float32
    assert layer.embedding.weight.equal(source.embedding.weight.to(torch.bfloat16).float())


def test_on_the_meta_device_and_after(tmp_path):
    source, path = layer_of("v41"), tmp_path / "model.safetensors"
    save_reference_checkpoint(source, path)
    load_reference_checkpoint(source, path)  # its projections are as they are in the file now
    empty = nn.Engram(source.config, 1, device="meta")
    with pytest.raises(RuntimeError, match="the module is on the meta device; call to_empty"):
        load_reference_checkpoint(empty, path)
    with pytest.raises(RuntimeError, match="the module is on the meta device"):
        save_reference_checkpoint(empty, path)
    empty = empty.to_empty(device="cpu")
    empty.hash.moduli.zero_()  # whatever was in memory
    with pytest.raises(RuntimeError, match=r"hash constants of layer 1 are not set; call hash.reset_parameters\(\)"):
        load_reference_checkpoint(empty, path)
    empty.hash.reset_parameters()
    load_reference_checkpoint(empty, path)
    assert same(empty, source)
    hybrid, path = layer_of("hybrid"), tmp_path / "hybrid.safetensors"
    save_reference_checkpoint(hybrid, path)
    empty = EngramLayer.from_config(EngramConfig.preset("hybrid-layer", **SMALL | DIALECTS["hybrid"][1]), device="meta")
    empty = empty.to_empty(device="cpu")
    load_reference_checkpoint(empty, path)
    assert same(empty, hybrid) and empty.multipliers.equal(hybrid.multipliers) and empty.moduli.equal(hybrid.moduli)


MEMORY = """
import resource, sys, torch
from engram import EngramConfig, nn
from engram.checkpoint import load_reference_checkpoint, save_reference_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

layer = nn.Engram(EngramConfig.from_dict(eval(sys.argv[3])), 1)
warm = nn.Engram(EngramConfig.from_dict(eval(sys.argv[3]) | dict(table_size=10)), 1)
save_reference_checkpoint(warm, sys.argv[2] + ".small")
load_reference_checkpoint(warm, sys.argv[2] + ".small")
before = peak()
if sys.argv[1] == "load":
    load_reference_checkpoint(layer, sys.argv[2])
    assert not any(rows.any() for rows in layer.embedding.weight.split(10_000))
else:
    save_reference_checkpoint(layer, sys.argv[2])
print(peak() - before, layer.embedding.weight.nbytes / 2**20)
"""


@pytest.mark.parametrize("what", ["load", "save"])
def test_memory_is_that_of_a_chunk(tmp_path, what):
    path = tmp_path / "big.safetensors"
    fields = dict(hidden_size=8, vocab_size=50, heads_per_ngram=1, embed_dim_per_head=64, table_size=800_000,
                  layer_ids=(1,), max_ngram_size=2)
    if what == "load":  # float64 zeros, twice as large as the table; the file is a hole
        layer = nn.Engram(EngramConfig(**fields), 1, device="meta")
        write_hole(path, {name: ("F64" if tensor.is_floating_point() else "I64", list(tensor.shape))
                          for name, tensor in layer.to_reference_state_dict().items()})
    done = subprocess.run([sys.executable, "-c", MEMORY, what, str(path), repr(fields)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0, done.stderr
    more, table = map(float, done.stdout.split())
    assert table > 190 and more < 64, f"{more:.0f} MiB more for a table of {table:.0f} MiB"


def write_hole(path, tensors):
    """A safetensors file of zeros that takes no room: `tensors` is name to (dtype, shape)."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = torch.Size(shape).numel() * 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


# --------------------------------------------------------------------------------------------------- what is refused


def refused(layer, path, message, error=ValueError, prefix="", **options):
    """That the path is refused with these words, and the layer is left as it is."""
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(error, match=message):
        load_reference_checkpoint(layer, path, prefix, **options)
    assert all(bits(tensor).equal(bits(before[name])) for name, tensor in layer.state_dict().items())


def rewritten(path, edit):
    """Rewrite the header of a safetensors file by `edit`."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    edited = edit(header)
    text = edited if isinstance(edited, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


KEYS = "multi_head_embedding.embedding.weight", "value_proj.weight"


@pytest.mark.parametrize("damage, message", [
    (lambda path: path.write_bytes(b""), "a header of 0 bytes in a file of 0"),
    (lambda path: path.write_bytes(path.read_bytes()[:5]), "a header of 0 bytes in a file of 5"),
    (lambda path: path.write_bytes(b"\xff" * 100), "a header of 18,446,744,073,709,551,615 bytes in a file of 100"),
    (lambda path: path.write_bytes(path.read_bytes()[:200]), "a header of [0-9,]+ bytes in a file of 200"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes by its header, [0-9,]+ in the file"),
    (lambda path: path.write_bytes(path.read_bytes() + b"0"), "bytes by its header, [0-9,]+ in the file"),
    (lambda path: rewritten(path, lambda header: b"{" + b" " * 20), "its header is no JSON object"),
    (lambda path: rewritten(path, lambda header: b"[1, 2, 3]"), "its header is no JSON object"),
    (lambda path: rewritten(path, lambda header: b"\xff\xfe{}"), "its header is no JSON object"),
    (lambda path: rewritten(path, lambda header: b'{"a": 1, "a": 2}'), r"no JSON object \(a name comes twice\)"),
    (lambda path: rewritten(path, lambda header: header.update(a=5)), "an entry of its header is no tensor"),
    (lambda path: rewritten(path, lambda header: header[KEYS[0]].pop("dtype")), "is no tensor .*dtype"),
    (lambda path: rewritten(path, lambda header: header[KEYS[0]].update(shape=[3, -3])), "weight lies at bytes"),
    (lambda path: rewritten(path, lambda header: header[KEYS[0]].update(shape=[3, 3])), r"weight is F32 \[3, 3\] in"),
    (lambda path: rewritten(path, lambda header: header[KEYS[0]].update(dtype="F16")), r"weight is F16 \[\d+, 32\] in"),
    (lambda path: rewritten(path, lambda header: header.pop(KEYS[0])), "lies at bytes .* expected from"),
    (lambda path: rewritten(path, lambda header: header[KEYS[1]].update(data_offsets=[0, 4])), "in 4 bytes"),
])
def test_malformed_files(tmp_path, damage, message):
    layer, path = layer_of("demo"), tmp_path / "model.safetensors"
    save_reference_checkpoint(layer_of("demo", 1), path)
    damage(path)
    refused(layer, path, f"{path} is not a whole safetensors file: .*({message})")


def test_a_cut_shard_is_found_before_anything_is_written(tmp_path):
    tensors = published(layer_of("demo", 1))
    for number, name in enumerate(sorted(tensors)):
        save_file({name: tensors[name]}, tmp_path / f"{number:02}.safetensors")
    last = sorted(tmp_path.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-2])
    refused(layer_of("demo"), tmp_path, f"{last} is not a whole safetensors file")


def test_missing_unexpected_and_misshapen_names(tmp_path):
    path, tensors = tmp_path / "model.safetensors", published(layer_of("demo", 1), "engram.")
    del tensors["engram.norm1.0.weight"], tensors["engram.value_proj.bias"]
    tensors["engram.norm1.weight"] = torch.ones(64)
    tensors["engram.key_projs.1.weight"] = torch.ones(3, 2)
    tensors["engram.short_conv.conv.weight"] = torch.ones(128, 1, 4, dtype=torch.int32)
    save_file(tensors, path)
    layer = layer_of("demo")
    with pytest.raises(ValueError) as error:
        load_reference_checkpoint(layer, path, "engram.")
    text = str(error.value)
    for fault in ("missing engram.norm1.0.weight;", "missing engram.value_proj.bias;",
                  f"unexpected engram.norm1.weight ({path})",
                  f"engram.key_projs.1.weight must be [64, 128], got [3, 2] ({path})",
                  "engram.short_conv.conv.weight must be floating point, got int32 [128, 1, 4]"):
        assert fault in text, text
    refused(layer, path, "missing multi_head_embedding.offsets")
    refused(layer, path, "missing other.multi_head_embedding.offsets; .* in .*model.safetensors", prefix="other.")


@pytest.mark.parametrize("change, message", [
    (lambda tensors: tensors.pop("embed.scale"), "missing embed.scale"),
    (lambda tensors: tensors.pop("wkv.scale"), "missing wkv.scale, the scales of wkv.weight"),
    (lambda tensors: tensors.update({"embed.scale": torch.ones(tensors["embed.scale"].shape)}),
     "embed.scale must be float8_e8m0fnu, got float32"),
    (lambda tensors: tensors.update({"wkv.scale": tensors["wkv.scale"].view(torch.uint8)}),
     r"wkv.scale must be float8_e8m0fnu \[6, 6\], got uint8"),
    (lambda tensors: tensors.update({"wkv.scale": tensors["wkv.scale"][:2]}), r"wkv.scale must be .* \[6, 6\]"),
    (lambda tensors: tensors.update({"embed.weight": tensors["embed.weight"].float()}), "must be float8_e4m3fn"),
])
def test_wrong_scales(tmp_path, change, message):
    tensors, path = published(layer_of("v41", 1)), tmp_path / "model.safetensors"
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    refused(layer_of("v41"), path, message)


@pytest.mark.parametrize("dialect, name", [
    ("demo", "multi_head_embedding.offsets"), ("qwen", "ple_embedding.ngram_heads_vocab_sizes"),
    ("qwen", "ple_embedding.layer_multipliers"), ("hybrid", "multi_head_emb.offsets"),
])
def test_other_hash_constants(tmp_path, dialect, name):
    tensors, path = published(layer_of(dialect, 1)), tmp_path / "model.safetensors"
    for change in (torch.zeros_like(tensors[name]), tensors[name].flip(0)):
        save_file(tensors | {name: change.contiguous()}, path)
        refused(layer_of(dialect), path, rf"{name} must be \[.*\], got \[.*\] in {path}")


@pytest.mark.parametrize("index, message", [
    (b"", "is not an index of safetensors files"),
    (b"[]", "is not an index of safetensors files"),
    (b'{"weight_map": 3}', "is not an index of safetensors files"),
    (b'{"weight_map": {"value_proj.weight": 3}}', "weight_map must map names to files"),
    (b'{"weight_map": {"value_proj.weight": "../model.safetensors"}}', "file that is not in its folder: '../model"),
    (b'{"weight_map": {"value_proj.weight": "gone.safetensors"}}', "no file at .*gone.safetensors"),
    (b'{"weight_map": {"no_such.weight": "model.safetensors"}}',
     "the index says that no_such.weight is in .*model.safetensors, found: none"),
    (b'{"weight_map": {"value_proj.weight": "model.safetensors"}}', "index says nothing of .*, found: .*.safetensors"),
    (b'{"weight_map": {}}', "missing multi_head_embedding.offsets; .*index.json"),
])
def test_wrong_indices(tmp_path, index, message):
    save_file(published(layer_of("demo", 1)), tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_bytes(index)
    refused(layer_of("demo"), tmp_path, message, (ValueError, FileNotFoundError))


def test_a_name_in_two_files(tmp_path):
    tensors = published(layer_of("demo", 1))
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"value_proj.weight": tensors["value_proj.weight"]}, tmp_path / "b.safetensors")
    refused(layer_of("demo"), tmp_path, "value_proj.weight is in .*a.safetensors and in .*b.safetensors")


def test_files_that_are_not_there(tmp_path):
    layer = layer_of("demo")
    refused(layer, tmp_path / "none.safetensors", "no file at .*none.safetensors", FileNotFoundError)
    refused(layer, [tmp_path / "none.safetensors"], "no file at .*none.safetensors", FileNotFoundError)
    refused(layer, tmp_path / INDEX, "no file at .*index.json", FileNotFoundError)
    refused(layer, tmp_path, "neither model.safetensors.index.json nor .safetensors files in", FileNotFoundError)
    refused(layer, [], "missing multi_head_embedding.offsets")


def test_an_unknown_dtype_matters_only_where_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(published(layer_of("demo", 1), "engram.") | {"other": torch.zeros(4, dtype=torch.uint8)}, path)
    rewritten(path, lambda header: header["other"].update(dtype="F4"))
    layer = layer_of("demo")
    load_reference_checkpoint(layer, path, "engram.")
    assert same(layer, layer_of("demo", 1))
    refused(layer, path, f"other has the unknown dtype F4 in {path}")


def test_wrong_targets_and_prefixes(tmp_path):
    layer, path = layer_of("demo"), tmp_path / "model.safetensors"
    save_reference_checkpoint(layer, path)
    both = torch.nn.ModuleList([layer, layer_of("demo")])
    for function in (load_reference_checkpoint, save_reference_checkpoint):
        with pytest.raises(ValueError, match="no Engram layer in Linear"):
            function(torch.nn.Linear(2, 2), path)
        with pytest.raises(ValueError, match="two layers have the prefix ''; put {layer} or {name} into it"):
            function(both, path)
        for prefix in ("{block}.", "{", "{0}."):
            with pytest.raises(ValueError, match="prefix may have {name} and {layer} in it, got"):
                function(layer, path, prefix)
        with pytest.raises(ValueError, match="prefix may have {name} in it, got '{layer}.'"):
            function(layer_of("hybrid"), path, "{layer}.")
    with pytest.raises(ValueError, match="metadata must map strings to strings, got {'step': 3}"):
        save_reference_checkpoint(layer, path, metadata={"step": 3})


def test_a_failed_save_leaves_the_old_file(tmp_path):
    layer, path = layer_of("demo"), tmp_path / "model.safetensors"
    save_reference_checkpoint(layer_of("demo", 1), path)
    before = path.read_bytes()

    def stop(done, total):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_reference_checkpoint(layer, path, progress=stop)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        save_reference_checkpoint(layer, tmp_path / "none" / "model.safetensors")


def test_a_token_map_is_not_part_of_it(tmp_path):
    config = EngramConfig(**SMALL, compressed_vocab_size=25)
    layers = [nn.Engram(config, 1, token_map=TokenMap([i // 2 for i in range(50)])) for _ in range(2)]
    save_reference_checkpoint(layers[0], tmp_path / "model.safetensors")
    load_reference_checkpoint(layers[1], tmp_path / "model.safetensors")
    ids = torch.randint(50, (1, 9))
    assert same(*layers) and layers[0].hash(ids).equal(layers[1].hash(ids))


def test_the_file_is_whole_when_it_has_its_name(tmp_path):
    seen = []
    path = tmp_path / "model.safetensors"
    save_reference_checkpoint(layer_of("demo"), path, progress=lambda done, total: seen.append(path.exists()))
    assert seen and not any(seen) and Path(path).exists()
