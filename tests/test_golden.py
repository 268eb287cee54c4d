"""The ops and the module against the published implementations; tests/data/README.md says where vectors come from."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engram import EngramConfig, TokenMap, nn, ops, tables

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


def constants_of(moduli, multipliers):
    moduli = torch.tensor(moduli).flatten(1)
    return torch.tensor(multipliers), moduli, torch.tensor([tables.row_offsets(row) for row in moduli.tolist()])


def test_hash_of_deepseek_v41():
    golden, published = load("hash_real_configs"), CONSTANTS["deepseek_v4_1_flash"]
    multipliers, moduli, offsets = constants_of(list(published["primes"].values()),
                                                list(published["multipliers"].values()))
    windows = golden["v41_windows"]  # already compressed; column 0 is the current token: hashed as four-token sequences
    pad = int(published["pad_token_id"])
    rows = ops.ngram_hash(windows.flip(1), multipliers, moduli, offsets, pad_id=pad)[:, :, -1]
    assert rows[0].equal(golden["v41_rows_1"]) and rows[1].equal(golden["v41_rows_14"])
    # The module comes to the same constants by itself.
    module = nn.NgramHash(EngramConfig(
        hidden_size=8, vocab_size=129280, compressed_vocab_size=99092, max_ngram_size=4, table_size=16_000_000,
        layer_ids=(1, 14),
    ))
    assert module.multipliers.equal(multipliers) and module.moduli.equal(moduli) and module.offsets.equal(offsets)


def test_hash_of_v41_with_mask_and_packed_documents():
    golden = load("v41")
    constants = dict(multipliers=golden["multipliers"], moduli=golden["primes"].flatten(1), offsets=golden["offsets"],
                     token_map=golden["lookup"].int(), pad_id=2)
    ids = golden["ids"]
    for expected, options in {
        "hash_nomask": {},
        "hash": dict(mask=golden["token_mask"]),
        # There, sequence 0 is padding.
        "hash_packed_nemo": dict(document_ids=golden["sequence_ids"], mask=golden["sequence_ids"] != 0),
    }.items():
        rows = ops.ngram_hash(ids, **constants, **options).permute(1, 2, 0, 3)
        assert rows.equal(golden[expected]), expected
    assert not golden["hash_packed_nemo"].equal(golden["hash_nomask"])
    assert not golden["hash"].equal(golden["hash_nomask"])


def test_hash_of_frankenstein():
    golden = load("frankenstein")
    moduli = golden["moduli"].reshape(1, -1)
    rows = ops.ngram_hash(golden["ids"], golden["multipliers"][None], moduli, torch.zeros_like(moduli), pad_id=0)
    assert rows[0].equal(golden["hash"])


def qwen_hash(multipliers, moduli, eos_id, vocab_size):
    """A Qwen PLE hash: raw ids, documents end at EOS, what lies before them reads as EOS."""
    module = nn.NgramHash(EngramConfig(
        hidden_size=8, vocab_size=vocab_size, max_ngram_size=3, heads_per_ngram=len(moduli) // 2, layer_ids=(0,),
        moduli=(tuple(moduli),), pad_id=eos_id, boundary="eos", eos_id=eos_id, mask_blocks_hash=False,
    ))
    module.load_state_dict(module.state_dict() | {"multipliers": torch.tensor([multipliers])})
    return module


def test_hash_of_qwen():
    golden, published = load("hash_real_configs"), CONSTANTS["qwen3_8_flash_next"]
    module = qwen_hash(published["multipliers"], published["primes"], int(golden["qwen_eos"]), published["vocab"])
    ids = golden["qwen_ids"][None]
    assert (ids == golden["qwen_eos"]).any()
    assert module(ids)[0, 0].equal(golden["qwen_rows"])
    # In two pieces, the ids before the second one as its history.
    for cut in range(2, ids.shape[1] - 1):
        assert module(ids[:, cut:], history=ids[:, cut - 2:cut])[0, 0].equal(golden["qwen_rows"][cut:])


# -------------------------------------------------------------------------------------------------------- module


def demo_module(golden, dtype):
    config = EngramConfig(
        hidden_size=16, branches=4, vocab_size=len(LOOKUP), compressed_vocab_size=442, heads_per_ngram=4,
        embed_dim_per_head=4, table_size=(97, 101), layer_ids=(1, 15), conv_init="default",
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


def test_layer_of_qwen():
    golden = load("qwen4_ple_fp32")
    weights = part(golden, "sd.")
    branches, size, eos_id = 4, 24, 7
    vocab_size = int(golden["ids"].max()) + 1
    config = EngramConfig(
        hidden_size=size, branches=branches, vocab_size=vocab_size, heads_per_ngram=4, embed_dim_per_head=4,
        layer_ids=(0,), moduli=(tuple(weights["ple_embedding.ngram_heads_vocab_sizes"].tolist()),), pad_id=eos_id,
        boundary="eos", eos_id=eos_id, conv_reset=False, mask_blocks_hash=False, bias=False, norm_eps=1e-6,
        conv_norm_eps=1e-6,
    )
    module = nn.Engram(config, 0)
    table_rows = sum(config.moduli[0])
    state = module.state_dict()
    state |= {
        "hash.multipliers": weights["ple_embedding.layer_multipliers"][None],
        "hash.offsets": weights["ple_embedding.ngram_heads_offsets"][None],
        # The published table is padded to a multiple of 128 rows.
        "embedding.weight": weights["ple_embedding.ngram_embedding.weight"][:table_rows],
        "key_proj.weight": weights["key_proj.weight"],
        "value_proj.weight": weights["value_proj.weight"],
        "gate.hidden_weight": 1 + weights["norm_query.weight"].view(branches, size),
        "gate.key_weight": 1 + weights["norm_key.weight"].view(branches, size),
        "conv.weight": weights["conv1d.weight"].view(branches, size, -1),
        "conv.norm_weight": 1 + weights["norm_conv.weight"].view(branches, size),
    }
    module.load_state_dict(state)
    hidden = golden["hidden"].unflatten(-1, (branches, size))
    assert module.hash(golden["ids"])[0].equal(golden["ngram_ids"])
    assert relative(module(hidden, golden["ids"]).flatten(-2), golden["out"]) < 1e-5
    mask = golden["conv_mask"].bool()
    assert not mask.all()
    assert relative(module(hidden, golden["ids"], mask=mask).flatten(-2), golden["out_masked"]) < 1e-5


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
    branches, size = golden["x_bf16"].shape[-2:]
    key, value = golden["kv_bf16"].split([branches * size, size], -1)
    arguments = (golden["x_bf16"], key.unflatten(-1, (branches, size)), value, golden["q_weight_bf16"],
                 golden["k_weight_bf16"])
    out = ops.gate(*arguments, eps=float(golden["eps"]), zero_rule="copysign", mask=golden["token_mask"], residual=True)
    assert out.dtype == torch.bfloat16
    expected = golden["out_bf16"]
    # Summed in another order, so a value may round to the neighbour, no further.
    assert (out.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1
    assert (out != expected).float().mean() < 0.01
    masked = ~golden["token_mask"]
    assert masked.any() and out[masked].equal(golden["x_bf16"][masked])


def test_gate_of_the_blog():
    golden = load("blog_gate")
    weights = part(golden, "sd.")
    branches, size = golden["x_res"].shape[-2:]
    rows = golden["e"]
    key = torch.stack([
        torch.nn.functional.linear(rows, weights[f"W_K.{g}.weight"], weights[f"W_K.{g}.bias"]) for g in range(branches)
    ], -2)
    value = torch.nn.functional.linear(rows, weights["W_V.weight"], weights["W_V.bias"])
    # One norm for all branches.
    shared = [weights[name].expand(branches, size) for name in ("norm_h.weight", "norm_k.weight")]
    out = ops.gate(golden["x_res"], key, value, *shared, eps=torch.finfo(torch.float32).eps)
    assert relative(out, golden["gated_value"]) < 1e-5
