"""What a token may see: one mask out of mask and lengths, one document number out of ids and end-of-text tokens."""
import torch
from torch import Tensor


def check_tokenwise(
    owner: str, shape: tuple[int, int], *, mask: Tensor | None = None, **integers: Tensor | None
) -> None:
    """Raise ValueError unless `mask` is bool and each of `integers` an integer tensor, exactly of `shape` [B, T]."""
    for name, tensor in {"mask": mask, **integers}.items():
        if tensor is None:
            continue
        kind = "bool" if name == "mask" else "integer"
        fits = tensor.dtype == torch.bool if name == "mask" else is_integer(tensor)
        if not fits or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{owner}: {name} must be {kind} {list(shape)}, got {describe(tensor)}")


def visible_tokens(owner: str, shape: tuple[int, int], mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """bool [B, T]: True where `mask` [B, T] is and the position is below `lengths` [B]. None if both are None.

    Raises:
        ValueError: a wrong shape or dtype, or (on the CPU) a length outside [0, T].
    """
    check_tokenwise(owner, shape, mask=mask)
    if lengths is None:
        return mask
    batch, tokens = shape
    if not is_integer(lengths) or tuple(lengths.shape) != (batch,):
        raise ValueError(f"{owner}: lengths must be integer [{batch}], got {describe(lengths)}")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = lengths[(lengths < 0) | (lengths > tokens)]
        if wrong.numel():
            raise ValueError(f"{owner}: lengths must be in [0, {tokens}], got {wrong[0].item()}")
    within = torch.arange(tokens, device=lengths.device) < lengths[:, None]
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


def is_integer(tensor: Tensor) -> bool:
    """True for every integer dtype; bool is none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def describe(tensor: Tensor) -> str:
    """dtype and shape, for an error message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
