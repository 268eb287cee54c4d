"""EngramConfig: what is refused, with which words, and the trip through JSON."""
import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from engram import EngramConfig

SMALL = dict(hidden_size=16, vocab_size=100)


@pytest.mark.parametrize("wrong, message", [
    (dict(hidden_size=0), "hidden_size must be an integer >= 1, got 0"),
    (dict(hidden_size=16.0), "hidden_size must be an integer >= 1, got 16.0"),
    (dict(hidden_size=True), "hidden_size must be an integer >= 1, got True"),
    (dict(hidden_size="16"), "hidden_size must be an integer >= 1, got '16'"),
    (dict(hidden_size=torch.ones(2)), "hidden_size must be an integer >= 1"),
    (dict(vocab_size=0), r"vocab_size must be an integer in \[1, "),
    (dict(vocab_size=2**30), "vocab_size must be an integer in"),
    (dict(branches=0), "branches must be an integer >= 1, got 0"),
    (dict(compressed_vocab_size=0), r"compressed_vocab_size must be .* in \[1, vocab_size\] = \[1, 100\], got 0"),
    (dict(compressed_vocab_size=101), "compressed_vocab_size must be .* got 101"),
    (dict(max_ngram_size=1), "max_ngram_size must be an integer >= 2, got 1"),
    (dict(heads_per_ngram=0), "heads_per_ngram must be"),
    (dict(embed_dim_per_head=-1), "embed_dim_per_head must be"),
    (dict(table_size=0), "table_size must be .* got 0"),
    (dict(table_size=2**49), "table_size must be"),
    (dict(table_size=(10,)), r"table_size must be one integer or one per order 2\.\.3, got \(10,\)"),
    (dict(table_size=(10, 0)), "table_size must hold integers in"),
    (dict(table_size=None), "table_size must be"),
    (dict(layer_ids=()), "layer_ids must name at least one layer and none twice"),
    (dict(layer_ids=(1, 1)), r"layer_ids must name at least one layer and none twice, got \(1, 1\)"),
    (dict(layer_ids=(-1,)), "layer_ids must hold integers in"),
    (dict(layer_ids=3), "layer_ids must hold integers in .* got 3"),
    (dict(pad_id=-1), r"pad_id must be an integer in \[0, vocab_size - 1\] = \[0, 99\], got -1"),
    (dict(pad_id=100), "pad_id must be .* got 100"),
    (dict(seed=-1), "seed must be an integer >= 0, got -1"),
    (dict(kernel_size=-1), "kernel_size must be an integer >= 0, got -1"),
    (dict(dilation=0), "dilation must be an integer >= 1, got 0"),
    (dict(bias=1), "bias must be True or False, got 1"),
    (dict(conv_reset=None), "conv_reset must be True or False"),
    (dict(mask_blocks_hash="yes"), "mask_blocks_hash must be True or False"),
    (dict(sparse_grad=0), "sparse_grad must be True or False"),
    (dict(norm_eps=0.0), "norm_eps must be a finite number > 0, got 0.0"),
    (dict(norm_eps=float("nan")), "norm_eps must be a finite number > 0, got nan"),
    (dict(conv_norm_eps=None), "conv_norm_eps must be a finite number > 0, got None"),
    (dict(conv_norm_eps=-1e-5), "conv_norm_eps must be"),
    (dict(zero_rule="zero"), "zero_rule must be one of 'sign', 'copysign', got 'zero'"),
    (dict(boundary="bos"), "boundary must be one of 'none', 'eos', got 'bos'"),
    (dict(boundary="eos"), "eos_id must be set, got None"),
    (dict(eos_id=3), "eos_id must be None unless boundary is 'eos', got 3"),
    (dict(boundary="eos", eos_id=100), "eos_id must be an integer in"),
    (dict(conv_init="ones"), "conv_init must be one of 'zeros', 'default', got 'ones'"),
    (dict(table_std=-0.1), "table_std must be a finite number >= 0, got -0.1"),
    (dict(table_std=float("inf")), "table_std must be"),
    (dict(table_dtype=torch.int16), "table_dtype must be None or one of float64, float32, bfloat16, float16, "
     "float8_e4m3fn, int8, got torch.int16"),
    (dict(table_dtype="int8", sparse_grad=True), "sparse_grad must be False with a quantised table_dtype, .* got True"),
    (dict(row_multiple=0), "row_multiple must be an integer >= 1, got 0"),
    (dict(unique_primes=None), "unique_primes must be True or False, got None"),
    (dict(shared_norms=1), "shared_norms must be True or False, got 1"),
    (dict(zero_centred_norms=1), "zero_centred_norms must be True or False, got 1"),
    (dict(residual="yes"), "residual must be True or False, got 'yes'"),
    (dict(multiplier_rule="mt19937"), "multiplier_rule must be one of 'pcg64', 'splitmix64', got 'mt19937'"),
    (dict(layer_seed=True), "layer_seed must be one of 'id', 'index', 'none', got True"),
    (dict(hash_input="ids"), "hash_input must be one of 'tokens', 'positions', got 'ids'"),
    (dict(gate=None), "gate must be one of 'context', 'none', got None"),
    (dict(layout="hybrid-layer"), "layout must be one of 'engram', 'hybrid', got 'hybrid-layer'"),
    (dict(reference_keys="v2"), "reference_keys must be one of 'demo', 'deepseek-v4.1', 'qwen3.8', .* got 'v2'"),
    (dict(table_dtype="float8"), "table_dtype must be .* got 'float8'"),
    (dict(moduli=7), "moduli must be 2 rows of 16"),
    (dict(moduli=[[7] * 16]), r"moduli must be 2 rows \(layers\) of 16 integers"),
    (dict(moduli=[[7] * 15] * 2), r"moduli must be 2 rows \(layers\) of 16 integers"),
    (dict(moduli=[[0] * 16] * 2), "moduli must hold integers in"),
    (dict(moduli=[7, 7]), "moduli must hold integers in"),
])
def test_wrong_values_name_field_value_and_rule(wrong, message):
    with pytest.raises(ValueError, match=message):
        EngramConfig(**{**SMALL, **wrong})


def test_required_and_keyword_only():
    with pytest.raises(TypeError):
        EngramConfig(16, 100)
    with pytest.raises(TypeError, match="vocab_size"):
        EngramConfig(hidden_size=16)


def test_frozen_hashable_copyable():
    config = EngramConfig(**SMALL, table_size=[10, 20], layer_ids=[3], moduli=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert config.table_size == (10, 20) and config.layer_ids == (3,)
    assert {config: 1}[copy.deepcopy(config)] == 1
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, seed=5).seed == 5


def test_derived():
    config = EngramConfig(**SMALL, max_ngram_size=4, heads_per_ngram=2, embed_dim_per_head=5)
    assert (config.hash_columns, config.memory_width, config.conv_dilation) == (6, 30, 4)
    assert EngramConfig(**SMALL, dilation=2).conv_dilation == 2


@pytest.mark.parametrize("values", [
    {},
    dict(table_dtype=torch.bfloat16, norm_eps=1e-20, boundary="eos", eos_id=7, sparse_grad=True),
    dict(table_size=(10, 20), layer_ids=(4, 2), dilation=1, kernel_size=0, table_std=0),
    dict(heads_per_ngram=1, moduli=((5, 7), (11, 2))),
    dict(table_dtype=torch.float8_e4m3fn, multiplier_rule="splitmix64", layer_seed="index", hash_input="positions",
         row_multiple=128, unique_primes=False, gate="none", shared_norms=True, zero_centred_norms=True, residual=True,
         layout="hybrid", reference_keys="qwen3.8"),
])
def test_json_round_trip(values):
    config = EngramConfig(**SMALL, **values)
    assert EngramConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(EngramConfig)}


def test_numpy_integers_and_dtype_names():
    config = EngramConfig(hidden_size=np.int64(16), vocab_size=np.int32(100), layer_ids=list(np.arange(2)),
                          table_dtype="bfloat16")
    assert type(config.hidden_size) is int and type(config.layer_ids[1]) is int
    assert config.table_dtype is torch.bfloat16
    json.dumps(config.to_dict())


def test_from_dict_refuses():
    with pytest.raises(ValueError, match="no field hiden_size"):
        EngramConfig.from_dict(dict(SMALL, hiden_size=3))
    with pytest.raises(ValueError, match="needs hidden_size, vocab_size"):
        EngramConfig.from_dict({})


def test_presets():
    demo = EngramConfig.preset("demo")
    assert (demo.hidden_size, demo.branches, demo.layer_ids, demo.table_size) == (1024, 4, (1, 15), 646400)
    assert (demo.memory_width, demo.kernel_size, demo.conv_dilation, demo.pad_id, demo.bias) == (1024, 4, 3, 2, True)
    assert demo.conv_init == "default" and demo.norm_eps is None and demo.conv_norm_eps == 1e-5
    for name, table_size in {"paper-27b": 2262400, "paper-40b": 7239680}.items():
        paper = EngramConfig.preset(name)
        assert (paper.table_size, paper.memory_width, paper.layer_ids) == (table_size, 1280, (1, 14))
        assert paper.compressed_vocab_size == 99092 and paper.conv_init == "zeros" and paper.bias
    small = EngramConfig.preset("demo", hidden_size=32, table_size=(5, 9))
    assert small.hidden_size == 32 and small.table_size == (5, 9) and small.branches == 4


def test_preset_of_deepseek_v41():
    config = EngramConfig.preset("deepseek-v4.1-flash")
    assert (config.hidden_size, config.branches, config.memory_width, config.layer_ids) == (5120, 4, 6144, (1, 14))
    assert (config.max_ngram_size, config.heads_per_ngram, config.embed_dim_per_head) == (4, 8, 256)
    assert (config.vocab_size, config.compressed_vocab_size, config.pad_id) == (129280, 99092, 2)
    assert (config.kernel_size, config.bias, config.norm_eps, config.residual) == (0, False, 1e-20, True)
    assert config.zero_rule == "copysign" and config.boundary == "none" and config.mask_blocks_hash
    assert config.table_dtype is torch.float8_e4m3fn and config.multiplier_rule == "pcg64" and config.layer_seed == "id"


def test_preset_of_qwen():
    config = EngramConfig.preset("qwen3.8-flash-next")
    assert (config.hidden_size, config.branches, config.memory_width) == (2560, 4, 2560)
    assert (config.vocab_size, config.compressed_vocab_size) == (248320, None)
    assert config.pad_id == config.eos_id == 248044 and config.boundary == "eos"
    assert (config.kernel_size, config.conv_dilation, config.bias, config.norm_eps) == (4, 3, False, 1e-6)
    assert (config.conv_norm_eps, config.zero_centred_norms, config.row_multiple) == (1e-6, True, 128)
    assert not (config.conv_reset or config.mask_blocks_hash or config.residual)
    assert config.multiplier_rule == "splitmix64" and config.layer_seed == "index" and config.seed == 1234


def test_preset_of_the_hybrid_layer():
    with pytest.raises(ValueError, match="EngramConfig needs hidden_size, vocab_size"):
        EngramConfig.preset("hybrid-layer")
    config = EngramConfig.preset("hybrid-layer", hidden_size=24, vocab_size=101)
    assert (config.table_size, config.max_ngram_size, config.heads_per_ngram) == (101, 3, 4)
    assert (config.embed_dim_per_head, config.kernel_size, config.seed, config.pad_id) == (32, 4, 42, 0)
    assert config.layer_seed == "none" and not config.unique_primes and not config.bias and config.layout == "hybrid"
    assert config.compressed_vocab_size is None
    assert EngramConfig.preset("hybrid-layer", hidden_size=24, vocab_size=101, table_size=7).table_size == 7


def test_preset_of_the_branch_gate():
    config = EngramConfig.preset("branch-gate", hidden_size=20, vocab_size=64)
    assert config.bias and config.shared_norms and config.kernel_size == 0 and config.branches == 4
    assert config.norm_eps is None and not config.residual and config.zero_rule == "sign"


def test_unknown_preset_and_override():
    names = "demo, paper-27b, paper-40b, deepseek-v4.1-flash, qwen3.8-flash-next, hybrid-layer, branch-gate"
    with pytest.raises(ValueError, match=f"preset must be one of {names}, got 'demos'"):
        EngramConfig.preset("demos")
    with pytest.raises(ValueError, match="no field hidden"):
        EngramConfig.preset("demo", hidden=3)
    with pytest.raises(ValueError, match="branches must be"):
        EngramConfig.preset("demo", branches=0)
