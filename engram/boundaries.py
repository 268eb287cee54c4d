"""What a token may see: one mask out of mask and lengths, one document number out of what tells where documents end:
ids, end-of-text tokens, cumulative lengths, positions that begin anew."""
from collections.abc import Sequence

import torch
from torch import Tensor


def check_tokenwise(
    owner: str, shape: Sequence[int], *, mask: Tensor | None = None, **integers: Tensor | None
) -> None:
    """Raise ValueError unless `mask` is bool and each of `integers` an integer tensor, exactly of `shape` [B, T]."""
    for name, tensor in {"mask": mask, **integers}.items():
        if tensor is None:
            continue
        kind = "bool" if name == "mask" else "integer"
        fits = tensor.dtype == torch.bool if name == "mask" else is_integer(tensor)
        if not fits or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{owner}: {name} must be {kind} {list(shape)}, got {describe(tensor)}")


def check_lengths(owner: str, shape: Sequence[int], lengths: Tensor) -> None:
    """Raise ValueError unless `lengths` is integer [B] and (on the CPU) within [0, T]."""
    batch, tokens = shape
    if not is_integer(lengths) or tuple(lengths.shape) != (batch,):
        raise ValueError(f"{owner}: lengths must be integer [{batch}], got {describe(lengths)}")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = lengths[(lengths < 0) | (lengths > tokens)]
        if wrong.numel():
            raise ValueError(f"{owner}: lengths must be in [0, {tokens}], got {wrong[0].item()}")


def visible_tokens(owner: str, shape: Sequence[int], mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """bool [B, T]: True where `mask` [B, T] is and the position is below `lengths` [B]. None if both are None.

    Raises:
        ValueError: a wrong shape or dtype, or (on the CPU) a length outside [0, T].
    """
    check_tokenwise(owner, shape, mask=mask)
    if lengths is None:
        return mask
    check_lengths(owner, shape, lengths)
    within = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
    return within if mask is None else within & mask


def document_runs(token_ids: Tensor, eos_id: int, document_ids: Tensor | None, visible: Tensor | None) -> Tensor:
    """int64 [B, T]: grows by one at each change of `document_ids` and after each visible `eos_id`.

    An end-of-text token belongs to the document that it ends. Ids where `visible` [B, T] is False are not looked at.
    """
    ends = token_ids == eos_id
    if visible is not None:
        ends = ends & visible
    starts = ends[:, :-1]
    if document_ids is not None:
        starts = starts | (document_ids[:, 1:] != document_ids[:, :-1])
    # The first token starts nothing: zeros in front, and T = 0 stays T = 0.
    runs = torch.zeros_like(token_ids, dtype=torch.int64)
    runs[:, 1:] = starts.cumsum(1)
    return runs


def document_ids_from(
    *,
    shape: tuple[int, int] | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    token_ids: Tensor | None = None,
    eos_id: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Document numbers for every op and module here, out of what a training loop has; boundaries from all of it count.

    Args:
        shape: (B, T); needed where nothing else has it (cu_seqlens alone: (1, T) then).
        document_ids: integer [B, T]: a document ends where the id changes.
        cu_seqlens: integer [n + 1], 0, then where each document ends in the B * T tokens one row after the other, as
            variable-length attention takes it; equal neighbours are empty documents.
        position_ids: integer [B, T]: a document begins where the position is 0; several zeros are as many documents.
        token_ids: integer [B, T], with eos_id.
        eos_id: the end-of-text token; it belongs to the document that it ends.
        mask: bool [B, T], False = not a token; its id and position are not looked at.

    Returns:
        int64 [B, T], from 0 in each row, growing by one with each document.

    Raises:
        ValueError: nothing given, a wrong shape or dtype (three-dimensional position_ids among them), cu_seqlens that
            do not begin with 0, descend, or do not end with B * T, or only one of token_ids and eos_id.
    """
    op = "document_ids_from"
    if (token_ids is None) != (eos_id is None):
        only = "token_ids" if eos_id is None else "eos_id"
        raise ValueError(f"{op}: token_ids and eos_id go together, got only {only}")
    if position_ids is not None and position_ids.dim() != 2:
        raise ValueError(f"{op}: position_ids must be integer [B, T], got {describe(position_ids)}; positions of "
                         "several dimensions do not say where a document begins, pass document_ids or cu_seqlens")
    tensors = dict(document_ids=document_ids, position_ids=position_ids, token_ids=token_ids)
    given = [x for x in (*tensors.values(), mask, cu_seqlens) if x is not None]
    if not given:
        raise ValueError(f"{op}: needs document_ids, cu_seqlens, position_ids, or token_ids with eos_id")
    if cu_seqlens is not None:
        if not is_integer(cu_seqlens) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ValueError(f"{op}: cu_seqlens must be integer [n + 1], got {describe(cu_seqlens)}")
        if shape is None and given[0] is cu_seqlens:
            shape = (1, int(cu_seqlens[-1]))
    size = tuple(given[0].shape if shape is None else shape)
    check_tokenwise(op, size, mask=mask, **tensors)
    starts = torch.zeros(size, dtype=torch.bool, device=given[0].device)
    if document_ids is not None:
        starts[:, 1:] |= document_ids[:, 1:] != document_ids[:, :-1]
    if position_ids is not None:
        starts |= (position_ids == 0) & (True if mask is None else mask)
    if token_ids is not None and eos_id is not None:
        starts[:, 1:] |= ((token_ids == eos_id) & (True if mask is None else mask))[:, :-1]
    if cu_seqlens is not None:
        ends, count = cu_seqlens.long(), starts.numel()
        if ends.device.type == "cpu" and (ends[0] != 0 or ends[-1] != count or (ends.diff() < 0).any()):
            raise ValueError(f"{op}: cu_seqlens must go from 0 up to B * T = {count}, got {ends.tolist()}")
        marked = torch.zeros(count + 1, dtype=torch.bool, device=starts.device).index_fill_(0, ends, True)
        starts |= marked[:-1].view(size)
    starts[:, :1] = False  # the first token starts nothing
    return starts.long().cumsum(1)


def is_integer(tensor: Tensor) -> bool:
    """True for every integer dtype; bool is none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def describe(tensor: Tensor) -> str:
    """dtype and shape, for an error message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
