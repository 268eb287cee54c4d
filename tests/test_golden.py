"""The ops and the module against the published implementations; tests/data/README.md says where vectors come from."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engram import EngramConfig, TokenMap, nn, ops

DATA = Path(__file__).parent / "data"
CONSTANTS = json.loads((DATA / "constants.json").read_text())
HASH = json.loads((DATA / "hash_v1.json").read_text())
LOOKUP = json.loads((DATA / "compressed_map_synth.json").read_text())["lookup"]


def load(name):
    """Arrays of an .npz as tensors; uint16 holds the bits of bfloat16."""
    with np.load(DATA / f"{name}.npz") as content:
        arrays = {key: content[key] for key in content.files if content[key].dtype.kind in "iufb"}
    tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}
    return {key: value.view(torch.bfloat16) if value.dtype == torch.uint16 else value for key, value in tensors.items()}


def part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def relative(got, expected):
    """Norm of the difference over the norm of the expected tensor."""
    got, expected = got.detach().double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()


def hash_config(case):
    return EngramConfig(
        hidden_size=8, vocab_size=len(LOOKUP), compressed_vocab_size=case["compressed_vocab"],
        max_ngram_size=case["max_ngram"], heads_per_ngram=case["heads"], table_size=tuple(case["engram_vocab_size"]),
        layer_ids=tuple(case["layers"]), pad_id=case["pad_id"], seed=case["seed"],
    )


# ---------------------------------------------------------------------------------------------------------- hash


@pytest.mark.parametrize("name", HASH)
def test_hash_of_the_demo(name):
    golden, case = part(load("hash_v1"), f"{name}_"), HASH[name]
    module = nn.NgramHash(hash_config(case), TokenMap(LOOKUP))
    assert module.token_map[golden["ids"]].equal(golden["compressed"].int())
    rows, first_rows = module(golden["ids"]), module(golden["ids_T1"])
    # The demo lets negative ids through the map as they are: mapped here, then hashed without a map.
    negative = golden["ids_neg"]
    negative = torch.where(negative < 0, negative, module.token_map[negative.clamp_min(0)].long())
    negative_rows = ops.ngram_hash(negative, module.multipliers, module.moduli, module.offsets,
                                   pad_id=case["pad_compressed"])
    assert (golden["ids_neg"] < 0).any()
    for index, layer in enumerate(case["layers"]):
        assert module.multipliers[index].equal(golden[f"mult_{layer}"])
        assert module.moduli[index].equal(golden[f"primes_{layer}"].flatten())
        assert module.offsets[index].equal(golden[f"offsets_{layer}"])
        offsets = golden[f"offsets_{layer}"]
        assert rows[index].equal(golden[f"hash_{layer}"] + offsets)
        assert first_rows[index].equal(golden[f"hash_T1_{layer}"] + offsets)
        assert negative_rows[index].equal(golden[f"hash_neg_{layer}"] + offsets)
        alone = nn.NgramHash(hash_config(case), TokenMap(LOOKUP), layer_ids=[layer])
        assert alone(golden["ids"])[0].equal(rows[index])


def test_hash_of_wrapped_products():
    golden, case = load("hash_v1"), HASH["a"]
    module = nn.NgramHash(hash_config(case))
    rows = ops.ngram_hash(golden["a_wrap_compressed_ids"], module.multipliers, module.moduli, module.offsets,
                          pad_id=case["pad_compressed"])
    for index, layer in enumerate(case["layers"]):
        assert rows[index].equal(golden[f"a_wrap_hash_{layer}"] + golden[f"a_offsets_{layer}"])


def test_hash_of_deepseek_v41():
    golden, published = load("hash_real_configs"), CONSTANTS["deepseek_v4_1_flash"]
    config = EngramConfig.preset("deepseek-v4.1-flash")
    size = config.compressed_vocab_size
    # The windows are compressed already: a map that leaves them alone, and is of the real size.
    module = nn.NgramHash(config, TokenMap(np.arange(config.vocab_size).clip(max=size - 1)))
    assert module.multipliers.tolist() == [published["multipliers"][str(layer)] for layer in config.layer_ids]
    assert module.moduli.tolist() == [sum(published["primes"][str(layer)], []) for layer in config.layer_ids]
    assert module.moduli.sum(1).tolist() == published["table_rows"] == [384006168, 384016682]
    windows = golden["v41_windows"]  # column 0 is the current token: hashed as four-token sequences
    rows = module(windows.flip(1))[:, :, -1]
    assert rows[0].equal(golden["v41_rows_1"]) and rows[1].equal(golden["v41_rows_14"])


def v41_config(**values):
    """The published dialect in the sizes of v41.npz."""
    return EngramConfig.preset("deepseek-v4.1-flash", hidden_size=48, vocab_size=553, compressed_vocab_size=442,
                               heads_per_ngram=2, embed_dim_per_head=64, table_size=64, **values)


def test_hash_of_v41_with_mask_and_packed_documents():
    golden = load("v41")
    module = nn.NgramHash(v41_config(), TokenMap(golden["lookup"]))
    assert module.multipliers.equal(golden["multipliers"]) and module.moduli.equal(golden["primes"].flatten(1))
    assert module.offsets.equal(golden["offsets"])
    ids = golden["ids"]
    for expected, options in {
        "hash_nomask": {},
        "hash": dict(mask=golden["token_mask"]),
        # There, sequence 0 is padding.
        "hash_packed_nemo": dict(document_ids=golden["sequence_ids"], mask=golden["sequence_ids"] != 0),
    }.items():
        assert module(ids, **options).permute(1, 2, 0, 3).equal(golden[expected]), expected
    assert not golden["hash_packed_nemo"].equal(golden["hash_nomask"])
    assert not golden["hash"].equal(golden["hash_nomask"])


def test_hash_of_frankenstein():
    golden = load("frankenstein")
    moduli = golden["moduli"].reshape(1, -1)
    rows = ops.ngram_hash(golden["ids"], golden["multipliers"][None], moduli, torch.zeros_like(moduli), pad_id=0)
    assert rows[0].equal(golden["hash"])


def test_hash_of_qwen():
    golden, published = load("hash_real_configs"), CONSTANTS["qwen3_8_flash_next"]
    config = EngramConfig.preset("qwen3.8-flash-next")
    module = nn.NgramHash(config)
    assert config.eos_id == golden["qwen_eos"] and config.vocab_size == published["vocab"]
    assert module.multipliers.tolist() == [published["multipliers"]] and module.moduli.tolist() == [published["primes"]]
    ids = golden["qwen_ids"][None]
    assert (ids == golden["qwen_eos"]).any()
    assert module(ids)[0, 0].equal(golden["qwen_rows"])
    # In two pieces, the ids before the second one as its history.
    for cut in range(2, ids.shape[1] - 1):
        assert module(ids[:, cut:], history=ids[:, cut - 2:cut])[0, 0].equal(golden["qwen_rows"][cut:])


# -------------------------------------------------------------------------------------------------------- module


def demo_module(golden, dtype):
    config = EngramConfig.preset(
        "demo", hidden_size=16, vocab_size=len(LOOKUP), compressed_vocab_size=442, heads_per_ngram=4,
        embed_dim_per_head=4, table_size=(97, 101),
    )
    module = nn.Engram(config, 15, token_map=TokenMap(LOOKUP), dtype=dtype)
    module.load_reference_state_dict({name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                                      for name, tensor in part(golden, "sd.").items()})
    return module


def reference_gradients(module):
    """Parameter gradients under the reference's names: they are laid out like the parameters."""
    for parameter in module.parameters():
        parameter.data = parameter.grad
    return module.to_reference_state_dict()


def run(module, golden, dtype):
    hidden = golden["hidden"].to(dtype).requires_grad_()
    out = module(hidden, golden["ids"])
    out.backward(golden["grad_out"].to(dtype))
    return {"output": out, "grad_hidden": hidden.grad} | {
        f"grad.{name}": gradient for name, gradient in reference_gradients(module).items()
        if gradient.is_floating_point()
    }


@pytest.mark.parametrize("file, dtype, forward, backward", [
    ("fp64", torch.float64, 1e-12, 1e-12),
    ("fp32", torch.float32, 1e-5, 1e-4),
    ("zeroconv_fp32", torch.float32, 1e-5, 1e-4),
])
def test_module_of_the_demo(file, dtype, forward, backward):
    golden = load(f"module_v1_{file}")
    module = demo_module(golden, dtype)
    assert module.hash(golden["ids"])[0].equal(golden["hash_ids"] + module.hash.offsets)
    got = run(module, golden, dtype)
    expected = {name: value for name, value in golden.items() if name in ("output", "grad_hidden") or
                name.startswith("grad.")}
    assert got.keys() == expected.keys() and len(expected) == 26
    for name, value in expected.items():
        assert got[name].dtype == dtype
        if value.norm() == 0:
            assert got[name].norm() == 0, name
        else:
            assert relative(got[name], value) < (forward if name == "output" else backward), name


def test_module_of_the_demo_in_bfloat16():
    """The file shows eager rounding, whose gradients are far off: the same inputs in float64 are the reference, and
    the kernels must be closer to it than eager is."""
    golden = load("module_v1_bf16")
    exact = run(demo_module(golden, torch.float64), golden, torch.float64)
    got = run(demo_module(golden, torch.bfloat16), golden, torch.bfloat16)
    for name, value in exact.items():
        error, eager = relative(got[name], value), relative(golden[name], value)
        assert error <= max(1.05 * eager, 0.01), (name, error, eager)
    assert relative(got["output"], exact["output"]) < 0.005


def test_module_residual_and_shared_rows():
    golden = load("module_v1_fp64")
    module = demo_module(golden, torch.float64)
    hidden, ids = golden["hidden"], golden["ids"]
    out = module(hidden, ids)
    assert module(hidden, ids, residual=True).equal(hidden + out)
    rows = nn.NgramHash(module.config, TokenMap(LOOKUP))(ids)
    assert module(hidden, rows=rows).equal(out)


def test_decoding_of_the_demo():
    """Token by token, with a state: outputs, and the history that the published decoder keeps (in compressed ids)."""
    golden, weights = load("module_v1_decode_fp64"), load("module_v1_fp64")
    module = demo_module(weights, torch.float64)
    state = module.init_state(2)
    for t in range(golden["ids"].shape[1]):
        out = module(golden["hidden"][:, t:t + 1], golden["ids"][:, t:t + 1], state=state)
        assert relative(out, golden["output"][:, t:t + 1]) < 1e-12
        before, _, there = state.history.before(state.history.marks(None, golden["ids"][:, :1]).runs, None)
        kept = module.hash.token_map[torch.where(there[:, :2], before["ids"], module.config.pad_id)]
        assert kept.equal(golden["hist_after"][:, t].int())


def test_layer_of_qwen():
    golden = load("qwen4_ple_fp32")
    weights = part(golden, "sd.")
    config = EngramConfig.preset(
        "qwen3.8-flash-next", hidden_size=24, vocab_size=300, heads_per_ngram=4, embed_dim_per_head=4, table_size=64,
        layer_ids=(0, 4), pad_id=7, eos_id=7, table_dtype=None,
    )
    module = nn.Engram(config, 4)
    module.load_reference_state_dict(weights)  # its hash constants are compared
    hidden = golden["hidden"].unflatten(-1, (4, 24))
    assert module.hash(golden["ids"])[0].equal(golden["ngram_ids"])
    assert relative(module(hidden, golden["ids"]).flatten(-2), golden["out"]) < 1e-5
    mask = golden["conv_mask"].bool()
    assert not mask.all()
    assert relative(module(hidden, golden["ids"], mask=mask).flatten(-2), golden["out_masked"]) < 1e-5
    written = module.to_reference_state_dict()
    assert written.keys() == weights.keys() and all(written[name].equal(weights[name]) for name in weights)


def v41_module(golden, table_dtype):
    module = nn.Engram(v41_config(table_dtype=table_dtype), 1, token_map=TokenMap(golden["lookup"]),
                       dtype=torch.bfloat16)
    module.load_reference_state_dict({
        "embed.weight": golden["table_fp8_bytes"].view(torch.float8_e4m3fn),
        "embed.scale": golden["table_e8m0_bytes"].view(torch.float8_e8m0fnu),
        "wkv.weight": golden["wkv_bf16"], "q_weight": golden["q_weight_bf16"], "k_weight": golden["k_weight_bf16"],
    })
    return module


@pytest.mark.parametrize("table_dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_layer_of_v41(table_dtype):
    golden = load("v41")
    module, mask = v41_module(golden, table_dtype), golden["token_mask"]
    rows = module.hash(golden["ids"], mask=mask)
    assert rows[0].equal(golden["hash"][:, :, 0])
    assert module.embedding(rows[0]).bfloat16().equal(golden["emb_bf16"])
    out = module(golden["x_bf16"], golden["ids"], mask=mask)
    # One token's key and value are set to zero in the file, for the gate alone.
    zeroed = golden["kv_bf16"].eq(0).all(-1)
    assert zeroed.sum() == 1
    # The products' sums, of another BLAS, are rounded to bfloat16.
    assert out.dtype == torch.bfloat16 and relative(out[~zeroed], golden["out_bf16"][~zeroed]) < 0.005
    assert out[~mask].equal(golden["x_bf16"][~mask])


def test_table_of_v41_with_extreme_scales():
    golden = load("v41")
    probe = golden["dequant_probe_rows_bf16"]
    module = v41_module(golden, torch.float8_e4m3fn)
    module.embedding.scales.copy_(golden["e8m0_bytes_extreme"].view(torch.float8_e8m0fnu))
    rows = torch.arange(len(probe))
    assert rows.numel() == 8
    assert module.embedding(rows[:, None].expand(-1, 6))[:, 0].equal(probe)


def test_layer_of_the_branch_gate():
    golden = load("blog_gate")
    branches, size = golden["x_res"].shape[-2:]
    batch, tokens, width = golden["e"].shape
    # The golden file begins with the looked up memory: a table of it, each position reading its own row.
    config = EngramConfig.preset("branch-gate", hidden_size=size, vocab_size=64, heads_per_ngram=2,
                                 embed_dim_per_head=width // 4, moduli=[[batch * tokens] * 4])
    module = nn.Engram(config, 1)
    table = golden["e"].view(batch * tokens, 4, -1).transpose(0, 1).flatten(0, 1)
    weights = part(golden, "sd.")
    module.load_reference_state_dict(weights | {"multi_head_embedding.embedding.weight": table})
    rows = torch.arange(batch * tokens).view(1, batch, tokens, 1) + module.hash.offsets[0]
    assert module.embedding(rows[0]).flatten(-2).equal(golden["e"])
    assert module.gate.hidden_weight.shape == (size,)
    assert relative(module(golden["x_res"], rows=rows), golden["gated_value"]) < 1e-5


# ---------------------------------------------------------------------------------------------------------- gate


def test_gate_of_tilekernels():
    golden = load("tilekernels_gate_bf16")
    options = dict(eps=float(golden["eps"]), clamp=float(golden["clamp"]), residual=True)
    names = ("x", "k", "v", "wh", "we")
    for dtype, forward, backward in ((torch.float64, 1e-12, 1e-12), (torch.bfloat16, 0.005, 0.005)):
        inputs = [golden[name].to(dtype).requires_grad_() for name in names]
        out = ops.gate(*inputs, **options)
        out.backward(golden["grad_out"].to(dtype))
        assert relative(out, golden["out64"]) < forward
        for name, tensor in zip(names, inputs):
            assert relative(tensor.grad, golden[f"grad_{name}64"]) < backward, (dtype, name)
        if dtype == torch.bfloat16:
            assert relative(out, golden["out"]) < 0.005


def test_table_of_v41():
    golden = load("v41")
    values = golden["table_fp8_bytes"].view(torch.float8_e4m3fn)
    scales, extreme = (golden[name].view(torch.float8_e8m0fnu) for name in ("table_e8m0_bytes", "e8m0_bytes_extreme"))
    found = ops.embedding_fp8(values, scales, golden["hash"][:, :, 0])
    assert found.view(torch.int16).equal(golden["emb_bf16"].view(torch.int16))
    probe = golden["dequant_probe_rows_bf16"]       # the first rows, under scales of 2**-127, 2**-126 and 2**127
    found = ops.embedding_fp8(values, extreme, torch.arange(len(probe)))
    assert found.view(torch.int16).equal(probe.view(torch.int16))


def test_gate_of_v41():
    golden = load("v41")
    module, mask = v41_module(golden, torch.float8_e4m3fn), golden["token_mask"]
    branches, size = golden["x_bf16"].shape[-2:]
    key, value = golden["kv_bf16"].split([branches * size, size], -1)
    out = module.gate(golden["x_bf16"], key.unflatten(-1, (branches, size)), value, mask=mask, residual=True)
    assert out.dtype == torch.bfloat16 and out.equal(golden["out_bf16"])
    assert not mask.all() and out[~mask].equal(golden["x_bf16"][~mask])
