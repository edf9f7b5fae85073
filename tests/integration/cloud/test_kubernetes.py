"""The manifests of cloud/kubernetes: the run's exit codes, words and times."""

from __future__ import annotations

import pytest
import yaml

import images
import runs
from cloud.attempts import parse
from config.compose import load_config
from config.schema import RunConfig
from training import exits

FOLDER = runs.ROOT / "cloud" / "kubernetes"


def manifest(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def job_of(name: str) -> dict:
    """A Job as Kubernetes has it: the one of job.yaml, or what the JobSet makes."""
    content = manifest(name)
    if content["kind"] == "Job":
        return content
    (replicated,) = content["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{content['metadata']['name']}-{replicated['name']}-0"},
        **replicated["template"],
    }


def container_of(name: str) -> dict:
    (container,) = job_of(name)["spec"]["template"]["spec"]["containers"]
    return container


each = pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])


def rules(name: str) -> list[tuple[str, list[int]]]:
    """Each rule's action and exit codes, in order; no codes where it is about a condition."""
    found = []
    for rule in job_of(name)["spec"]["podFailurePolicy"]["rules"]:
        about = rule.get("onExitCodes", {"values": [], "containerName": "train", "operator": "In"})
        assert (about["containerName"], about["operator"]) == (container_of(name)["name"], "In")
        found.append((rule["action"], about["values"]))
    return found


def test_a_mistake_fails_for_good_and_a_stop_does_not_count():
    fails = ("FailJob", [exits.EXIT_USER_MISTAKE])
    assert rules("job.yaml") == [fails, ("Ignore", [exits.EXIT_AGAIN]), ("Ignore", [])]
    *_, drained = job_of("job.yaml")["spec"]["podFailurePolicy"]["rules"]
    assert drained["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job_of("job.yaml")["spec"]["backoffLimit"] > 0

    assert rules("jobset.yaml") == [fails]  # for another failure, the set starts again
    assert job_of("jobset.yaml")["spec"]["backoffLimit"] == 0
    policy = manifest("jobset.yaml")["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] > 0


@each
def test_the_arguments_are_those_of_the_attempts(name):
    command = container_of(name)["command"]
    assert command[:5] == ["tini", "--", "python", "-m", "cloud.attempts"]
    options, launch = parse([*command[5:], *container_of(name)["args"]])
    assert options.notice == "auto"
    assert options.restarts == 0  # Kubernetes does that
    at = launch.index("train.py")
    config = load_config(launch[at + 1 :])
    assert config.hub.repo_id == "me/run"
    (file,) = (word for word in launch[:at] if word.startswith("--config_file="))
    assert (runs.ROOT / file.removeprefix("--config_file=")).is_file()


@each
def test_a_pod_has_time_to_stop_a_secret_token_and_the_user_and_check_of_the_image(name):
    spec, container = job_of(name)["spec"], container_of(name)
    pod, dockerfile = spec["template"]["spec"], FOLDER.parent / "Dockerfile"
    assert pod["terminationGracePeriodSeconds"] > RunConfig().grace_seconds
    assert (spec["podReplacementPolicy"], pod["restartPolicy"]) == ("Failed", "Never")
    variables = {one["name"]: one["valueFrom"] for one in container["env"]}
    assert variables["HF_TOKEN"]["secretKeyRef"] == {"name": "hf-token", "key": "token"}
    made = "kubectl create secret generic hf-token --from-literal=token=$HF_TOKEN"
    assert made in (FOLDER / name).read_text()
    user = pod["securityContext"]["runAsUser"]
    assert f"useradd --create-home --uid {user} " in dockerfile.read_text()
    if name == "job.yaml":
        check = ["sh", "-c", images.instructions(dockerfile)["HEALTHCHECK"]]
        assert container["livenessProbe"]["exec"]["command"] == check
        start = container["startupProbe"]
        assert start["exec"]["command"] == check
        seconds = start["periodSeconds"] * start["failureThreshold"]
        assert seconds >= RunConfig().start_timeout_seconds


def test_the_machines_of_a_set_meet_at_the_first_one():
    content, spec = manifest("jobset.yaml"), job_of("jobset.yaml")["spec"]
    container, set_name = container_of("jobset.yaml"), content["metadata"]["name"]
    args = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    machines, gpus = int(args["--num_machines"]), container["resources"]["limits"]["nvidia.com/gpu"]
    first = f"{set_name}-{content['spec']['replicatedJobs'][0]['name']}-0-0.{set_name}"
    assert args["--main_process_ip"] == first
    assert content["spec"]["network"]["enableDNSHostnames"]
    (port,) = container["ports"]
    assert int(args["--main_process_port"]) == port["containerPort"]
    assert (spec["completions"], spec["parallelism"]) == (machines, machines)
    assert int(args["--num_processes"]) == machines * gpus
    assert (args["--machine_rank"], spec["completionMode"]) == ("$(MACHINE_RANK)", "Indexed")
    (rank,) = (one for one in container["env"] if one["name"] == "MACHINE_RANK")
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == index
