"""The files of docs/clusters: what can be checked of them without a Kubernetes and a cloud."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from chorusline.runtime.commands.arguments import names_function, workers
from tests import ROOT

FOLDER = ROOT / "docs/clusters"


def loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_ray_up_takes_the_autoscalers_file() -> None:
    config = loaded("autoscaler.yaml")
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="head_node_typ"):
        validate_config(prepare_config(config | {"head_node_typ": "head"}))
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert f"ray[default]=={ray.__version__}" in config["setup_commands"][0]


def test_the_image_is_that_of_the_kuberay_job_and_what_it_copies_is_there() -> None:
    """It cannot be built here: what it names is looked up."""
    image = (FOLDER / "Dockerfile").read_text()
    head = loaded("kuberay.yaml")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert f"-t {head['containers'][0]['image']} ." in image
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"RAY_IMAGE=rayproject/ray:{ray.__version__}-py3" in image
    assert f"\nray=={ray.__version__}\n" in constraints
    assert re.search(r"^torch==", constraints, re.MULTILINE)
    copied = re.findall(r"^COPY --chown=ray:users (.+) \S+$", image, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert len(names) == 8 and all((ROOT / name).exists() for name in names)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (
        re.search(r"^ARG EXTRA=\[(.+)\]$", image, re.MULTILINE)[1]
        in extras[  # type: ignore[index]
            "optional-dependencies"
        ]
    )


def test_the_kuberay_job_is_of_one_version_and_runs_our_command() -> None:
    """Its fields were checked against the operator's own schema when it was written."""
    job = loaded("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, run, function, flag, count, *_ = job["spec"]["entrypoint"].split()
    assert (program, run, flag) == ("chorusline", "run", "--workers")
    fewest, most = workers(count)
    assert names_function([function])
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    (group,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for pod in pods:
        (mount,) = pod["containers"][0]["volumeMounts"]
        (volume,) = pod["volumes"]
        assert mount == {"mountPath": "/dev/shm", "name": volume["name"]}
        assert volume["emptyDir"]["medium"] == "Memory"
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert group["minReplicas"] * gpus >= fewest and group["maxReplicas"] * gpus >= most
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in environment.values()), "Ray wants strings"


def test_every_sample_of_a_cluster_asks_for_a_token() -> None:
    auto = loaded("autoscaler.yaml")
    starts = [*auto["head_start_ray_commands"], *auto["worker_start_ray_commands"]]
    starts = [line for line in starts if "ray start" in line]
    assert len(starts) == 2 and all(one.startswith("RAY_AUTH_MODE=token ") for one in starts)
    assert "~/.ray/auth_token" in auto["file_mounts"]
    kube = loaded("kuberay.yaml")["spec"]["rayClusterSpec"]
    assert kube["authOptions"] == {"mode": "token"}
    for page in (ROOT / "docs").rglob("*.*"):
        if page.suffix in (".md", ".yaml"):
            assert "RAY_AUTH_MODE=disabled" not in page.read_text(), page
