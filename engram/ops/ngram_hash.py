"""Multi-head n-gram hash: public function and fake kernel."""

import torch
from torch import Tensor

from engram.ops._fake import same_device


def ngram_hash(
    token_ids: Tensor,
    multipliers: Tensor,
    moduli: Tensor,
    offsets: Tensor,
    *,
    pad_id: int,
    token_map: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """Global row ids of every n-gram of order 2..N that ends at each position, for all layers in one pass.

    The n-gram's tokens are multiplied by ``multipliers`` (the current token by column 0), XORed in int64 that wraps,
    and reduced by floored modulo to each column's table (arXiv:2601.07372, section 2; the released demo).

    Args:
        token_ids: int32 or int64 ``[B, T]``, raw ids.
        multipliers: int64 ``[L, N]``.
        moduli: int64 ``[L, C]``, C = (N - 1) * H columns, order-major then head; every one at least 1.
        offsets: int64 ``[L, C]``: first row of each column's table.
        pad_id: raw id that stands for whatever is not visible; goes through ``token_map``.
        token_map: int32 ``[V]``, raw id to compressed id. None: ids are hashed as they are, whatever their value.
        document_ids: integer ``[B, T]``: an n-gram never reaches across a change of id.
        mask: bool ``[B, T]``; False = not a token (padding, an image): it and everything older read as ``pad_id``.
        history: integer ``[B, N - 1]``: raw ids before ``token_ids[:, 0]``, oldest first, of the same document; a
            negative entry hides itself and everything older.

    Returns:
        int64 ``[L, B, T, C]``, offset included; always inside the column's own table.

    Raises:
        IndexError: an unmasked id outside ``token_map`` (on CUDA it counts as masked, unless ENGRAM_DEBUG=1).
        ValueError: a wrong dtype, shape, device or value of any other argument.
    """
    rows: Tensor = torch.ops.engram.ngram_hash(
        token_ids,
        multipliers,
        moduli,
        offsets,
        pad_id=pad_id,
        token_map=token_map,
        document_ids=document_ids,
        mask=mask,
        history=history,
    )
    return rows


@torch.library.register_fake("engram::ngram_hash")
def _(
    token_ids: Tensor, multipliers: Tensor, moduli: Tensor, offsets: Tensor, pad_id: int,
    token_map: Tensor | None = None, document_ids: Tensor | None = None, mask: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:  # fmt: skip
    same_device(
        "ngram_hash",
        token_ids=token_ids,
        multipliers=multipliers,
        moduli=moduli,
        offsets=offsets,
        token_map=token_map,
        document_ids=document_ids,
        mask=mask,
        history=history,
    )
    return token_ids.new_empty((multipliers.shape[0], *token_ids.shape, moduli.shape[1]), dtype=torch.int64)
