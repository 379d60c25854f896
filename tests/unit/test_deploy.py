"""The deploy folder agrees with the code: configuration keys, ports, files, metric names and labels. No engine is needed."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from shared.config import load
from shared.metrics import names
from shared.metrics.names import Metric
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy/compose/compose.yaml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/timzero.json"
CONFIGS = {
    "gateway": "GatewayConfig",
    "weight_sync": "WeightSyncConfig",
    "rollout": "RolloutConfig",
    "trainer": "TrainerConfig",
}
OURS = {"gateway": "gateway", "weight_sync": "weight_sync", "rollout": "rollout", "rollout-gpu": "rollout",
        "trainer": "trainer", "trainer-gpu": "trainer"}  # fmt: skip
"""Compose service -> the service whose image it runs."""


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of every line, continuations joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/docker/Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line.strip()]  # type: ignore[misc]


def image_environment() -> dict[str, str]:
    words = shlex.split([rest for name, rest in dockerfile() if name == "ENV"][-1])
    return dict(word.split("=", 1) for word in words)


def compose() -> dict[str, Any]:
    return yaml.safe_load(substitute(COMPOSE.read_text(), {"GATEWAY_KEY": f"admin:{'0' * 64}:admin"}))


def substitute(text: str, environment: dict[str, str]) -> str:
    """Compose's `${NAME:-default}` and `${NAME:?message}`; `$$` stays a dollar."""
    pattern = r"(?<!\$)\$\{(\w+)(?::([-?])([^}]*))?\}"

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if environment.get(name):
            return environment[name]
        assert kind == "-", f"{name} has no default"
        return rest

    return re.sub(pattern, value, text).replace("$$", "$")


def service_config(service: str, overrides: list[str], environment: dict[str, str]) -> Any:
    module = importlib.import_module(f"services.{service}.config")
    return load(getattr(module, CONFIGS[service]), service=service, overrides=overrides, environ=environment)


@pytest.mark.parametrize("name", OURS)
def test_every_service_accepts_what_compose_gives_it(name: str) -> None:
    service, entry = OURS[name], compose()["services"][name]
    environment = image_environment() | entry.get("environment", {})
    config = service_config(service, entry["command"], environment)
    assert getattr(config, "metrics_host", config.host) == config.host == "0.0.0.0"
    assert config.metrics_port == 9100
    assert (config.health_port if service == "gateway" else config.port) == 7000
    if service == "gateway":
        assert len(config.keys) == 1, "a bind that is not loopback needs a key"
        assert config.port == 8000
    addresses = [word for word in entry["command"] if "://" in word or re.search(r"=[\w-]+:\d+$", word)]
    assert bool(addresses) == (service != "weight_sync"), "all but weight_sync call somebody"
    for address in addresses:
        host, port = re.search(r"(?:=|//)([\w-]+):(\d+)", address).groups()  # type: ignore[union-attr]
        assert host in compose()["services"], address
        assert int(port) == {"valkey": 6379}.get(host, 7000), address


def test_compose_follows_the_schema_of_the_compose_specification() -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_waits_for_health_and_its_parts_exist() -> None:
    whole = compose()
    services, volumes = whole["services"], whole["volumes"]
    for name, entry in services.items():
        assert entry["restart"] == "unless-stopped"
        for needed, how in entry.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert needed in OURS or "healthcheck" in services[needed], (
                f"{name} waits for {needed}, which has no health check"
            )
        for volume in entry.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith(".."):
                assert (COMPOSE.parent / source).is_dir(), volume
            elif not source.startswith("."):
                assert source in volumes, volume
        for port in entry.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to the network"
    assert not services["valkey"].get("ports")
    assert services["valkey"]["command"][1:3] == ["--appendonly", "yes"]
    assert {"cpu", "gpu", "monitoring"} == {p for entry in services.values() for p in entry.get("profiles", [])}


def test_every_variable_of_compose_is_in_the_example_and_no_secret_is() -> None:
    example = dict(re.findall(r"^(\w+)=(.*)$", (COMPOSE.parent / ".env.example").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE.read_text()))
    assert used == set(example) - {"COMPOSE_PROFILES"}
    assert example["GATEWAY_KEY"] == ""
    tracked = subprocess.run(
        ["git", "ls-files", "deploy"], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    assert "deploy/compose/.env.example" in tracked
    assert "deploy/compose/.env\n" not in tracked


def test_the_image_runs_unprivileged_and_reports_its_health() -> None:
    lines = dockerfile()
    assert [rest for name, rest in lines if name == "USER"] == ["timzero"]
    order = [name for name, _ in lines]
    assert order.index("USER") < order.index("HEALTHCHECK") < order.index("ENTRYPOINT")
    health = next(rest for name, rest in lines if name == "HEALTHCHECK")
    assert '"shared.wire.probe", "127.0.0.1:7000"' in health
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name, rest in lines:
        if name == "COPY" and "--from" not in rest:
            top = rest.split()[0].split("/")[0]
            assert (ROOT / top).exists()
            assert f"!{top}" in ignored


def copied_files(service: str, target: Path) -> None:
    """What the Dockerfile copies for a service, laid out as in the image."""
    copies = [rest.replace("${SERVICE}", service).split() for name, rest in dockerfile() if name == "COPY"]
    for source, to in (c for c in copies if c[0].split("/")[0] in ("shared", "services")):
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target / to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (target / to).mkdir(parents=True)
            shutil.copy(ROOT / source, target / to)


@pytest.mark.parametrize("service", CONFIGS)
def test_the_files_of_an_image_are_enough_to_start_its_service(service: str, tmp_path: Path) -> None:
    copied_files(service, tmp_path)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "", "HOME": str(tmp_path)}
    words = [sys.executable, "-m", f"services.{service}", "--help"]  # -m looks into the working directory first
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert f"python -m services.{service}" in done.stdout


def test_torch_is_in_the_images_that_compute_and_in_no_other(tmp_path: Path) -> None:
    run = next(rest for name, rest in dockerfile() if name == "RUN" and "tomllib" in rest)
    command = run.split(" > ")[0].replace("/build/", f"{ROOT}/")
    for service in CONFIGS:
        environment = os.environ | {"SERVICE": service}
        words = ["sh", "-c", command.replace("python -c", f"{shlex.quote(sys.executable)} -c")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        requirements = {re.split(r"[^\w-]", line)[0] for line in done.stdout.splitlines()}
        assert "grpcio" in requirements, done.stderr
        assert ("torch" in requirements) == (service in ("rollout", "trainer"))


def metric_of(name: str) -> Metric:
    """The metric that exports a series of this name. Raises AssertionError."""
    for metric in (m for m in vars(names).values() if isinstance(m, Metric)):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}.get(metric.kind, ("",))
        if name in {metric.name + s for s in suffixes}:
            return metric
    raise AssertionError(f"no metric exports {name}")


TARGET_LABELS = {"job", "instance"}


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector of a parsed expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for attribute in ("lhs", "rhs", "expr", "vector_selector", "param"):
        inner = getattr(node, attribute, None)
        if inner is not None:
            yield from selectors(inner)
    for argument in getattr(node, "args", None) or []:
        yield from selectors(argument)


def labels_of(name: str) -> set[str]:
    if name == "up":
        return TARGET_LABELS
    return set(metric_of(name).labels) | TARGET_LABELS | ({"le"} if name.endswith("_bucket") else set())


def made_plain(text: str) -> str:
    """With Grafana's variables filled in."""
    return text.replace("$__rate_interval", "1m").replace("$run", "demo")


def check_expression(text: str) -> None:
    """Raises AssertionError unless every metric exists and every label named in the expression is one of theirs."""
    plain = made_plain(text)
    found = list(selectors(promql.parse(plain)))
    assert found, text
    for selector in found:
        matched = {m.name for m in selector.matchers.matchers}
        assert matched <= labels_of(selector.name), (
            f"{text}: {selector.name} has no labels {matched - labels_of(selector.name)}"
        )
    known = set().union(*(labels_of(s.name) for s in found))
    for grouping in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", plain):
        assert {g.strip() for g in grouping.split(",") if g.strip()} <= known, text


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/timzero.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_a_panel_asks_for_metrics_and_labels_that_exist(expression: str) -> None:
    check_expression(expression)


def test_every_metric_has_a_panel() -> None:
    asked = {s.name for text in dashboard_expressions() for s in selectors(promql.parse(made_plain(text)))}
    shown = {metric_of(name).name for name in asked}
    assert not {m.name for m in vars(names).values() if isinstance(m, Metric)} - shown, (
        "add a panel to deploy/grafana/generate_dashboard.py"
    )


def test_the_dashboard_is_up_to_date() -> None:
    document = runpy.run_path(str(ROOT / "deploy/grafana/generate_dashboard.py"))["document"]
    assert DASHBOARD.read_text() == document(), "run `make docs`"


@pytest.mark.parametrize("rule", rules(), ids=lambda r: r["alert"])
def test_an_alarm_asks_for_what_exists_and_is_explained(rule: dict[str, Any]) -> None:
    check_expression(rule["expr"])
    labels = set().union(*(labels_of(s.name) for s in selectors(promql.parse(rule["expr"]))))
    assert set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))) <= labels
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["alert"] in (ROOT / "docs/operations.md").read_text(), "docs/operations.md says what to do about it"


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(timzero_sampled_token_total[5m])",
        'timzero_step{replica="a"}',
        "sum by (reason) (timzero_step)",
        "histogram_quantile(0.5, rate(timzero_step_seconds[5m]))",
    ],
)
def test_the_check_of_expressions_can_fail(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_expression(wrong)


def test_panels_do_not_overlap_and_use_the_provisioned_source() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({p["id"] for p in panels}) == len(panels)
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert {t["datasource"]["uid"] for p in panels for t in p.get("targets", [])} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_grafana_finds_the_dashboard_where_compose_mounts_it() -> None:
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/timzero.yaml").read_text())[
        "providers"
    ]
    volumes = compose()["services"]["grafana"]["volumes"]
    mounts = {v.split(":")[1]: (COMPOSE.parent / v.split(":")[0]).resolve() for v in volumes if v.startswith("..")}
    assert mounts[provider["options"]["path"]] == DASHBOARD.parent
    assert mounts["/etc/grafana/provisioning"] == ROOT / "deploy/grafana/provisioning"
    home = compose()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (mounts[str(Path(home).parent)] / Path(home).name).is_file()


def test_prometheus_scrapes_every_service_on_its_metrics_port() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    scraped = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    assert set(scraped) == set(CONFIGS)
    services = compose()["services"]
    for job, target in scraped.items():
        aliases = {
            a
            for n, s in services.items()
            if OURS.get(n) == job
            for a in (n, *s.get("networks", {}).get("default", {}).get("aliases", []))
        }
        assert target["names"] == [job]
        assert job in aliases
        assert target["port"] == 9100
    assert list((ROOT / "deploy/prometheus").glob(config["rule_files"][0]))


def test_extras_exist_for_every_service() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(CONFIGS) <= set(extras)
