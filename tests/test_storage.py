"""Tables on huge pages: the same numbers as ordinary memory, aligned, and honest about what the system gave."""
import copy
import io
import mmap
from pathlib import Path

import pytest
import torch

import engram
from engram.storage import HUGE_PAGE

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, dim", [(0, 4), (4, 0), (3, 5), (HUGE_PAGE // 8, 5), (HUGE_PAGE // 4, 16)])
def test_a_table_is_an_ordinary_tensor(rows, dim, dtype):
    table = engram.empty_table(rows, dim, dtype=dtype)
    assert table.shape == (rows, dim) and table.dtype == dtype and table.is_contiguous()
    if table.numel() * dtype.itemsize >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        assert table.data_ptr() % HUGE_PAGE == 0
        assert table.untyped_storage().nbytes() == table.numel() * dtype.itemsize  # saved files carry no padding
    table.fill_(3)
    assert torch.equal(table, torch.full((rows, dim), 3, dtype=dtype))
    assert torch.equal(copy.deepcopy(table), table)
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    assert torch.equal(torch.load(file), table)


def test_the_memory_outlives_the_views():
    row = engram.empty_table(HUGE_PAGE // 4, 16).fill_(7)[100]
    assert row.tolist() == [7.0] * 16


def test_huge_page_share():
    table = engram.empty_table(HUGE_PAGE, 4)
    assert engram.huge_page_share(table) == 0  # not written yet
    table.zero_()
    share = engram.huge_page_share(table)
    assert 0 <= share <= 1
    if SETTING.exists() and "[never]" not in SETTING.read_text():
        assert share > 0  # how much is up to the memory that is free in one piece
    assert engram.huge_page_share(torch.empty(0)) == 0
    assert engram.huge_page_share(torch.empty(5, device="meta")) == 0


def test_the_default_dtype_is_torchs():
    assert engram.empty_table(2, 3).dtype == torch.get_default_dtype()


def test_negative_sizes():
    with pytest.raises(ValueError, match="empty_table: rows and dim must be at least 0, got -1 and 3"):
        engram.empty_table(-1, 3)


def test_the_module_uses_it_and_other_devices_do_not():
    module = engram.nn.MultiHeadEmbedding([HUGE_PAGE // 16, 3], 16)
    assert module.weight.data_ptr() % HUGE_PAGE == 0 or not hasattr(mmap, "MADV_HUGEPAGE")
    assert abs(float(module.weight.detach().std()) - 1) < 0.01
    assert engram.nn.MultiHeadEmbedding([HUGE_PAGE, 3], 16, device="meta").weight.is_meta
    with torch.device("meta"):
        assert engram.nn.MultiHeadEmbedding([HUGE_PAGE, 3], 16).weight.is_meta
    with torch._subclasses.FakeTensorMode():
        assert isinstance(engram.nn.MultiHeadEmbedding([HUGE_PAGE, 3], 16).weight.data, torch._subclasses.FakeTensor)
