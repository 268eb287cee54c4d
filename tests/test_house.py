"""The rules of the house (CONTRIBUTING.md), as far as a machine can check: walks `torch.ops.engram` and the tree."""
import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from engram import ops, reference
from samples import DIFFERENTIABLE, SAMPLES
from test_determinism import LARGE
from test_registration import CHECKED, SIZES

ROOT = Path(__file__).parents[1]
REGISTERED = {name.split("::")[1]: getattr(torch.ops.engram, name.split("::")[1]).default
              for name in torch._C._dispatch_get_all_op_names() if name.startswith("engram::")}
OPS = sorted(name for name in REGISTERED if not name.endswith("_backward"))
BACKWARDS = sorted(name for name in REGISTERED if name.endswith("_backward"))

KERNELS, BINDINGS = ROOT / "csrc" / "kernels", ROOT / "csrc" / "bindings"
SOURCES = ("*.h", "*.cpp", "*.cu", "*.cuh")


def sources(folder: Path) -> list[Path]:
    return sorted(path for pattern in SOURCES for path in folder.rglob(pattern))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def has_kernel(op: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"engram::{op}", key)


def imported_modules(path: Path) -> set[str]:
    """Full names of what a Python file imports; `from engram import nn` counts as engram.nn."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative imports hide the arrows"
            deeper = node.module == "engram"
            modules |= {f"engram.{alias.name}" for alias in node.names} if deeper else {node.module}
    return modules


def test_the_walk_finds_the_ops():
    assert {"ngram_hash", "embedding", "gate", "short_conv"} <= set(OPS)
    assert set(OPS) == set(ops.__all__)


# Rule 1: one stem in every folder.

@pytest.mark.parametrize("op", OPS)
def test_one_stem(op):
    files = [f"csrc/kernels/{op}.h", f"csrc/kernels/cpu/{op}.cpp", f"csrc/bindings/{op}.cpp", f"engram/ops/{op}.py",
             f"tests/ops/test_{op}.py"]
    if list(KERNELS.glob("cuda/*.cu")):
        files.append(f"csrc/kernels/cuda/{op}.cu")
    missing = [file for file in files if not (ROOT / file).is_file()]
    assert not missing


def test_no_stem_without_an_op():
    known = set(OPS)
    assert {path.stem for path in (ROOT / "engram" / "ops").glob("[!_]*.py")} == known
    assert {path.stem for path in BINDINGS.glob("*.cpp")} - {"library", "module"} == known
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "ops").glob("test_*.py")} == known
    assert {path.stem for path in KERNELS.glob("cuda/*.cu")} <= known


# Rule 2: three layers, one direction.

@pytest.mark.parametrize("path", sources(KERNELS), ids=relative)
def test_kernels_know_no_torch(path):
    for include in re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', path.read_text()):
        assert not re.match(r"(torch/(?!headeronly/)|ATen|c10|pybind11|Python\.h)", include), include
        assert "bindings" not in include, include


def test_only_bindings_see_torch_tensors():
    for path in sources(ROOT / "csrc"):
        if BINDINGS not in path.parents:
            assert not re.search(r"torch::stable|at::Tensor|torch::Tensor", path.read_text()), relative(path)


def test_bindings_stay_on_the_stable_abi():
    """What ATen's own headers bring in breaks with the next torch; pybind11 is for the module object alone."""
    for path in sources(BINDINGS):
        includes = re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', path.read_text())
        for include in includes:
            assert not re.match(r"(ATen|c10|torch/(extension|library|all)\.h)", include), (relative(path), include)
            assert not include.startswith("pybind11") or path.stem == "module", (relative(path), include)


@pytest.mark.parametrize("path", sorted((ROOT / "engram" / "ops").glob("*.py")), ids=relative)
def test_ops_import_torch_and_each_other(path):
    for module in imported_modules(path):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names or top == "torch" or module.startswith("engram.ops"), module
        assert module != "torch.nn", module


def test_the_reference_imports_torch_alone():
    modules = imported_modules(ROOT / "engram" / "reference.py")
    assert {module.split(".")[0] for module in modules} == {"torch", "typing"}


@pytest.mark.parametrize("stem", ["config", "tables", "vocab"])
def test_plain_rooms_do_not_look_up(stem):
    above = {f"engram.{name}" for name in ("nn", "ops", "reference", "models", "cli")}
    assert not above & imported_modules(ROOT / "engram" / f"{stem}.py")


# Rule 3: the header is the contract, and the docstring the public one.

@pytest.mark.parametrize("op", OPS)
def test_contracts_are_written_down(op):
    assert (KERNELS / f"{op}.h").read_text().startswith("// ")
    doc = inspect.getdoc(getattr(ops, op))
    assert all(section in doc for section in ("Args:", "Returns:", "Raises:"))
    missing = [name for name in inspect.signature(getattr(ops, op)).parameters if name not in doc]
    assert not missing


# Rule 4: each argument's message has a test.

@pytest.mark.parametrize("op", OPS)
def test_every_checked_argument_has_an_error_test(op):
    text = (ROOT / "tests" / "ops" / f"test_{op}.py").read_text()
    arguments = [a.name for a in REGISTERED[op]._schema.arguments if str(a.type) not in ("bool", "Optional[int]")]
    missing = [name for name in arguments if f'"{name}"' not in text]
    assert not missing or missing == ["rows"] and "rows must be" in text


# Rule 6: deterministic by construction.

@pytest.mark.parametrize("path", sources(KERNELS), ids=relative)
def test_no_float_atomics(path):
    assert not re.search(r"atomicAdd|red\.global|omp\s+atomic|atomic<\s*(float|double|T|A)\s*>", path.read_text())


# Rule 8: nothing is left out.

@pytest.mark.parametrize("op", sorted(REGISTERED))
def test_every_op_has_fake_and_cpu_kernels(op):
    assert has_kernel(op, "Meta") and has_kernel(op, "CPU")


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_reference_and_samples(op):
    public, plain = inspect.signature(getattr(ops, op)), inspect.signature(getattr(reference, op))
    assert [(p.name, p.kind, p.default) for p in public.parameters.values()] \
        == [(p.name, p.kind, p.default) for p in plain.parameters.values()]
    assert SAMPLES[op] and len({sample.name for sample in SAMPLES[op]}) == len(SAMPLES[op])
    assert CHECKED[op] and SIZES[op] and LARGE[op]


@pytest.mark.parametrize("op", OPS)
def test_every_differentiable_op_has_autograd(op):
    differentiable = op in DIFFERENTIABLE
    assert has_kernel(op, "Autograd") == differentiable
    assert (f"{op}_backward" in BACKWARDS) == differentiable
    if differentiable:      # the first output for the forward, one gradient for each input that gets one
        assert len(REGISTERED[f"{op}_backward"]._schema.returns) == len(DIFFERENTIABLE[op])
        names = [a.name for a in REGISTERED[op]._schema.arguments]
        assert [name for name in names if name in DIFFERENTIABLE[op]] == list(DIFFERENTIABLE[op])


def test_every_backward_belongs_to_an_op():
    assert {name.removesuffix("_backward") for name in BACKWARDS} == set(DIFFERENTIABLE)


# Rule 9: no JIT, no network in the build, no submodule.

def test_no_jit_no_network_no_submodule():
    assert not (ROOT / ".gitmodules").exists()
    assert not re.search(r"urllib|requests|http\.client|socket|git clone|wget|curl", (ROOT / "setup.py").read_text())
    for path in (ROOT / "engram").rglob("*.py"):
        assert "cpp_extension" not in path.read_text(), relative(path)


# Rule 10: comments say why; there is no history, and no path of somebody's machine.

def test_no_leftovers():
    # Put together here, so that this file does not find itself.
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")
    folders = re.compile("|".join(f"/{name}/" for name in ("wo" + "rk", "ho" + "me", "ro" + "ot")))
    texts = [*sources(ROOT / "csrc"), *(p for folder in ("engram", "tests", "benchmarks", "examples", ".ci")
                                        for p in (ROOT / folder).rglob("*.py"))]
    named = ("README.md", "CONTRIBUTING.md", "setup.py", "pyproject.toml", "CMakeLists.txt", ".ci/run")
    texts += [ROOT / name for name in named if (ROOT / name).exists()]
    found = [relative(path) for path in texts if words.search(path.read_text()) or folders.search(path.read_text())]
    assert not found
