"""deploy/kubernetes and deploy/systemd: right by their own schemas, and true to what etc-run does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from etc_agent.agent.settings import JobSettings, Timeouts
from launcher.routes import read

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "etc-run@.service"


def resources(file: str) -> dict[str, dict[str, Any]]:
    """Kind -> resource; each kind is there once."""
    found = list(yaml.safe_load_all((KUBERNETES / file).read_text()))
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = resources("job.yaml")["Job"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def settings(pod: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSettings:
    """What etc-run makes of the pod's command line."""
    (container,) = pod["containers"]
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    found = read([word for word in container["args"]])
    assert isinstance(found, JobSettings)
    return found


@pytest.mark.parametrize("file", ["etcd.yaml", "job.yaml"])
def test_kubernetes_accepts_the_manifests(file: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate (pip)")
    for resource in yaml.safe_load_all((KUBERNETES / file).read_text()):
        validate.validate(resource, "1.32", strict=True)


def test_a_pod_has_more_time_to_end_than_its_node_may_take(pod: dict[str, Any], settings: JobSettings) -> None:
    needed_s = settings.timeouts.drain_s + settings.timeouts.shutdown_grace_s
    assert pod["terminationGracePeriodSeconds"] > needed_s


def test_the_job_understands_its_pods_exit_codes(settings: JobSettings) -> None:
    rules = resources("job.yaml")["Job"]["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert actions == {settings.telemetry.left_exit_code: "Ignore", 2: "FailJob"}
    assert settings.telemetry.left_exit_code != 0, "an index that exits with 0 is complete and never comes back"


def test_a_kubelet_finds_the_probes_and_the_verdict(pod: dict[str, Any], settings: JobSettings) -> None:
    (container,) = pod["containers"]
    (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "metrics")
    assert settings.telemetry.metrics == ("0.0.0.0", port), "a kubelet asks from outside the pod"
    assert str(settings.telemetry.verdict) == container["terminationMessagePath"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_nodes_find_each_other_and_share_memory(pod: dict[str, Any]) -> None:
    service = resources("job.yaml")["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == resources("job.yaml")["Service"]["metadata"]["name"]
    (shm,) = (mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == shm)
    assert volume["emptyDir"]["medium"] == "Memory"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze (Debian: apt-get install systemd)")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/etc-run", str(Path(sys.executable).parent / "etc-run")))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in checked.stderr.splitlines() if "etc-run" in line]
    assert (checked.returncode, ours) == (0, []), checked.stderr


def test_systemd_waits_long_enough_for_the_state_to_be_handed_over() -> None:
    stated = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert float(stated["TimeoutStopSec"]) > Timeouts().drain_s + Timeouts().shutdown_grace_s
    assert stated["KillMode"] == "mixed"
    assert stated["OOMPolicy"] == "continue", "a worker that is killed for memory must not end the whole node"
