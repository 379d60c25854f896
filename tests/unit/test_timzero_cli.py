"""The command's surface: errors in one line with the right exit code, and no torch."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from timzero.cli import app

DEAD = "http://127.0.0.1:9"


def run(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("command", ["up", "train", "submit", "watch", "report"])
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert command in result.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "configs/none.toml"], 2, "does not exist"),
        (["train", "configs/sort.toml", "--set", "num_step=3"], 2, "num_step"),
        (["train", "configs/sort.toml", "--numerics", "exacty"], 2, "run.numerics"),
        (["up", "--set", "rollouts.threads=2"], 2, "rollouts"),
        (["model", "get", "no-such-model"], 1, "neither a packaged model"),
        (["watch", "demo", "--url", DEAD], 1, "the gateway does not answer"),
        (["report", "demo", "--url", DEAD], 1, "the gateway does not answer"),
        (["submit", "demo", "pyproject.toml", "--url", DEAD], 1, "pyproject.toml:1: not JSON"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(words, code, message, monkeypatch):
    monkeypatch.setattr("timzero.connect.PROBE_DEADLINE_S", 0.3)
    result = run(*words)
    assert result.exit_code == code, result.output
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_a_report_can_be_drawn_again_from_its_data(tmp_path):
    from tests.unit.report_fixture import make_data

    make_data(num_steps=2).save(tmp_path / "report.json")
    result = run("report", str(tmp_path))
    assert result.exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    (tmp_path / "report.json").write_text("{")
    assert run("report", str(tmp_path)).exit_code == 2


def test_model_get_prints_the_directory(tmp_path):
    result = run("model", "get", "tiny-sort", "--to", str(tmp_path / "m"))
    assert result.output.strip() == str(tmp_path / "m")


def test_nothing_that_a_user_types_imports_torch_or_transformers():
    code = (
        "import sys\n"
        "class Ban:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'triton'):\n"
        "            raise ImportError(f'{name} is not for the client')\n"
        "sys.meta_path.insert(0, Ban())\n"
        "import pkgutil, importlib, timzero\n"
        "for m in pkgutil.walk_packages(timzero.__path__, 'timzero.'):\n"
        "    importlib.import_module(m.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
