"""Document numbers out of everything that says where documents end."""
import pytest
import torch
from engram import EngramConfig, nn
from engram.boundaries import document_ids_from
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_all_ways_agree(rows):
    """Documents of these lengths in each row, padded at the end by one more document."""
    tokens = max(sum(row) for row in rows)
    rows = [row + [tokens - sum(row)] * (sum(row) < tokens) for row in rows]
    expected = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    sizes = torch.tensor([size for row in rows for size in row])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int()])
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in rows])
    ids = torch.full_like(expected, 5)
    for b, row in enumerate(rows):
        ids[b, torch.tensor(row).cumsum(0) - 1] = 9                 # the last token of each document
    ways = [dict(document_ids=expected % 2), dict(cu_seqlens=cu_seqlens, shape=expected.shape),
            dict(position_ids=positions), dict(token_ids=ids, eos_id=9), dict(token_ids=ids, eos_id=9, position_ids=positions)]
    for way in ways:
        assert torch.equal(document_ids_from(**way), expected)
    if len(rows) == 1:
        assert torch.equal(document_ids_from(cu_seqlens=cu_seqlens), expected)


def test_one_token_documents_and_empty_ones():
    assert document_ids_from(position_ids=torch.zeros(1, 4, dtype=torch.int64)).tolist() == [[0, 1, 2, 3]]
    assert document_ids_from(cu_seqlens=torch.tensor([0, 0, 2, 2, 3, 3])).tolist() == [[0, 0, 1]]
    assert document_ids_from(cu_seqlens=torch.tensor([0])).shape == (1, 0)


def test_masked_positions_are_not_looked_at():
    """Left padding whose positions are filled with 0 or 1 begins no document."""
    mask = torch.tensor([[False, False, True, True, True]])
    for fill in (0, 1):
        positions = torch.tensor([[fill, fill, 0, 1, 2]])
        ids = document_ids_from(position_ids=positions, mask=mask)
        assert (ids[0, 2:] == ids[0, 2]).all()
    tokens = torch.tensor([[9, 9, 1, 9, 1]])
    assert document_ids_from(token_ids=tokens, eos_id=9, mask=mask).tolist() == [[0, 0, 0, 0, 1]]


def test_the_layer_stops_there():
    config = EngramConfig(hidden_size=8, vocab_size=30, table_size=53, heads_per_ngram=2, embed_dim_per_head=4,
                          layer_ids=(1,), conv_init="default")
    layer, hidden, ids = nn.Engram(config, 1).double(), torch.randn(1, 9, 8).double(), torch.randint(30, (1, 9))
    packed = layer(hidden, ids, document_ids=document_ids_from(cu_seqlens=torch.tensor([0, 4, 9])))
    torch.testing.assert_close(packed[:, 4:], layer(hidden[:, 4:], ids[:, 4:]))


@pytest.mark.parametrize("arguments, message", [
    (dict(), "needs document_ids, cu_seqlens, position_ids, or token_ids with eos_id"),
    (dict(token_ids=torch.zeros(1, 3, dtype=torch.int64)), "token_ids and eos_id go together, got only token_ids"),
    (dict(position_ids=torch.zeros(3, 1, 4, dtype=torch.int64)), "position_ids must be integer .* got int64 .3, 1, 4.; "),
    (dict(position_ids=torch.zeros(1, 4)), "position_ids must be integer"),
    (dict(cu_seqlens=torch.tensor([1, 4])), r"cu_seqlens must go from 0 up to B \* T = 4, got \[1, 4\]"),
    (dict(cu_seqlens=torch.tensor([0, 5, 4])), "cu_seqlens must go from 0"),
    (dict(cu_seqlens=torch.tensor([0, 4]), shape=(2, 3)), "B . T = 6, got .0, 4."),
    (dict(cu_seqlens=torch.tensor([0.0, 4.0])), "cu_seqlens must be integer"),
    (dict(document_ids=torch.zeros(2, 3, dtype=torch.int64), mask=torch.ones(2, 4, dtype=torch.bool)), "mask must be bool"),
])
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match="^document_ids_from: .*" + message):
        document_ids_from(**arguments)
