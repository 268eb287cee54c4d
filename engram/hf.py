"""Engram layers inside the causal language models of Hugging Face `transformers`.

`add_engram` puts an `nn.Engram` in front of the attention of chosen decoder layers, as a submodule `engram` of theirs:

    hidden = hidden + engram(hidden, token_ids)

Nothing is hooked or patched: the model, its base model and its decoder layers become instances of subclasses of their
own classes, made here under the same names (trainers, FSDP and checkpoints know layers by name). The base model hands
the token ids down to the layers; what decoding keeps of a sequence lies in the layer of the cache that has its keys and
values, and is cropped, reordered and repeated with them.
"""

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engram.boundaries import check_tokenwise, document_ids_from
from engram.config import EngramConfig
from engram.nn import Engram, layer_moduli
from engram.optim import clip_grad_norm_
from engram.state import EngramState
from engram.vocab import TokenMap

try:
    from safetensors import safe_open
    from transformers import AutoConfig, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
    from transformers.cache_utils import Cache
    from transformers.generation import GenerationMixin
    from transformers.utils import cached_file
except ImportError as error:
    raise ImportError(
        f'engram.hf needs transformers 4.57 or newer: python -m pip install "transformers>=4.57" safetensors ({error})'
    ) from error

__all__ = ["MODEL_TYPES", "add_engram", "load_engram", "set_train_mode", "clip_sparse_gradients"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2")
"""`config.model_type` of the models that take Engram layers."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class Tokens(NamedTuple):
    """What the base model tells its layers about the tokens of a call: ids, mask and document_ids [B, T] or None."""

    ids: Tensor
    mask: Tensor | None
    document_ids: Tensor | None


# Subclasses of the model's own classes, and of those of its cache.


Graft = Callable[[Any], Any]  # a class to a subclass of it; what it is made of only shows when transformers is there


def _graft(make: Graft) -> Graft:
    """Of `make`, which makes a subclass of a class: the same one each time, under the name of that class."""

    @functools.cache
    @functools.wraps(make)
    def grafted(host: Any) -> Any:
        def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
            # Pickled and copied as what it was made of: no module has it under its name.
            _, _, *rest = host.__reduce_ex__(self, max(2, protocol))
            return (_blank, (grafted, host), *rest)

        cls = make(host)
        cls.__name__, cls.__qualname__, cls.__module__ = host.__name__, host.__qualname__, host.__module__
        cls.__reduce_ex__, cls._grafted_by = reduce, grafted
        return cls

    return grafted


def _blank(grafted: Graft, host: Any) -> Any:
    cls = grafted(host)
    return cls.__new__(cls)


def _is(thing: Any, grafted: Graft) -> bool:
    return getattr(type(thing), "_grafted_by", None) is grafted


@_graft
def _causal_lm(host: Any) -> Any:
    class CausalLM(host):
        _keys_to_ignore_on_load_unexpected = [*(host._keys_to_ignore_on_load_unexpected or ()), r"\.engram\."]

        @classmethod
        def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
            """`transformers`' own, then the Engram layers; see `load_engram`."""
            if "torch_dtype" not in kwargs:  # the name before
                kwargs.setdefault("dtype", "auto")
            loaded = super().from_pretrained(path, *args, **kwargs)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            _load_layers(model, path, {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs})
            return loaded

        def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
            mask, ids = kwargs.get("attention_mask"), inputs.get("input_ids")
            # With a static cache it becomes the mask of the attention, which no longer tells tokens from padding.
            if isinstance(mask, Tensor) and mask.dim() == 2 and ids is not None:
                inputs.setdefault("engram_mask", mask[:, -ids.shape[1] :].to(ids.device, torch.bool))
            return inputs

        def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
            size = self.get_input_embeddings().num_embeddings
            if new_num_tokens not in (None, size):
                raise ValueError(f"resize_token_embeddings: the Engram layers hash a vocabulary of {size} ids, got "
                                 f"{new_num_tokens}; resize the model before add_engram")
            resized: nn.Module = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
            return resized

    return CausalLM


@_graft
def _backbone(host: Any) -> Any:
    names = tuple(inspect.signature(host.forward).parameters)[1:]

    class Backbone(host):
        @functools.wraps(host.forward)
        def forward(
            self, *args: Any, engram_mask: Tensor | None = None, engram_document_ids: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            tokens = _tokens(dict(zip(names, args)) | kwargs, engram_mask, engram_document_ids)
            return super().forward(*args, engram_tokens=tokens, **kwargs)

    return Backbone


@_graft
def _decoder_layer(host: Any) -> Any:
    class DecoderLayer(host):  # with or without a submodule `engram`
        def forward(self, hidden_states: Tensor, *args: Any, engram_tokens: Tokens | None = None, **kwargs: Any) -> Any:
            engram = self._modules.get("engram")
            if engram is not None:
                if engram_tokens is None:
                    raise ValueError("a decoder layer with Engram needs token ids: call the model, not the layer")
                # The name under which a layer gets the cache differs between models and versions, and gradient
                # checkpointing takes it away.
                cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
                state = None if cache is None else _state(cache, engram, hidden_states, self.engram_max_rollback)
                ids, mask, document_ids = engram_tokens
                hidden_states = engram(
                    hidden_states, ids, mask=mask, document_ids=document_ids, state=state, residual=True
                )
            return super().forward(hidden_states, *args, **kwargs)

    return DecoderLayer


@_graft
def _cache_layer(host: Any) -> Any:
    class CacheLayer(host):  # the state of an Engram layer goes through all that keys and values do
        _layer_type = None  # of a class that has one, transformers would make the layers of every new cache
        engram_state: EngramState | None = None

        def reset(self) -> None:
            super().reset()
            if self.engram_state is not None:
                self.engram_state.reset()

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            if self.engram_state is not None:
                self.engram_state.select(beam_idx)

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.engram_state = pytree.tree_map(lambda x: x.repeat_interleave(repeats, 0), self.engram_state)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.engram_state = pytree.tree_map(lambda x: x[indices.to(x.device)], self.engram_state)

        def crop(self, count: int) -> None:
            # Whether the argument is what to keep or what to remove differs between versions of transformers.
            before = int(self.get_seq_length())
            super().crop(count)
            left, state = int(self.get_seq_length()), self.engram_state
            if state is None or left == before:
                return
            if left == 0:
                state.reset()
                return
            room = min(int(ring.tensors["room"].amin()) for ring in state.rings.values())
            if before - left > room:
                self.engram_state = None  # going on would give wrong tokens: without a state it is refused
                raise ValueError(f"crop: the Engram layers can take {room} tokens back, got {before - left}; "
                                 f"add_engram(max_rollback=) says how many at most, here {state.max_rollback}")
            state.rollback(before - left)

    return CacheLayer


# What a call sees.


def _tokens(given: dict[str, Any], mask: Tensor | None, document_ids: Tensor | None) -> Tokens:
    """Ids, mask and documents out of the arguments that the base model was called with."""
    ids = given.get("input_ids")
    if ids is None:
        raise ValueError("a model with Engram layers needs input_ids: they hash token ids, inputs_embeds have none")
    ids = ids.view(-1, ids.shape[-1])
    shape = batch, tokens = tuple(ids.shape)
    cache = given.get("cache", given.get("past_key_values"))
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError("a model with Engram layers keeps their state in a transformers Cache, got "
                        f"{type(cache).__name__}")
    before = 0 if cache is None else cache.get_seq_length()

    attention = given.get("attention_mask")
    if mask is None and isinstance(attention, Tensor) and attention.dim() == 2:
        if isinstance(before, int):
            mask = attention[:, before : before + tokens].bool()
        else:  # a static cache counts on its device
            mask = attention.index_select(1, before + torch.arange(tokens, device=attention.device)).bool()
        mask = mask.to(ids.device)
    positions = given.get("position_ids")
    if document_ids is None and positions is not None and isinstance(before, int) and before == 0:
        # As in attention, packed sequences are told by positions that begin anew, unless they continue a cache.
        positions = positions.to(ids.device).expand(batch, -1) if positions.dim() == 2 else positions
        document_ids = document_ids_from(position_ids=positions, mask=mask)
    check_tokenwise("Engram in transformers", shape, mask=mask, document_ids=document_ids)
    return Tokens(ids, mask, document_ids)


def _state(cache: Cache, engram: Engram, hidden: Tensor, max_rollback: int) -> EngramState:
    """The state of `engram` in `cache`; a new one where the cache is empty."""
    layers, index = cache.layers, engram.layer_id
    while len(layers) <= index and cache.layer_class_to_replicate is not None:  # as the first update would do
        layers.append(cache.layer_class_to_replicate())
    layer = layers[index]
    state: EngramState | None = getattr(layer, "engram_state", None)
    if state is None or state.batch_size != hidden.shape[0] and layer.get_seq_length() == 0:
        state = _begin(layer, engram, hidden, max_rollback)
    return state


@torch.compiler.disable
def _begin(layer: Any, engram: Engram, hidden: Tensor, max_rollback: int) -> EngramState:
    if layer.get_seq_length() > 0:
        raise ValueError("the cache holds tokens that the Engram layers have not seen (or that a crop beyond "
                         "max_rollback made them forget): begin with an empty cache")
    if not _is(layer, _cache_layer):
        layer.__class__ = _cache_layer(type(layer))
    device, dtype = hidden.device.type, None
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # which autocast leaves as it is
        dtype = torch.get_autocast_dtype(device)
    state = layer.engram_state = engram.init_state(hidden.shape[0], max_rollback, dtype=dtype)
    if layer.is_compileable:
        for tensor in pytree.tree_leaves(state):
            torch._dynamo.mark_static_address(tensor)
    return state


# Putting in, saving, loading.


def add_engram(
    model: PreTrainedModel,
    config: EngramConfig,
    tokenizer_or_token_map: Any = None,
    *,
    train_mode: str = "all",
    share_table: bool = False,
    max_rollback: int = 64,
) -> PreTrainedModel:
    """Put Engram layers before the attention of the decoder layers `config.layer_ids`, in place.

    The new layers take dtype and device of the decoder layer (the table `config.table_dtype` where that is set), show
    up as `...layers.{i}.engram.*` in parameters and state dict, and are saved by `save_pretrained`; `load_engram` or
    `type(model).from_pretrained` gives the model back. Calls take two more arguments: `engram_mask` bool [B, T], False
    = not a token (by default a two-dimensional `attention_mask` says so), and `engram_document_ids` integer [B, T] (by
    default `position_ids` that begin anew do, where no cache is continued).

    Args:
        model: a causal language model whose `config.model_type` is in MODEL_TYPES; not yet wrapped (PEFT, DDP).
        config: `hidden_size` and `vocab_size` (rows of the input embedding) of the model; `branches` 1, for such a
            model has one residual stream.
        tokenizer_or_token_map: a TokenMap; or what `TokenMap.from_tokenizer` takes, a fast tokenizer of `transformers`
            among that; or None: raw ids are hashed.
        train_mode: "engram": the model's own parameters are frozen; "all": they are left as they are.
        share_table: one table for all layers (with hash multipliers of their own), sized as that of the first.
        max_rollback: by how many tokens a cache can be cropped: drafts of assisted decoding and prompt lookup.

    Returns:
        `model`.

    Raises:
        TypeError: a model, configuration or tokenizer of another kind.
        ValueError: a model of another architecture, with Engram layers already, or with offloaded weights; or numbers
            that do not fit it. The model is unchanged then.
    """
    _check_model(model)
    _check_fit(model, config, max_rollback)
    _check_train_mode(train_mode)
    token_map = tokenizer_or_token_map
    if token_map is not None and not isinstance(token_map, TokenMap):
        token_map = TokenMap.from_tokenizer(token_map, vocab_size=config.vocab_size)
    if token_map is None and config.compressed_vocab_size is not None:
        raise ValueError(f"add_engram: compressed_vocab_size is {config.compressed_vocab_size}, so a tokenizer or "
                         "token map is needed")
    if token_map is not None and config.compressed_vocab_size is None:
        config = dataclasses.replace(config, compressed_vocab_size=token_map.compressed_vocab_size)
    if share_table:
        sizes = layer_moduli(config, config.layer_ids[0])
        config = dataclasses.replace(config, moduli=(sizes,) * len(config.layer_ids))
    _attach(model, _new_layers(model, config, token_map), config, share_table, max_rollback)
    if train_mode == "engram":
        set_train_mode(model, train_mode)
    return model


def load_engram(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """A model that was saved with its Engram layers, with the same bits.

    Args:
        path: folder written by `save_pretrained`, or a name on the hub.
        kwargs: as for `from_pretrained`; `dtype` is "auto" (that of the file) unless given.

    Raises:
        ValueError: the model there has no Engram layers, or not all of their weights.
    """
    config = kwargs.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(path, **{k: kwargs[k] for k in _HUB_ARGUMENTS if k in kwargs})
    if getattr(config, "engram", None) is None:
        raise ValueError(f"load_engram: {os.fspath(path)!r} has no Engram layers: no field 'engram' in its config.json")
    host = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return _causal_lm(host).from_pretrained(path, config=config, **kwargs)


def set_train_mode(model: nn.Module, mode: str) -> None:
    """Say what is trained, by `requires_grad` of all parameters.

    Args:
        model: with Engram layers.
        mode: "engram": the Engram layers alone; "all": everything.

    Raises:
        ValueError: another mode.
    """
    _check_train_mode(mode)
    memory = {id(p) for module in model.modules() if isinstance(module, Engram) for p in module.parameters()}
    for param in model.parameters():
        if param.is_floating_point():  # what is quantized to integers is not trained
            param.requires_grad_(mode == "all" or id(param) in memory)


def clip_sparse_gradients(trainer: Any) -> None:
    """Let a `transformers.Trainer` clip, and log the norm of, the gradients of tables with `sparse_grad`.

    Trainer has its accelerator clip them with torch's `clip_grad_norm_`, which raises NotImplementedError for sparse
    gradients. From here on this accelerator uses `engram.optim.clip_grad_norm_` where there are any.

    Args:
        trainer: a Trainer, or a subclass; its optimizer must take sparse gradients too, as LazyAdamW does:
            `optimizers=(engram.optim.LazyAdamW(engram.optim.param_groups(model, lr, weight_decay)), None)`.
    """
    accelerator = trainer.accelerator
    dense = accelerator.clip_grad_norm_

    def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        parameters = list(parameters)
        if not any(param.grad is not None and param.grad.is_sparse for param in parameters):
            norm: Tensor | None = dense(parameters, max_norm, norm_type=norm_type)
            return norm
        accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"add_engram: model must be a transformers model, not wrapped, got {type(model).__name__}")
    kind = getattr(model.config, "model_type", None)
    causal = isinstance(model, GenerationMixin) and model.base_model is not model
    if kind not in MODEL_TYPES or not causal or getattr(model.config, "add_cross_attention", False):
        raise ValueError(f"add_engram: model must be a causal language model of type {', '.join(MODEL_TYPES)}, "
                         f"got {type(model).__name__} of type {kind!r}")
    if _is(model.base_model, _backbone):
        raise ValueError("add_engram: the model has Engram layers already, at "
                         f"{model.config.engram['config']['layer_ids']}")
    if any(param.is_meta for param in model.parameters()):
        raise ValueError("add_engram: the model's weights are offloaded or not loaded yet; add Engram layers first")


def _check_fit(model: PreTrainedModel, config: EngramConfig, max_rollback: int) -> None:
    if not isinstance(config, EngramConfig):
        raise TypeError(f"add_engram: config must be an EngramConfig, got {type(config).__name__}")
    if config.branches != 1:
        raise ValueError("add_engram: branches must be 1, a transformer has one residual stream, got "
                         f"{config.branches}")
    for name, own in (("hidden_size", model.config.hidden_size),
                      ("vocab_size", model.get_input_embeddings().num_embeddings)):
        if getattr(config, name) != own:
            raise ValueError(f"add_engram: {name} must be {own}, the model's, got {getattr(config, name)}")
    count = len(_decoder_layers(model))
    if wrong := [i for i in config.layer_ids if i >= count]:
        raise ValueError(f"add_engram: layer_ids must be in [0, {count}), the model's layers, got {wrong[0]}")
    if isinstance(max_rollback, bool) or not isinstance(max_rollback, int) or max_rollback < 0:
        raise ValueError(f"add_engram: max_rollback must be an integer >= 0, got {max_rollback!r}")


def _check_train_mode(mode: str) -> None:
    if mode not in ("all", "engram"):
        raise ValueError(f"train_mode must be 'all' or 'engram', got {mode!r}")


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    base = model.base_model
    layers: nn.ModuleList = base.h if hasattr(base, "h") else base.layers
    return layers


def _new_layers(
    model: PreTrainedModel, config: EngramConfig, token_map: TokenMap | None, *, empty: bool = False
) -> dict[int, Engram]:
    """An Engram for each of the layers, of the dtype and device of the decoder layer; `empty`: not initialised."""
    made = {}
    for index in config.layer_ids:
        floats = [p for p in _decoder_layers(model)[index].parameters() if p.is_floating_point()]
        device, dtype = floats[0].device, floats[0].dtype
        engram = Engram(config, index, token_map=token_map, device="meta" if empty else device, dtype=dtype)
        made[index] = engram.to_empty(device=device) if empty else engram
    return made


def _attach(
    model: PreTrainedModel, engrams: dict[int, Engram], config: EngramConfig, share_table: bool, max_rollback: int
) -> None:
    first, layers = config.layer_ids[0], _decoder_layers(model)
    layer: Any
    for index, layer in enumerate(layers):
        _become(layer, _decoder_layer)
        if index not in engrams:
            continue
        layer.engram, layer.engram_max_rollback = engrams[index], max_rollback
        if share_table and index != first:
            layer.engram.embedding.weight = engrams[first].embedding.weight
            layer._tied_weights_keys = {"engram.embedding.weight": "engram.embedding.weight"}  # saved with the first
        layer.engram.train(layer.training)
    _become(model.base_model, _backbone)
    if not _is(model, _causal_lm):
        _become(model, _causal_lm)
    model.config.engram = dict(config=config.to_dict(), share_table=share_table, max_rollback=max_rollback)


def _become(module: nn.Module, grafted: Graft) -> None:
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:  # accelerate's, of a model on several devices: it holds on to the forward of the class before
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(module)
        vars(module).pop("forward", None)
    module.__class__ = grafted(type(module))
    if hook is not None:
        add_hook_to_module(module, hook)


def _load_layers(model: PreTrainedModel, path: str | os.PathLike[str], hub: dict[str, Any]) -> None:
    """Put the Engram layers that `model.config.engram` tells of into `model`, with the weights at `path`."""
    settings = getattr(model.config, "engram", None)
    if settings is None:
        raise ValueError(f"from_pretrained: {os.fspath(path)!r} has no Engram layers")
    config = EngramConfig.from_dict(settings["config"])
    prefix = next(name for name, module in model.named_modules() if module is _decoder_layers(model))
    engrams = _new_layers(model, config, None, empty=True)
    files = _weight_files(path, hub)
    for index, engram in engrams.items():
        start = f"{prefix}.{index}.engram."
        names = [name for name in files if name.startswith(start)]
        missing, _ = engram.load_state_dict({n.removeprefix(start): _read(files[n], n) for n in names}, strict=False)
        shared = ["embedding.weight"] if settings["share_table"] and index != config.layer_ids[0] else []
        if missing != shared:
            raise ValueError(f"from_pretrained: {os.fspath(path)!r} has no {start}{', '.join(missing)}")
    _attach(model, engrams, config, settings["share_table"], settings["max_rollback"])


def _weight_files(path: str | os.PathLike[str], hub: dict[str, Any]) -> dict[str, str]:
    """Which safetensors file each of the saved tensors is in."""
    try:
        file = cached_file(path, _WEIGHTS, **hub)
    except OSError:
        with open(cached_file(path, _INDEX, **hub)) as index:
            shards = json.load(index)["weight_map"]
        places = {shard: cached_file(path, shard, **hub) for shard in set(shards.values())}
        return {name: places[shard] for name, shard in shards.items()}
    with safe_open(file, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _read(file: str, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
