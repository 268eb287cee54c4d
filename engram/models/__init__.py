"""A small language model with Engram layers, its text and its training: examples to read, and what `engram train` runs.

Needs `pip install "engram-torch[train]"` (tokenizers, safetensors, tqdm, matplotlib); the model, `lm`, only torch.
"""

from engram.models.generation import generate, generate_speculatively
from engram.models.lm import DecodingState, LanguageModel, LanguageModelConfig

__all__ = ["DecodingState", "LanguageModel", "LanguageModelConfig", "generate", "generate_speculatively"]
