"""The real compiler takes every CUDA kernel, where the interpreter would let much pass; no GPU needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {90: 232448}
"""Shared memory that one block may have."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "tests/kernels/cuda_compile.py", str(capability)]
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    sources = "".join(p.read_text() for p in (ROOT / "shared/kernels/cuda").glob("*.py"))
    written = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert {c["kernel"] for c in compiled} == written
    too_large = [c for c in compiled if c["shared_bytes"] > SHARED_BYTES[capability]]
    assert not too_large
