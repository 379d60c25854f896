"""What the architecture promises about the source itself: who imports whom, what starts without torch, what is never done."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grpc_tools
import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services", "shared", "timzero")
LIGHT = {"shared.wire", "shared.metrics", "shared.config", "shared.process", "shared.masking"}
COMPUTE = {"shared.kernels", "shared.models", "shared.transfer"}

MAY_IMPORT = {
    "services.gateway": LIGHT,
    "services.weight_sync": LIGHT,
    "services.rollout": LIGHT | COMPUTE,
    "services.trainer": LIGHT | COMPUTE,
    "timzero": LIGHT,
    "shared.models": {"shared.kernels", "shared.config"},
    "shared.kernels": set(),
    "shared.transfer": {"shared.wire", "shared.kernels"},
    "shared.wire": LIGHT,
    "shared.metrics": set(),
    "shared.process": {"shared.masking"},
    "shared.config": {"shared.masking"},
    "shared.masking": set(),
}
"""Inside the project, besides itself. Arrows point down only."""

TORCH_FREE = ("services.gateway", "services.weight_sync", "timzero", *sorted(LIGHT))


def sources(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py") if "/wire/pb/" not in p.as_posix())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too; `from a import b` yields a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def owner(name: str) -> str | None:
    return next((p for p in MAY_IMPORT if is_in(name, p)), None)


def calls(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, dotted name, node) of every call."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def test_imports_follow_the_table() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        package = owner(module_name(path))
        if package is None:
            assert path.name == "__init__.py", f"{path} belongs to no package of the table"
            assert not list(imports(path)), f"{path} imports"
            continue
        allowed = MAY_IMPORT[package] | {package}
        for name in imports(path):
            if name.split(".")[0] in PACKAGES and not any(is_in(name, a) for a in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_kernels_import_torch_triton_numpy_and_the_standard_library_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("shared/kernels")
        for name in imports(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top not in ("torch", "triton", "numpy")
        and not is_in(name, "shared.kernels")
    ]
    assert not wrong, wrong


def test_the_torch_free_environment_has_no_torch(torch_free_environ: dict[str, str]) -> None:
    done = run_python("-c", "import torch", environ=torch_free_environ)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def run_python(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_gateway_weight_sync_client_and_wire_import_without_torch(torch_free_environ: dict[str, str]) -> None:
    names = [module_name(p) for p in sources(*PACKAGES) if any(is_in(module_name(p), t) for t in TORCH_FREE)]
    names = [n for n in names if not n.endswith("__main__")]
    assert {"timzero.client", "services.gateway.app", "services.weight_sync.server", "shared.wire.codec"} <= set(names)
    done = run_python(
        "-c", f"import importlib; [importlib.import_module(n) for n in {names!r}]", environ=torch_free_environ
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["-m", "services.gateway"], ["-m", "services.weight_sync"], ["-m", "timzero.cli"]])
def test_help_works_without_torch(words: list[str], torch_free_environ: dict[str, str]) -> None:
    done = run_python(*words, "--help", environ=torch_free_environ)
    assert done.returncode == 0, done.stderr
    assert "sage" in done.stdout


def test_generated_protobufs_are_up_to_date(tmp_path: Path) -> None:
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "protos").glob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    words = ["-m", "grpc_tools.protoc", "-Ishared/wire/pb=protos", f"-I{include}", *out, *protos]
    done = run_python(*words, environ=dict(os.environ))
    assert done.returncode == 0, done.stderr
    fresh = {p.name: p.read_bytes() for p in (tmp_path / "shared/wire/pb").iterdir()}
    committed = {p.name: p.read_bytes() for p in (ROOT / "shared/wire/pb").glob("*_pb2*.py*")}
    assert set(fresh) == set(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make protos`: {stale} differ from protos/"


PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OBJECT_COLLECTIVES = re.compile(
    r"(broadcast_object_list|scatter_object_list|all_gather_object|gather_object|(send|recv)_object_list)$"
)


def test_nothing_is_pickled() -> None:
    wrong = []
    for path in sources(*PACKAGES, "benchmarks"):
        where = path.relative_to(ROOT)
        wrong += [f"{where} imports {name}" for name in imports(path) if name.split(".")[0] in PICKLERS]
        for line, name, call in calls(path):
            words = {k.arg: ast.unparse(k.value) for k in call.keywords}
            if name == "torch.load" and words.get("weights_only") != "True":
                wrong.append(f"{where}:{line} torch.load without weights_only=True")
            if words.get("allow_pickle") == "True" or OBJECT_COLLECTIVES.search(name):
                wrong.append(f"{where}:{line} {name} pickles")
    assert not wrong, wrong


def test_nothing_sleeps_in_place_of_a_signal() -> None:
    wrong = []
    # timzero is left out: its client waits out the Retry-After that a server asked for.
    for path in sources("services", "shared", "tests", "benchmarks"):
        where = path.relative_to(ROOT)
        wrong += [f"{where} imports {name}" for name in imports(path) if name == "time.sleep"]
        wrong += [f"{where}:{line}" for line, name, _ in calls(path) if name == "time.sleep"]
    assert not wrong, wrong


def test_no_file_is_over_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*PACKAGES, "tests", "benchmarks")
        if (lines := path.read_text().count("\n")) > 500
    }
    assert not long, long


def test_metrics_are_made_in_one_place() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        kinds = {name.split(".")[-1] for name in imports(path) if is_in(name, "prometheus_client")}
        if module_name(path) != "shared.metrics.server":
            wrong += [
                f"{path.relative_to(ROOT)}:{line} makes a {name}" for line, name, _ in calls(path) if name in kinds
            ]
    made = {name for _, name, _ in calls(ROOT / "shared/metrics/server.py")}
    assert "Histogram" in made, "the check looks for what is really called"
    assert not wrong, wrong
