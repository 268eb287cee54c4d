"""Continuing text with the example model: greedy, sampled, beams, and a draft that is verified."""

import torch
from torch import Tensor

from engram.models.lm import DecodingState, LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    token_ids: Tensor,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    beams: int = 1,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue prompts, one forward pass over the prompt and one per new token.

    Args:
        model: in evaluation mode or without dropout, as this one is.
        token_ids: int64 [B, T] with T >= 1, prompts padded on the left.
        max_new_tokens: how many tokens to add, at least 0.
        mask: bool [B, T], False = padding; None: there is none.
        temperature: 0 takes the most likely token, above 0 draws from softmax(logits / temperature).
        top_k: draw among the k most likely only.
        beams: above 1: keep this many continuations of each prompt and return the most likely; needs temperature 0.
        eos_id: a continuation ends with it and is filled up with it.
        generator: for drawing; None: torch's default.

    Returns:
        int64 [B, max_new_tokens].

    Raises:
        ValueError: a number out of its range, or beams with a temperature.
    """
    batch, length = token_ids.shape
    for name, value, least in (("T, the length of the prompts,", length, 1), ("max_new_tokens", max_new_tokens, 0),
                               ("temperature", temperature, 0), ("beams", beams, 1), ("top_k", top_k or 1, 1)):
        if value < least:
            raise ValueError(f"generate: {name} must be at least {least}, got {value}")
    if beams > 1 and temperature > 0:
        raise ValueError("generate: beams take the most likely continuation, so temperature must be 0")
    if max_new_tokens == 0:
        return token_ids.new_empty(batch, 0)
    state = DecodingState(model, batch * beams, length + max_new_tokens)
    repeated = token_ids.repeat_interleave(beams, 0)
    logits = model(repeated, mask=None if mask is None else mask.repeat_interleave(beams, 0), state=state)[:, -1]
    if beams > 1:
        return _beam_search(model, state, logits, batch, beams, max_new_tokens, eos_id)
    chosen, ended = [], torch.zeros(batch, dtype=torch.bool, device=token_ids.device)
    for step in range(max_new_tokens):
        token = _choose(logits, temperature, top_k, generator)
        if eos_id is not None:
            token = torch.where(ended, eos_id, token)
            ended |= token == eos_id
        chosen.append(token)
        if step + 1 < max_new_tokens:
            logits = model(token[:, None], state=state)[:, -1]
    return torch.stack(chosen, 1)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _beam_search(
    model: LanguageModel, state: DecodingState, logits: Tensor, batch: int, beams: int, count: int, eos_id: int | None
) -> Tensor:
    device, vocab = logits.device, logits.shape[-1]
    score = torch.full((batch, beams), -torch.inf, device=device)
    score[:, 0] = 0  # all beams are alike at first: one of them counts
    chosen = torch.zeros(batch, beams, 0, dtype=torch.int64, device=device)
    ended = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    for step in range(count):
        step_score = logits.float().log_softmax(-1).view(batch, beams, vocab)
        if eos_id is not None:  # an ended beam goes on with eos_id alone, at no cost
            only = torch.full((vocab,), -torch.inf, device=device)
            only[eos_id] = 0
            step_score = torch.where(ended[..., None], only, step_score)
        score, index = (score[..., None] + step_score).flatten(1).topk(beams)
        origin, token = index // vocab, index % vocab
        chosen = torch.cat([chosen.gather(1, origin[..., None].expand_as(chosen)), token[..., None]], -1)
        ended = ended.gather(1, origin) | (token == eos_id if eos_id is not None else False)
        if step + 1 < count:
            state.select((origin + torch.arange(batch, device=device)[:, None] * beams).flatten())
            logits = model(token.view(-1, 1), state=state)[:, -1]
    return chosen[:, 0]


@torch.no_grad()
def generate_speculatively(
    model: LanguageModel, draft: LanguageModel, token_ids: Tensor, max_new_tokens: int, *, ahead: int = 4
) -> Tensor:
    """The tokens of `generate(model, ...)` with temperature 0, in fewer passes of `model`.

    `draft` proposes `ahead` tokens, `model` looks at all of them in one pass and keeps those that it would have chosen
    itself; what is not kept is taken back from both states.

    Args:
        model: whose continuation it is.
        draft: a smaller model of the same vocabulary.
        token_ids: int64 [1, T] with T >= 1.
        max_new_tokens: how many tokens to add, at least 0.
        ahead: proposals at a time, at least 1.

    Returns:
        int64 [1, max_new_tokens].

    Raises:
        ValueError: more than one prompt, an empty one, or a number out of its range.
    """
    if token_ids.shape[0] != 1 or token_ids.shape[1] < 1:
        raise ValueError(f"generate_speculatively: token_ids must be [1, T] with T >= 1, got {list(token_ids.shape)}")
    if ahead < 1 or max_new_tokens < 0:
        raise ValueError("generate_speculatively: ahead must be at least 1 and max_new_tokens at least 0, got "
                         f"{ahead} and {max_new_tokens}")
    capacity = token_ids.shape[1] + max_new_tokens + ahead + 1
    states = [DecodingState(each, 1, capacity, max_rollback=ahead + 1) for each in (model, draft)]
    # Both states stand before the last token that is known: each round begins with it.
    known = token_ids
    if known.shape[1] > 1:
        for each, state in zip((model, draft), states):
            each(known[:, :-1], state=state)
    end = token_ids.shape[1] + max_new_tokens
    while known.shape[1] < end:
        proposed = known[:, -1:]
        for _ in range(ahead):
            token = draft(proposed[:, -1:], state=states[1])[:, -1:].argmax(-1)
            proposed = torch.cat([proposed, token], 1)
        draft(proposed[:, -1:], state=states[1])  # so that both have seen the same tokens
        own = model(proposed, state=states[0]).argmax(-1)  # what follows each of them
        kept = int((own[0, :-1] == proposed[0, 1:]).long().cumprod(0).sum())
        known = torch.cat([known, own[:, : kept + 1]], 1)
        for state in states:
            state.rollback(ahead - kept)
    return known[:, token_ids.shape[1] : end]
