"""Tables on huge pages: the same numbers as ordinary memory, aligned, and honest about what the system gave."""
import copy
import io
import mmap
from pathlib import Path

import pytest
import torch

import engram
from engram.storage import DRAW_BLOCK, fill_normal_, HUGE_PAGE, zeros_where_touched

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


# Filling -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_table_is_drawn_alike_by_any_number_of_threads(dtype):
    """Blocks with generators of their own: the seed decides, the threads do not, and no block is another's copy."""
    before, found = torch.get_num_threads(), []
    try:
        for threads, seed in ((1, 0), (3, 0), (2, 1)):
            torch.set_num_threads(threads)
            torch.manual_seed(seed)
            found.append(fill_normal_(torch.empty(3 * DRAW_BLOCK // 8 + 5, 8, dtype=dtype), std=0.5))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    values = found[0].double()
    assert abs(values.std() - 0.5) < 0.01 and abs(values.mean()) < 0.01
    blocks = values.view(-1)[: 3 * DRAW_BLOCK].view(3, -1)
    assert not torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[1], blocks[2])
    assert abs((blocks[0] * blocks[1]).mean()) < 0.01


def test_small_tables_and_other_places_are_drawn_as_by_torch():
    torch.manual_seed(3)
    expected = torch.nn.init.normal_(torch.empty(7, 5), std=2.0)
    torch.manual_seed(3)
    assert torch.equal(fill_normal_(torch.empty(7, 5), std=2.0), expected)
    assert fill_normal_(torch.empty(2**21, 2, device="meta")).is_meta
    strided = torch.empty(8, 2**18).T
    assert abs(fill_normal_(strided).std() - 1) < 0.01


def test_zeros_where_touched():
    for shape in ((3,), (5, 7), (2**20, 9), (0, 4)):
        zeros = zeros_where_touched(shape, dtype=torch.float32, device="cpu")
        assert zeros.shape == shape and zeros.dtype == torch.float32 and not zeros.any()
    assert zeros_where_touched((2**40,), dtype=torch.float32, device="meta").is_meta
    huge = zeros_where_touched((2**30,), dtype=torch.float32, device="cpu")       # 4 GiB that nobody writes
    huge[-1] = 1
    assert huge[0] == 0 and huge[-1] == 1
    with pytest.raises(RuntimeError, match="not enough memory for a table of 4,503,599,627,370,496 bytes"):
        zeros_where_touched((2**50,), dtype=torch.float32, device="cpu")
