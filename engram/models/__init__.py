"""A small language model with Engram layers, its text and its training: examples to read, and what `engram train` runs;
and `hybrid`, the variant whose layer has another topology than `engram.nn.Engram`.

Training needs what the extra `train` has (tokenizers, safetensors, tqdm, matplotlib); the models only torch.
"""

from engram.models.generation import generate, generate_speculatively
from engram.models.hybrid import EngramLayer, NgramHasher
from engram.models.lm import DecodingState, LanguageModel, LanguageModelConfig

__all__ = ["DecodingState", "EngramLayer", "LanguageModel", "LanguageModelConfig", "NgramHasher", "generate",
           "generate_speculatively"]
