"""The compiled module, csrc/bindings/module.cpp: importing it registers torch.ops.engram.*"""

from typing import TypedDict

class BuildInfo(TypedDict):
    torch: str
    compiler: str
    cpu: str
    cuda: str | None

def build_info() -> BuildInfo: ...
def half_products(dtype: str) -> bool: ...
